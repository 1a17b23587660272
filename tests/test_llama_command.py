"""`sp-core generate` and `sp-core logits`.

The same text for any number of ranks, and one clear line where something is wrong.
"""

from __future__ import annotations

import io
import json
import os
import re
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, call

import pytest
import torch
from llama_cases import Case
from test_llama_checkpoint import SECOND, written

from sp_core import inference
from sp_core.__main__ import main, make_parser
from sp_core.errors import CheckpointError
from sp_core.launch import command as launcher
from sp_core.llama import LlamaConfig, byte_tokenizer
from sp_core.llama.text import read_stop_strings
from sp_core.machine import JOB_VARIABLES
from sp_core.mesh import Mesh
from sp_core.testing import run_threads

pytestmark = pytest.mark.mpi_skip  # these start mpiexec, which must not be done inside mpiexec

ROOT = Path(__file__).resolve().parent.parent
CASE = Case((6, 3), layers=1, vocab=256, seed=4)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model of bytes."""
    written(CASE, tmp_path)
    byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def ran(*words: str, given: str = "") -> tuple[int, str, str]:
    """Return exit code, output and errors of a command with this standard input."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    answer = subprocess.run(
        words,
        cwd=ROOT,
        env=environment,
        input=given,
        capture_output=True,
        timeout=120,
        check=False,
        encoding="utf-8",
        errors="replace",
    )
    return answer.returncode, answer.stdout, answer.stderr


def command(name: str, folder: Path, *more: str) -> tuple[str, ...]:
    return (
        sys.executable,
        "-m",
        "sp_core",
        name,
        "--model",
        str(folder),
        "--prompt",
        "def f(",
        *more,
    )


def test_two_ranks_write_what_one_writes(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    choice = [
        "--max-tokens",
        "12",
        "--temperature",
        "1",
        "--top-k",
        "50",
        "--top-p",
        "0.9",
        "--seed",
        "5",
    ]
    ways = ["--tp", "2", "--tp-sp", "--algorithm", "all_reduce=ring,all_gather=bruck"]
    assert main(command("generate", folder, *choice)[3:]) == 0
    one = capfd.readouterr().out
    code, two, errors = ran(*command("generate", folder, *choice, *ways))
    assert code == 0, errors
    assert len(one) > 5
    assert two == re.sub("\r\n?", "\n", one)  # as the pipe of the two ranks is read


@pytest.mark.every_mpi
@pytest.mark.starts_mpi
def test_a_token_is_shown_before_its_line_ends(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rank of this launch ends after this process has seen what it has printed."""
    waits = "import sys; print('a', end='', flush=True); print('b' * len(open(sys.argv[1]).read()))"
    seen = tmp_path / "seen"
    os.mkfifo(seen)

    def run(ranks: int, words: list[str], *, mpi_args: list[str], **_: Any) -> int:
        rank = ("-n", "1", sys.executable, "-c", waits, str(seen))
        launch = subprocess.Popen(
            [launcher.find_mpiexec(), *mpi_args, *rank],
            env=launcher.environment(tmp_path),
            stdout=subprocess.PIPE,
        )
        assert launch.stdout is not None
        with launch, launch.stdout as pipe:
            shown = select.select([pipe], [], [], 20)[0]
            early = os.read(pipe.fileno(), 9) if shown else b""
            seen.write_text("two")
            assert (early, pipe.read()) == (b"a", b"bbb\n")
        return launch.returncode

    monkeypatch.setattr(launcher, "run", run)
    assert main(command("generate", folder, "--tp", "2")[3:]) == 0


def test_logits_of_several_prompts_inside_a_job(folder: Path) -> None:
    """Over a ring, the two most likely tokens after each."""
    launch = (sys.executable, "-m", "sp_core.testing.launch", "-n", "2", "--")
    code, text, errors = ran(
        *launch, *command("logits", folder, "--prompt", "x", "--ring", "2", "--top", "2")
    )
    assert code == 0, errors
    lines = text.splitlines()
    assert [line for line in lines if line.startswith("[")] == ["[0]", "[1]"]
    assert len(lines) == 6
    prompt = torch.tensor([[*b"def f("]])
    wanted = CASE.logits(prompt)[0, -1].topk(2).indices.tolist()
    assert [int(line.split()[0]) for line in lines[1:3]] == wanted


def test_every_rank_continues_what_standard_input_says(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(command("generate", folder, "--prompt", "x y")[3:]) == 0
    wanted = re.sub("\r\n?", "\n", capfd.readouterr().out)
    code, found, errors = ran(
        *command("generate", folder, "--prompt-file", "-", "--ring", "2"), given="x y"
    )
    assert (code, found) == (0, wanted), errors


def test_a_command_without_prompts_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "--model", str(folder)]) == 2
    assert "pass --prompt or --prompt-file" in capsys.readouterr().err


def test_generation_config_says_which_tokens_end_a_text(folder: Path) -> None:
    for ends, wanted in ((7, (7,)), ([7, 8], (7, 8)), (None, CASE.stops)):
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
        assert LlamaConfig.from_folder(folder).eos_token_id == wanted
    for texts in (5, [5], [""], {"a": 1}):
        (folder / "generation_config.json").write_text(json.dumps({"stop_strings": texts}))
        with pytest.raises(CheckpointError, match="needed a text, a list of texts, or null"):
            read_stop_strings(folder)


class Stdin(io.StringIO):
    """Standard input that may be read once, if at all."""

    def read(self, size: int | None = -1) -> str:
        text, given = super().read(), self.getvalue()
        assert text == given != "", "it was read in vain"
        return text


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What mpiexec would have been started with, and the text of the last file that it names."""
    found: dict[str, Any] = {}

    def run(ranks: int, words: list[str], **more: Any) -> int:
        text = Path(words[-1]).read_text() if Path(words[-1]).exists() else None
        found.update(ranks=ranks, words=words, text=text, **more)
        return 7

    monkeypatch.setattr(launcher, "run", run)
    monkeypatch.setattr(launcher, "streaming", lambda: ["--at-once"])
    monkeypatch.setattr(signal, "signal", lambda *given: found.update(signal=given))
    for name in JOB_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return found


@pytest.mark.parametrize(("given", "text"), [("", None), ("x y", "x y")])
def test_ranks_get_the_same_words_and_a_file_with_standard_input(
    given: str,
    text: str | None,
    folder: Path,
    started: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "stdin", Stdin(given))
    more = ["--prompt", "-", "--timeout", "9", "--tp", "3", "--ring", "2"]
    words = [*command("generate", folder, *more, "--prompt-file", "-" if given else "none")[3:]]
    assert main(words) == 7
    words[-1] = started["words"][-1] if given else "none"
    assert started["words"] == [sys.executable, "-m", "sp_core", *words]
    assert (started["ranks"], started["timeout"], started["text"]) == (6, 9.0, text)
    assert started["mpi_args"] == ["--at-once"]
    number, handler = started["signal"]
    with pytest.raises(SystemExit) as stop:
        handler(number, None)
    assert (number, stop.value.code) == (signal.SIGTERM, 143)


def test_an_interrupt_ends_a_launch_with_its_code(
    folder: Path, started: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher, "run", Mock(side_effect=KeyboardInterrupt))
    assert main(command("generate", folder, "--tp", "2")[3:]) == 130


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
def test_prompts_are_those_of_options_files_and_standard_input(
    chat: bool, dtype: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a chat each is put into the template, which has the special tokens already."""
    (tmp_path / "text").write_text("bb")

    def encode(text: str, *, add_special_tokens: bool) -> Any:
        return SimpleNamespace(ids=[text, add_special_tokens])

    tokenizer, loaded = SimpleNamespace(encode=encode), Mock(return_value="model")
    reading: dict[str, Callable[..., Any]] = {
        "read_tokenizer": {"dir": tokenizer}.__getitem__,
        "read_stop_strings": {"dir": ["stop"]}.__getitem__,
        "chat_prompt": lambda folder, text: f"<{folder} {text}>",
        "load": loaded,
    }
    for name, read in reading.items():
        monkeypatch.setattr(inference, name, read)
    monkeypatch.setattr(sys, "stdin", Stdin("ccc"))
    files = ["--prompt-file", str(tmp_path / "text"), "--prompt-file", "-"]
    words = ["generate", "--model", "dir", "--prompt", "a", *files, "--scheme", "ring", "--tp-sp"]
    words += ["--chat"] * chat + (["--dtype", dtype] if dtype else [])
    options = make_parser().parse_args(words)

    def body(comm: Any) -> tuple[Any, ...]:
        with Mesh(comm, tp=1) as mesh:
            found = inference._prepare(options, mesh)
            wanted = getattr(torch, dtype) if dtype else None
            loaded.assert_called_once_with("dir", mesh, dtype=wanted, scheme="ring", tp_sp=True)
        return found

    texts = [f"<dir {text}>" if chat else text for text in ("a", "bb", "ccc")]
    tokens = [[text, not chat] for text in texts]
    assert run_threads(1, body) == [(tokenizer, tokens, ["stop"], "model")]


def test_what_one_rank_finds_wrong_ends_the_job(folder: Path) -> None:
    (folder / SECOND).unlink()
    code, _, errors = ran(*command("generate", folder, "--tp", "2"))
    assert code == 2
    assert errors.count(f"{SECOND} is missing, of 2") == 1


def test_logits_know_no_replicas(folder: Path) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(command("logits", folder, "--dp", "2")[3:])


REFUSED: dict[str, tuple[str, tuple[str, ...]]] = {
    "too many ranks": ("7 tensor ranks are too many for num_attention_heads=6", ("--tp", "7")),
    "too many stages": ("2 stages", ("--pp", "2")),
    "no ranks": ("each needs at least 1", ("--ring", "0")),
    "an unknown algorithm": ("'bubble'", ("--tp", "2", "--algorithm", "bubble")),
    "a file that is not there": ("nothing cannot be read as text", ("--prompt-file", "nothing")),
    "an empty stop string": ("none of them empty", ("--stop", "")),
    "a chat with a model without template": ("has no chat template", ("--chat",)),
}


@pytest.mark.parametrize("what", sorted(REFUSED))
def test_what_is_known_before_is_refused_before(
    folder: Path,
    what: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(launcher, "run", lambda *given, **more: pytest.fail("started in vain"))
    text, options = REFUSED[what]
    assert main(command("generate", folder, *options)[3:]) == 2
    assert text in capsys.readouterr().err


def test_a_folder_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command("logits", tmp_path / "nothing", "--tp", "2")[3:]) == 2
    assert "config.json is not there" in capsys.readouterr().err
