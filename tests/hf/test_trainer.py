"""Compare transformers' Trainer on several ranks with Trainer on one process."""

import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from hf.cases import OWN

FOLDER = Path(__file__).parent
MPI = ("sp_core", "run", "-n")
PYTHON = ("--", sys.executable, "-W", "ignore")


def losses(launcher: tuple[str, ...], program: str, folder: Path) -> list[list[float]]:
    """Run a program; return the lists of losses that it prints, one for each line."""
    command = (sys.executable, "-m", *launcher, str(FOLDER / program), str(folder))
    answer = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert answer.returncode == 0, answer.stderr
    lines = [x.split() for x in answer.stdout.splitlines() if x.startswith("losses:")]
    return [[float(x) for x in line[1:]] for line in lines]


def test_twenty_steps_have_the_same_losses(tmp_path: Path) -> None:
    """All models train in float64, with accumulation, clipping, checkpointing and documents."""
    alone = losses((*MPI, "1", *PYTHON), "losses.py", tmp_path)
    assert [len(want) for want in alone] == [40] * len(OWN)
    assert all(want[-1] < 0.9 * want[0] for want in alone)
    found = losses((*MPI, "4", *PYTHON), "losses.py", tmp_path)
    assert found == [pytest.approx(want, rel=1e-9) for want in alone for _ in range(4)]


LAUNCHERS = (
    (*MPI, "1", *PYTHON),
    (*MPI, "4", *PYTHON),
    ("torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
)


def test_the_tutorial_gives_the_same_losses_on_any_number_of_ranks(tmp_path: Path) -> None:
    """The loss falls. Rank 0 alone saves the model, and transformers can load it."""
    printed = []
    for number, launcher in enumerate(LAUNCHERS):
        folder = tmp_path / str(number)
        printed += losses(launcher, "fine_tune.py", folder)
        assert [one.name for one in folder.iterdir()] == ["checkpoint-20"]
        AutoModelForCausalLM.from_pretrained(folder / "checkpoint-20")
    one, *_ = printed
    assert len(one) == 20
    assert one[-1] < 0.8 * one[0]
    assert printed == [pytest.approx(one, rel=1e-3)] * 3
