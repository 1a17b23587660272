"""Test that the programs in `examples/` run on 1, 2 and 4 ranks, with the same results."""

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.meshed import meshed

import sp_core as sp
from sp_core.testing import spmd

FOLDER = Path(__file__).parents[1] / "examples"
ONE_RESULT = ("documents", "layout", "long_sequence", "own_model", "resume", "train", "unequal")
"""Programs whose result does not depend on the number of ranks."""
BY_TORCHRUN = ("fsdp",)
"""Programs that `test_torchrun.py` runs with torchrun."""
ALONE: dict[str, list[float]] = {}
"""The results on one rank, which runs first. Rank 0 is in every launch, so it has these results."""


def numbers(result: Any) -> list[float]:
    """Return all numbers of a result: a number, a list or a tensor."""
    return torch.as_tensor(result, dtype=torch.float64).flatten().tolist()


@pytest.mark.parametrize(
    "name", sorted({path.stem for path in FOLDER.glob("*.py")} - {*BY_TORCHRUN})
)
@spmd(1, 2, 4)
def test_an_example_runs(comm: Any, name: str) -> None:
    result = import_module(f"examples.{name}").main(comm)
    if name in ONE_RESULT and comm.size == 1:
        ALONE[name] = numbers(result)
    elif name in ONE_RESULT:
        alone = comm.bcast(ALONE.get(name))
        assert alone
        assert numbers(result) == pytest.approx(alone, rel=1e-4, abs=1e-5)


@spmd(2, 4)
def test_a_step_on_a_long_sequence_needs_what_its_formula_says(comm: Any) -> None:
    """The peak is within 5 % of the formula, which then holds for lengths too great for a test."""
    _, peak, formula = import_module("examples.long_sequence").measured(comm, 2048)
    assert 0.95 * formula <= peak <= 1.05 * formula


@pytest.mark.mpi_skip  # a second run on plain communicators would find the checkpoint of the first
@spmd(2)
@meshed("tp")
def test_a_training_that_has_ended_may_be_started_again(mesh: sp.Mesh, mpi_tmp_path: Path) -> None:
    """A scheduler may do so with a job that was stopped after its last checkpoint."""
    for steps in (1, 0):
        assert len(import_module("examples.resume").train(mesh, mpi_tmp_path, 1)) == steps


def test_examples_are_short() -> None:
    lengths = {path.name: len(path.read_text().splitlines()) for path in FOLDER.glob("*.py")}
    assert len(lengths) >= 8
    assert {name: lines for name, lines in lengths.items() if lines > 60} == {}
