"""A session in which ranks disagree in every way, run by test_kit_launch.py under mpiexec."""

from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from mpi4py import MPI

from sp_core.testing import given, record_ratio, spmd

RANK = MPI.COMM_WORLD.rank


@given(n=st.integers(0, 9), max_examples=20)
def test_fails_on_one_rank(comm: Any, n: int) -> None:
    assert comm.rank == 0 or n < 5


@spmd()
def test_the_next_one_runs(comm: Any) -> None:
    total = np.empty(1)
    comm.Allreduce(np.ones(1), total)
    assert total[0] == comm.size
    record_ratio("of the session", 0.25 * comm.rank)


def test_without_communicator_fails_on_rank_1() -> None:
    print(f"printed by rank {RANK}")
    assert RANK != 1, "only here"


def test_without_communicator_fails_on_ranks_1_and_2() -> None:
    assert RANK == 0, f"seen by rank {RANK}"


def test_skips_on_rank_1() -> None:
    if RANK == 1:
        pytest.skip("only here")


@pytest.mark.xfail(strict=False)
def test_expected_to_fail_fails_on_rank_1() -> None:
    assert RANK != 1


@pytest.mark.xfail(strict=True)
def test_strictly_expected_to_fail_fails_on_rank_1() -> None:
    assert RANK != 1


@pytest.fixture
def broken_on_rank_1() -> None:
    assert RANK != 1, "set-up"


def test_whose_set_up_fails_on_rank_1(broken_on_rank_1: None) -> None:
    """Fail if the body runs on the ranks whose set-up succeeded."""
    raise LookupError("ran")


@pytest.mark.xfail
def test_whose_set_up_is_expected_to_fail_fails_on_rank_1(broken_on_rank_1: None) -> None:
    """Fail if the body runs on the ranks whose set-up succeeded."""
    raise LookupError("ran")


def test_skips_everywhere() -> None:
    pytest.skip(f"on all ranks, also on {RANK}")


def test_passes() -> None:
    """Pass on every rank after the failures above, each with its own ratio of error to bound."""
    record_ratio("of one rank", 0.125 * RANK)
