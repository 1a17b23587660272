"""The ledger equals the formulas, message by message and byte by byte."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from domains.cost import TRANSPORT, measured, sizes_of
from hypothesis import strategies as st
from oracle.attention_check import Shards
from oracle.capabilities import BASE
from oracle.schedule_cases import schedule
from oracle.strategies import AttentionProblem, attention_problems

import sp_core as sp
from sp_core import cost, schedules
from sp_core.schedules import SCHEDULED
from sp_core.schemes import SCHEMES
from sp_core.schemes.hybrid import groups_of
from sp_core.testing import given, spmd

pytestmark = pytest.mark.usefixtures("short_slots")


@pytest.mark.parametrize("name", sorted(SCHEMES))
@given(problem=attention_problems(), shared=st.booleans())
def test_a_scheme_sends_what_its_formula_says(
    comm: Any, name: str, problem: AttentionProblem, shared: bool
) -> None:
    """Or reads, where ranks share memory."""
    with sp.Mesh(comm, transport=TRANSPORT[shared], sp=comm.size) as mesh:
        shards = Shards(problem, comm.rank, comm.size, mesh.device)
        found = measured(functools.partial(SCHEMES[name], comm=mesh["sp"]), shards, mesh["sp"])
        assert found == getattr(cost, name)(sizes_of(problem, comm.size, shared=shared), comm.rank)


@pytest.mark.parametrize("name", sorted(SCHEMES))
@spmd(2)
def test_every_choice_of_gradients_sends_what_the_formula_says(comm: Any, name: str) -> None:
    """Of equal lengths of keys and queries, whose gradients may travel together."""
    with sp.Mesh(comm, transport="host", sp=comm.size) as mesh:
        for needs_grad in itertools.product((False, True), repeat=3):
            problem = replace(BASE, needs_grad=needs_grad)
            shards = Shards(problem, comm.rank, comm.size, mesh.device)
            found = measured(functools.partial(SCHEMES[name], comm=mesh["sp"]), shards, mesh["sp"])
            assert found == getattr(cost, name)(
                sizes_of(problem, comm.size, shared=False), comm.rank
            ), needs_grad


@given(
    problem=attention_problems(),
    fast=st.booleans(),
    divisor=st.integers(0, 3),
    shared=st.booleans(),
)
def test_a_hybrid_sends_what_its_formula_says(
    comm: Any, problem: AttentionProblem, fast: bool, divisor: int, shared: bool
) -> None:
    divisors = [u for u in range(1, comm.size + 1) if comm.size % u == 0]
    heads = divisors[divisor % len(divisors)]
    axes = ("ring", "ulysses") if fast else ("ulysses", "ring")
    lengths = {"ring": comm.size // heads, "ulysses": heads}
    with sp.Mesh(
        comm, transport=TRANSPORT[shared], **{axis: lengths[axis] for axis in axes}
    ) as mesh:
        shards = Shards(problem, comm.rank, comm.size, mesh.device)
        scheme = functools.partial(sp.hybrid_attention, mesh=mesh, axes=axes)
        found = measured(scheme, shards, mesh["ring"], mesh["ulysses"])
        groups = groups_of(lengths[axes[0]], lengths[axes[1]], ulysses_fastest=fast)
        place = (mesh["ring"].rank, mesh["ulysses"].rank)
        assert found == cost.hybrid(sizes_of(problem, comm.size, shared=shared), *place, groups)


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
