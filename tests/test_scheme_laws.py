"""Laws between the results of schemes, which hold whatever the reference says."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate, pairwise
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from oracle.attention_check import Results, Shards, compare
from oracle.strategies import AttentionProblem, attention_problems, boundaries
from torch import Tensor

import sp_core as sp
from sp_core.schemes import SCHEMES
from sp_core.testing import device, given
from sp_core.testing.tolerance import check_close

pytestmark = [pytest.mark.explore, pytest.mark.usefixtures("short_slots")]
EVERY_SCHEME = pytest.mark.parametrize("name", sorted(SCHEMES))
IN_RANK_ORDER = {
    "reduce_scatter": "pairwise"
}  # as in a window; the MPI library may add in any order


def on(mesh: sp.Mesh, name: str, axis: str = "sp") -> Callable[..., Any]:
    return functools.partial(SCHEMES[name], comm=mesh[axis])


def bounds_of(shards: Shards) -> Results:
    """By how much each of this rank's results may be off."""
    return {what: allowed for what, (_, allowed) in shards.expected().items()}


@st.composite
def packed(draw: st.DrawFn) -> AttentionProblem:
    """Self attention over packed documents."""
    problem = draw(attention_problems())
    documents = draw(boundaries(problem.seq_len, draw(st.integers(2, 5))))
    mask = replace(problem.mask, documents=documents, kv_documents=None)
    return replace(problem, kv_len=problem.seq_len, kv_layout=problem.layout, mask=mask)


@EVERY_SCHEME
@given(max_examples=8, problem=packed())
def test_a_permutation_of_documents_permutes_the_results(
    comm: Any, name: str, problem: AttentionProblem
) -> None:
    documents = [range(a, b) for a, b in pairwise(problem.mask.documents)]
    Random(problem.seed).shuffle(documents)
    order = torch.tensor([token for document in documents for token in document], dtype=torch.int64)
    mask = replace(problem.mask, documents=(0, *accumulate(map(len, documents))))
    with sp.Mesh(comm, device=device(), sp=comm.size) as mesh:
        shards = Shards(problem, comm.rank, comm.size, mesh.device)
        moved = Shards(replace(problem, mask=mask), comm.rank, comm.size, mesh.device, order=order)
        before, after = shards.results(on(mesh, name)), moved.results(on(mesh, name))
        allowed, more = bounds_of(moved), bounds_of(shards)
        for what in before:
            dim = 2 if what == "lse" else 1
            expected, slack = (
                whole(comm, shards, x[what], dim).index_select(dim, order) for x in (before, more)
            )
            limit = allowed[what] + moved.part(what, slack)
            check_close(f"{name} {what}", after[what], moved.part(what, expected).double(), limit)


def whole(comm: Any, shards: Shards, x: Tensor, dim: int) -> Tensor:
    """Every rank's part of a result, put together."""
    return shards.sharding.unshard(
        [torch.from_numpy(x) for x in comm.allgather(x.detach().double().cpu().numpy())], dim
    )


@EVERY_SCHEME
@given(
    max_examples=8,
    problem=attention_problems(),
    again=st.sampled_from(["auto", "window", "window"]),
)
def test_the_same_call_gives_the_same_bits_again_and_on_every_replica(
    comm: Any, name: str, problem: AttentionProblem, again: str
) -> None:
    """This holds in shared memory, too. Sums of collectives are made in rank order.

    But what AllGather-KV reads there has other strides than what messages bring, over which a
    matrix product may round differently.
    """
    copies = 2 - comm.size % 2
    runs, again = [], again if device().type == "cpu" else "auto"
    for transport in (again if name == "allgather_kv" else "auto", again):
        axes = {"copies": copies, "sp": comm.size // copies}
        with sp.Mesh(
            comm, device=device(), transport=transport, algorithm=IN_RANK_ORDER, **axes
        ) as mesh:
            place = mesh["sp"].rank
            shards = Shards(problem, place, mesh["sp"].size, mesh.device)
            runs.append(shards.results(on(mesh, name)))
    assert all(torch.equal(x, runs[1][what]) for what, x in runs[0].items())
    bits = {what: x.cpu().double().numpy().tobytes() for what, x in runs[0].items()}
    everyone = comm.allgather((place, bits))
    assert all(other == bits for rank, other in everyone if rank == place)


@EVERY_SCHEME
@given(max_examples=20, problem=attention_problems(), token=st.integers(0, 32))
def test_no_token_sees_the_future(
    comm: Any, name: str, problem: AttentionProblem, token: int
) -> None:
    """Changing a token leaves every output before it bitwise unchanged."""
    mask = sp.Mask(causal=True, window=problem.mask.window)
    problem = replace(problem, kv_len=problem.seq_len, kv_layout=problem.layout, mask=mask)
    token %= problem.seq_len + 1
    with sp.Mesh(comm, device=device(), sp=comm.size) as mesh, torch.no_grad():
        shards = Shards(problem, comm.rank, comm.size, mesh["sp"].device)
        before, _ = shards.run(on(mesh, name))
        changed = [x.clone() for x in shards.whole]
        for x in changed:
            x[:, token:] += 3.0
        shards.local = shards.place((changed[0], changed[1], changed[2]))
        after, _ = shards.run(on(mesh, name))
        earlier = shards.sharding.positions(comm.rank) < token
        assert torch.equal(before[:, earlier], after[:, earlier])


@EVERY_SCHEME
@given(max_examples=8, one=attention_problems(17), two=attention_problems(17))
def test_meshes_do_not_disturb_each_other(
    comm: Any, name: str, one: AttentionProblem, two: AttentionProblem
) -> None:
    """Run forward A and B, backward A and B. Mesh B has the ranks in the opposite order."""
    backwards = comm.Split(0, -comm.rank)
    with (
        sp.Mesh(comm, device=device(), sp=comm.size) as a,
        sp.Mesh(backwards, device=device(), sp=comm.size) as b,
    ):
        under_way = []
        for mesh, problem in ((a, one), (b, two)):
            shards = Shards(problem, mesh["sp"].rank, mesh["sp"].size, mesh.device)
            under_way.append((shards, *shards.run(on(mesh, name))))
        for shards, out, lse in under_way:
            compare(name, shards, {"out": out, "lse": lse, **shards.gradients(out, lse)})
    backwards.Free()
