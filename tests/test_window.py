"""Shared memory of a node: programs that no order of the ranks breaks, tensors read in place, memory that leaves nothing behind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given as plain_given
from hypothesis import strategies as st

import sp_core as sp
from sp_core.schedules import SLOTS, in_window, window_cost
from sp_core.schedules import window as programs
from sp_core.testing import given, run_threads, spmd
from sp_core.testing.window_cases import OPS, Node, Problem, inputs_of

problems = st.builds(
    Problem, st.sampled_from(OPS), st.integers(0, 30), st.integers(0, 7), st.booleans(), st.booleans(), st.sampled_from([1, 1, 40])
)


@plain_given(
    problems=st.lists(problems, min_size=1, max_size=4),
    size=st.integers(1, 5),
    slot=st.integers(5, 40),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 999),
)
def test_no_order_of_the_ranks_changes_a_result(
    problems: list[Problem], size: int, slot: int, dtype: torch.dtype, seed: int
) -> None:
    """Bitwise the sums in the order of the ranks, whoever is first."""
    inputs = [inputs_of(problem, size, slot, dtype, seed) for problem in problems]
    results = Node(size, slot, dtype, seed).play(problems, inputs)
    for problem, given_, found in zip(problems, inputs, results, strict=True):
        tasks = [problem.task(rank, size, slot) for rank in range(size)]
        for rank, x in enumerate(found):
            assert torch.equal(x, problem.expected(tasks, given_, rank)), (problem, rank)
