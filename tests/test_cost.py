"""The formulas in closed form, and what needs no room for sums."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from oracle.schedule_cases import schedule

import sp_core as sp
from sp_core import cost, schedules
from sp_core.schedules import SCHEDULED
from sp_core.testing import spmd

pytestmark = pytest.mark.usefixtures("short_slots")


@spmd()
def test_the_even_case_is_the_closed_form(comm: Any) -> None:
    """The formulas at the top of `cost`, in one place where they can be read and checked."""
    size, seq, batch, heads, kv_heads, head_dim, item = comm.size, 8 * comm.size, 2, 12, 12, 4, 8
    sharding = sp.Sharding.contiguous(seq, size)
    problem = cost.Attention(sharding, sharding, sp.Mask(), batch, heads, kv_heads, head_dim, item)
    own = batch * 8 * head_dim * item
    keys, queries = 2 * kv_heads * own, heads * own
    assert cost.allgather_kv(problem, comm.rank) == (
        cost.Traffic(0, (size - 1) * keys),
        cost.Traffic(0, 2 * (size - 1) * keys),
    )
    messages = 2 * size - 1 if size > 1 else 0
    assert cost.ring(problem, comm.rank) == (
        cost.Traffic(size - 1, (size - 1) * keys),
        cost.Traffic(messages, messages * keys),
    )
    exchange = cost.Traffic(0, (size - 1) * (2 * queries + keys) // size)
    assert cost.ulysses(problem, comm.rank) == (exchange, exchange)
    assert cost.tp_sp(sharding, comm.rank, batch, 5, item) == (
        cost.Traffic(0, 2 * (size - 1) * batch * 8 * 5 * item),
        cost.Traffic(0, 3 * (size - 1) * batch * 8 * 5 * item),
    )


@pytest.mark.parametrize("op", ["all_gather", "all_to_all", "broadcast"])
def test_what_only_moves_needs_no_room_for_sums(op: str) -> None:
    """Sums of half types are made in float32; where nothing is added there are none."""
    for algorithm in SCHEDULED[op]:
        for program in schedule(op, algorithm, (2, 3, 2)).programs:
            assert schedules.cost(program, torch.bfloat16).scratch == 2 * program.scratch
