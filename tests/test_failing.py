"""An error that ends the program of one rank ends all ranks; the report names rank and cause."""

from __future__ import annotations

import sys

import pytest
from studies.commands import ROOT, outside, printed

from sp_core.launch.command import AS_ROOT, ENVIRONMENT, find_mpiexec

pytestmark = [pytest.mark.mpi_skip, pytest.mark.starts_mpi]
CASE = str(ROOT / "tests" / "kit" / "case_failing.py")
SECONDS = 40
"""A bound for the whole launch on a loaded machine; without the hook a launch never ends."""


def on_three_ranks(way: str) -> tuple[int, str]:
    """Let rank 1 of three fail in some way under plain mpiexec."""
    command = (find_mpiexec(), "-n", "3", sys.executable, CASE, way)
    variables = ENVIRONMENT | AS_ROOT | outside(PYTHONPATH=str(ROOT))
    return printed(command, ROOT, variables, SECONDS)


@pytest.mark.parametrize("way", ["before", "backward", "started", "thread", "behind"])
def test_an_error_on_one_rank_ends_all(way: str) -> None:
    code, text = on_three_ranks(way)
    assert code != 0
    assert "rank 1 of 3: this error ends all ranks." in text
    assert text.count("LookupError: this rank is lost\n") == 1, text


def test_the_exit_code_of_one_rank_is_that_of_the_job() -> None:
    code, text = on_three_ranks("exit")
    assert (code, "sys.exit(3) has left a mesh: it ends all ranks." in text) == (3, True), text


def test_an_error_that_all_ranks_raise_is_printed_by_one() -> None:
    code, text = on_three_ranks("agreed")
    assert code != 0
    assert text.count("Traceback (most recent call last)") == 1, text
    for rank in (1, 2):
        assert f"rank {rank} of 3: CollectiveMismatch: the ranks disagree" in text


def test_an_error_that_is_caught_ends_nothing() -> None:
    assert on_three_ranks("caught")[0] == 0
