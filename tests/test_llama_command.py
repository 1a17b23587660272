"""`sp-core generate` and `sp-core logits`.

The same text for any number of ranks, and one clear line where something is wrong.
"""

from __future__ import annotations

import json
import os
import re
import select
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from llama_cases import Case
from test_llama_checkpoint import SECOND, written

from sp_core.__main__ import main
from sp_core.launch import command as launcher
from sp_core.llama import LlamaConfig, byte_tokenizer

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
