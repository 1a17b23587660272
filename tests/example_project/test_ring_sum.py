"""Test `ring_sum` with any number of ranks and any array, on threads and on processes."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from ring_sum import ring_sum

from sp_core.testing import bound, check_adjoint, check_close, given, spmd
from sp_core.testing.outcome import RankFailure


def array_of(rank: int, n: int, seed: int) -> np.ndarray:
    """Return a rank's array from a seed, so that every rank knows all arrays without messages."""
    return np.random.default_rng([seed, rank]).standard_normal(n)


@given(n=st.integers(0, 20), seed=st.integers(0, 99))
def test_every_rank_gets_the_sum(comm: Any, n: int, seed: int) -> None:
    arrays = np.stack([array_of(rank, n, seed) for rank in range(comm.size)])
    found = torch.from_numpy(ring_sum(comm, array_of(comm.rank, n, seed)))
    expected, scale = (torch.from_numpy(part.sum(0)) for part in (arrays, abs(arrays)))
    check_close("sum", found, expected, bound(scale, torch.float64, growth=comm.size))


@given(n=st.integers(1, 8), seed=st.integers(0, 99))
def test_its_backward_pass_is_itself(comm: Any, n: int, seed: int) -> None:
    """<A x, y> = <x, A y> holds exactly for the sum A, because the numbers are small integers."""
    rng = np.random.default_rng([seed, comm.rank])
    x, y = (torch.from_numpy(rng.integers(-9, 10, n).astype(float)) for _ in range(2))

    def forward(tensor: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(ring_sum(comm, tensor.detach().numpy()))

    check_adjoint(comm, forward, forward, x, y)


@spmd()
def test_it_works_on_a_part_of_the_ranks(comm: Any) -> None:
    half = comm.Split(comm.rank % 2, comm.rank)
    assert ring_sum(half, np.ones(1))[0] == half.size
    half.Free()


def test_ranks_that_disagree_are_told_so() -> None:
    """Arrays of different lengths may deadlock in MPI. The kit raises an error."""

    @spmd(2)
    def body(comm: Any) -> None:
        ring_sum(comm, np.ones(2 + comm.rank))

    with pytest.raises(RankFailure, match="CollectiveMismatch"):
        body()
