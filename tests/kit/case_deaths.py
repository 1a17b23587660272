"""A property of a system whose fault ends or hangs a rank, for test_kit_launch.py."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
from hypothesis import strategies as st
from kit import sut

from sp_core.testing import given


@given(nprocs=st.just(2), n=st.integers(6, 9), d=st.just(1))
def test_average(comm: Any, n: int, d: int) -> None:
    x = sut.rows(n, d, 0)
    lengths = sut.split(n, comm.size)
    start = sum(lengths[: comm.rank])
    expected = sut.reference(x)[start : start + lengths[comm.rank]]
    np.testing.assert_allclose(sut.attention(comm, x, os.environ["SUT_FAULT"]), expected)
