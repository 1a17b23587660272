"""Test laws between the results of schemes. They need no reference."""

from bisect import bisect
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from kit.meshed import meshed
from oracle.attention_check import Shards, compare
from oracle.strategies import DRAWN, AttentionProblem, attention_problems
from test_schemes import EVERY_SCHEME, on

import sp_core as sp
from sp_core.schemes.heads import split_heads
from sp_core.testing import device, given, spmd

pytestmark = [pytest.mark.explore, pytest.mark.usefixtures("short_slots")]
# adds in rank order, as a window; MPI may use any order
IN_RANK_ORDER = {"reduce_scatter": "pairwise"}


@EVERY_SCHEME
@given(
    max_examples=8,
    problem=attention_problems(),
    again=st.sampled_from(["auto", "window", "window"]),
)
def test_the_same_call_gives_the_same_bits_again_and_on_every_replica(
    comm: Any, name: str, problem: AttentionProblem, again: str
) -> None:
    """One call may use messages and the other shared memory: both add in rank order.

    With AllGather-KV both calls use the same transport. In shared memory its keys have different
    strides, for which a matrix product may round differently.
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


@pytest.mark.parametrize(
    ("heads", "kv_heads", "received"),
    [
        (8, 2, ((0,), (0,), (1,), (1,))),
        (6, 2, ((0,), (0, 1), (1,), (1,))),
        (9, 3, ((0,), (1,), (1, 2), (2,))),
        (10, 2, ((0,), (0, 1, 1), (1,))),
        (4, 4, ((0, 1), (2, 3))),
        (0, 0, ((), ())),
        (6, 3, ((0, 1), (2,))),
    ],
)
def test_a_rank_receives_a_head_once_unless_it_reads_heads_unequally_often(
    heads: int, kv_heads: int, received: tuple[tuple[int, ...], ...]
) -> None:
    assert split_heads(heads, kv_heads, len(received))[1] == received


@pytest.mark.parametrize("size", range(1, 9))
def test_a_rank_receives_the_heads_that_its_queries_read(size: int) -> None:
    """Attention lets equally many query heads, one after the other, read each head received."""
    for kv_heads, readers in product(range(1, 9), range(1, 9)):
        for mine, received in zip(*split_heads(kv_heads * readers, kv_heads, size), strict=True):
            found = [head for head in received for _ in range(len(mine) // len(received))]
            assert found == [head // readers for head in mine], (kv_heads, readers)


@EVERY_SCHEME
@spmd(2)
def test_keys_of_inference_mode_are_taken_where_nothing_learns(comm: Any, name: str) -> None:
    q = torch.ones(1, 2, 2, 4, requires_grad=True)
    with torch.inference_mode():
        kv = torch.ones(1, 2, 2, 4)
    with sp.Mesh(comm, sp=2) as mesh, torch.no_grad():
        out = on(mesh, name)(q, kv, kv, sharding=sp.Sharding.contiguous(4, 2))
    assert torch.equal(out, q)


@spmd(2)
def test_ulysses_exchanges_what_is_asked_for_at_once(comm: Any) -> None:
    with sp.Mesh(comm, sp=2) as mesh:
        whole, part = sp.Sharding.contiguous(4, 2), sp.Sharding.contiguous(6, 2)
        for keys, return_lse, calls in ((whole, False, 2), (whole, True, 3), (part, False, 3)):
            mesh["sp"].counters.reset()
            q, kv = torch.ones(1, 2, 2, 4), torch.ones(1, keys.seq_len // 2, 2, 4)
            on(mesh, "ulysses")(q, kv, kv, sharding=whole, kv_sharding=keys, return_lse=return_lse)
            assert mesh["sp"].counters["all_to_all"].calls == calls


@EVERY_SCHEME
@given(max_examples=8, one=attention_problems(17), two=attention_problems(17))
def test_meshes_do_not_disturb_each_other(
    comm: Any, name: str, one: AttentionProblem, two: AttentionProblem
) -> None:
    """Run forward on a and on b, then backward on both. Mesh b has the ranks in opposite order."""
    backwards = comm.Split(0, -comm.rank)
    with (
        sp.Mesh(comm, device=device(), sp=comm.size) as a,
        sp.Mesh(backwards, device=device(), sp=comm.size) as b,
    ):
        under_way = []
        for mesh, problem in ((a, one), (b, two)):
            shards = Shards(problem, mesh["sp"].rank, mesh["sp"].size, mesh.device)
            under_way.append((mesh["sp"], shards, *shards.run(on(mesh, name))))
        for group, shards, out, lse in under_way:
            results = {"out": out, "lse": lse, **shards.gradients(out, lse)}
            compare(name, shards, results, group)
    backwards.Free()


@EVERY_SCHEME
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@given(max_examples=6, layout=st.sampled_from(["contiguous", "zigzag"]), length=st.integers(1, 9))
def test_a_poisoned_document_leaves_the_others_alone(
    comm: Any, name: str, poison: float, layout: str, length: int
) -> None:
    """Padding that is a document of its own may hold any content, however short documents are.

    Here it lies on both sides of the end of a shard, or of half a shard in zigzag.
    """
    tokens, edge = 16 * length * comm.size, (8 if layout == "zigzag" else 16) * length - 1
    bounds = (0, *range(length // 2 + 1, tokens, length), tokens)
    mask, sharding = sp.Mask(causal=True, documents=bounds), DRAWN[layout](tokens, comm.size, 0)
    sound, number = torch.ones(tokens, dtype=torch.bool), bisect(bounds, edge)
    sound[bounds[number - 1] : bounds[number]] = False
    whole = torch.randn(4, 1, tokens, 2, 8, generator=torch.Generator().manual_seed(length))
    whole[3, :, ~sound] = 0  # nothing follows from the padding
    told = sharding.shard(sound, comm.rank, 0)
    results = []
    with sp.Mesh(comm, device=device(), sp=comm.size) as mesh:
        for content in (0.0, poison):
            whole[:3, :, ~sound] = content
            mine = sharding.shard(whole, comm.rank, 2).to(mesh.device)
            inputs = [x.clone().requires_grad_() for x in mine[:3]]
            out = on(mesh, name)(*inputs, sharding=sharding, mask=mask)
            results.append((out, *torch.autograd.grad(out, inputs, mine[3])))
    for clean, other in zip(*results, strict=True):
        torch.testing.assert_close(other[:, told], clean[:, told])


@EVERY_SCHEME
@pytest.mark.parametrize("what", ["dtype", "mask"])
@spmd(2)
@meshed()
def test_ranks_whose_sequences_differ_as_a_whole_are_told_so(
    mesh: sp.Mesh, name: str, what: str
) -> None:
    """Each rank's own arguments fit together."""
    here = what if mesh.rank else ""
    x = torch.ones(1, 2, 2, 4, dtype=torch.float64 if here == "dtype" else torch.float32)
    mask = sp.Mask(documents=(0, 3, 4) if here == "mask" else (0, 1, 4))
    with pytest.raises(sp.CollectiveMismatch, match="Make these calls equal"):
        on(mesh, name)(x, x, x, sharding=sp.Sharding.contiguous(4, 2), mask=mask)
