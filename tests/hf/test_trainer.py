"""transformers' Trainer on four ranks, started by mpiexec, against Trainer on one process."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from sp_core.launch.command import run

FOLDER = Path(__file__).parent


def losses(ranks: int, *arguments: str) -> list[list[float]]:
    """The losses of each rank, from the program that writes them to its last argument."""
    program = [sys.executable, "-W", "ignore", str(FOLDER / "losses.py"), *arguments]
    assert run(ranks, program, timeout=300) == 0
    found: list[list[float]] = json.loads(Path(arguments[-1]).read_text())
    assert len(found) == ranks
    return found


@pytest.mark.parametrize(("kind", "scheme"), [("mistral", "hybrid"), ("qwen3_moe", "ulysses")])
def test_twenty_steps_have_the_same_losses(kind: str, scheme: str, tmp_path: Path) -> None:
    """In float64, with accumulation, clipping, and packed documents with checkpointing."""
    (want,) = losses(1, kind, scheme, str(tmp_path / "one"))
    assert want[-1] < 0.9 * want[0]
    for found in losses(4, kind, scheme, str(tmp_path / "four")):
        assert all(math.isclose(a, b, rel_tol=1e-9) for a, b in zip(found, want, strict=True))


LAUNCHERS = {
    "1 rank": ("sp_core", "run", "-n", "1", "--", sys.executable, "-W", "ignore"),
    "4 ranks of MPI": ("sp_core", "run", "-n", "4", "--", sys.executable, "-W", "ignore"),
    "2 ranks of torchrun": ("torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
}


def test_the_tutorial_gives_the_same_losses_on_any_number_of_ranks(tmp_path: Path) -> None:
    """It learns, and rank 0 alone saves the model, which transformers reads again."""
    printed = []
    for name, launcher in LAUNCHERS.items():
        folder = tmp_path / name
        command = (sys.executable, "-m", *launcher, str(FOLDER / "fine_tune.py"), str(folder))
        answer = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        assert answer.returncode == 0, answer.stderr
        (line,) = [x for x in answer.stdout.splitlines() if x.startswith("losses:")]
        printed.append([float(x) for x in line.split()[1:]])
        assert [one.name for one in folder.iterdir()] == ["checkpoint-20"]
        AutoModelForCausalLM.from_pretrained(folder / "checkpoint-20")
    one, *others = printed
    assert len(one) == 20
    assert one[-1] < 0.8 * one[0]
    assert all(losses == pytest.approx(one, rel=1e-3) for losses in others)
