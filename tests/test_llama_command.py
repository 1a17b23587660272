"""Test `sp-core generate` and `sp-core logits`.

The text is the same for any number of ranks. A mistake is reported in one line.
"""

import json
import math
import os
import re
import select
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from llama_cases import Case
from studies.commands import outside, printed
from test_llama_checkpoint import written

from sp_core.__main__ import main
from sp_core.errors import CheckpointError
from sp_core.launch import command as launcher
from sp_core.llama import LlamaConfig, byte_tokenizer

pytestmark = pytest.mark.mpi_skip  # these start mpiexec, which must not be done inside mpiexec

CASE = Case((6, 3), layers=1, vocab=256, seed=4)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Make the folder of a model whose tokens are bytes."""
    written(CASE, tmp_path)
    byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def command(name: str, folder: Path, *more: str) -> tuple[str, ...]:
    words = ("--model", str(folder), "--prompt", "def f(", *more)
    return (sys.executable, "-m", "sp_core", name, *words)


@pytest.mark.every_mpi
@pytest.mark.starts_mpi
def test_a_token_is_shown_before_its_line_ends(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rank that is started ends only after this process has read the rank's first letter."""
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


def test_the_probabilities_of_all_tokens_add_up_to_one(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Four decimals of each logarithm are shown, in whatever dtype the model computes."""
    assert main(command("logits", folder, "--dtype", "bfloat16", "--top", "256")[3:]) == 0
    logs = [float(line.split()[1]) for line in capsys.readouterr().out.splitlines()[1:]]
    assert len(logs) == 256
    assert sum(map(math.exp, logs)) == pytest.approx(1, rel=0, abs=math.expm1(5.1e-5))


def test_a_command_without_prompts_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "--model", str(folder)]) == 2
    assert "pass --prompt or --prompt-file" in capsys.readouterr().err


def test_generation_config_says_which_tokens_end_a_text(folder: Path) -> None:
    for ends, wanted in ((0, (0,)), ([7, 8], (7, 8)), ([], ()), (None, CASE.stops)):
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
        assert LlamaConfig.from_folder(folder).eos_token_id == wanted
    (folder / "generation_config.json").write_text('{"eos_token_id": "</s>"}')
    with pytest.raises(CheckpointError, match=r"generation_config\.json: eos_token_id='</s>' was"):
        LlamaConfig.from_folder(folder)


TWO = ("--tp", "2", "--tp-sp", "--algorithm", "all_reduce=ring,all_gather=bruck")


@pytest.mark.parametrize("ways", [(), TWO], ids=["alone", "with two ranks"])
def test_another_process_writes_what_this_one_writes(
    folder: Path, ways: tuple[str, ...], capfd: pytest.CaptureFixture[str]
) -> None:
    """A character that the output cannot show is escaped. Each process hashes texts its own way.

    The working directory is the model's folder, whose Python files are not run.
    """
    (folder / "tokenizers.py").write_text("raise RuntimeError")
    drawn = ("--temperature", "1", "--top-k", "50", "--top-p", "0.9", "--seed", "5")
    stops = [f"--stop=never {number}" for number in range(9)]
    words = command("generate", folder, "--max-tokens", "12", *drawn, *stops)
    assert main(words[3:]) == 0
    text = capfd.readouterr().out.encode("ascii", "backslashreplace").decode()
    assert "\\" in text
    ascii_only = outside(PYTHONIOENCODING="ascii", PYTHONHASHSEED="random")
    code, found = printed([words[0], "-P", *words[1:], *ways], folder, ascii_only, 120)
    assert (code, found) == (0, re.sub("\r\n?", "\n", text))  # `printed` turns line ends into \n


@pytest.mark.parametrize("name", ["generate", "logits"])
def test_an_output_that_cannot_be_written_is_one_line(name: str, folder: Path) -> None:
    words, env = command(name, folder), outside(PYTHONUNBUFFERED="")
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            words, env=env, stdout=full, stderr=subprocess.PIPE, check=False, timeout=120
        )
    told = b"sp-core: the output cannot be written: [Errno 28] No space left on device.\n"
    assert (done.returncode, done.stderr) == (1, told)


def test_what_all_ranks_refuse_is_one_line(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    words = command("generate", folder, "--tp", "2")
    code, found = printed(words, folder, outside(), 120)
    assert (code, found.count("\n")) == (2, 1), found
    assert found.startswith("sp-core: ")


def test_logits_know_no_replicas(folder: Path) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(command("logits", folder, "--dp", "2")[3:])
