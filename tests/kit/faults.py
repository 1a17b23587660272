"""The faults with which the kit is tested: class and text of each failure, smallest example."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from hypothesis import strategies as st
from kit import sut
from kit.failing import SEARCH

from sp_core.testing import given


class Fault(NamedTuple):
    """A fault that ends no process.

    `fault` switches it on in `sut`. `name` is the class of its failure, `minimum` its smallest
    example, and `told` a text that the report must have.
    """

    fault: str
    name: str
    minimum: str
    told: str


FAULTS = (
    Fault(
        "value",
        "AssertionError at kit/faults.py",
        "nprocs=2, n=5, d=3",
        "AssertionError on rank 1 of 2",
    ),
    Fault(
        "raise",
        "ValueError at kit/sut.py",
        "nprocs=2, n=7, d=1",
        "ValueError on rank 1 of 2: rank 1 refuses n=7",
    ),
    Fault(
        "mismatch",
        "CollectiveMismatch",
        "nprocs=2, n=1, d=1",
        "rank 0: Allgatherv(sendbuf=1 x float64, recvbuf=[1, 0] x float64) on comm",
    ),
    Fault(
        "swapped",
        "CollectiveMismatch",
        "nprocs=2, n=3, d=1",
        "rank 1: Bcast(buf=1 x float64, root=0)",
    ),
    Fault(
        "root", "CollectiveMismatch", "nprocs=2, n=1, d=1", "rank 1: Bcast(buf=1 x float64, root=1)"
    ),
    Fault("skipped", "CollectiveMismatch", "nprocs=2, n=2, d=1", "rank 1: finished"),
    Fault("skip", "SkipMismatch", "nprocs=2, n=7, d=1", "rank 1: skipped: Skipped at"),
    Fault(
        "leave", "SystemExit at kit/sut.py", "nprocs=2, n=7, d=1", "SystemExit on rank 1 of 2: 0"
    ),
)
CRASHES = ("exit 0", "segv", "loop")
"""Faults that kill or hang rank 1; all have the same smallest example."""
CRASH_MINIMUM = "nprocs=2, n=7, d=1, seed=0"


def average(fault: str, **drawn: st.SearchStrategy[Any]) -> Callable[[], None]:
    """Return a test of the system under test with one fault switched on.

    `drawn`: by parameter, strategies that replace the usual ones.
    """
    usual = {"n": st.integers(1, 40), "d": st.integers(1, 8), "seed": st.integers(0, 99)}

    @SEARCH
    @given(**(usual | drawn))
    def test_average(comm: Any, n: int, d: int, seed: int) -> None:
        x = sut.rows(n, d, seed)
        lengths = sut.split(n, comm.size)
        start = sum(lengths[: comm.rank])
        expected = sut.reference(x)[start : start + lengths[comm.rank]]
        np.testing.assert_allclose(sut.attention(comm, x, fault), expected, rtol=1e-9, atol=1e-9)

    return test_average
