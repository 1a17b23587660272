"""Every scheme against the dense reference, for any mask, layout, length, heads, dtype and ranks; and laws between results."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import sp_core as sp
from sp_core.schemes import SCHEMES
from sp_core.testing import device, event, given, spmd
from sp_core.testing.attention_check import Shards, check_attention
from sp_core.testing.strategies import AttentionProblem, algorithms, attention_problems

EVERY_SCHEME = pytest.mark.parametrize("name", sorted(SCHEMES))
PLAIN = AttentionProblem(
    *(2, 13, 13, 2, 2, 4),
    dtype="float64",
    layout="zigzag",
    kv_layout="zigzag",
    mask=sp.Mask(causal=True),
    softmax_scale=None,
    magnitude=1.0,
    values="normal",
    upstream="normal",
    needs_grad=(True, True, True),
    strided=False,
    seed=7,
)


def on(mesh: sp.Mesh, name: str) -> Callable[..., Any]:
    return functools.partial(SCHEMES[name], comm=mesh["sp"])


@EVERY_SCHEME
@given(problem=attention_problems(), algorithm=algorithms())
def test_a_scheme_gives_what_one_device_gives(comm: Any, name: str, problem: AttentionProblem, algorithm: str) -> None:
    event(f"{problem.layout}, {'causal' if problem.mask.causal else 'full'}")
    event(f"{problem.dtype}")
    with sp.Mesh(comm, device=device(), algorithm=algorithm, sp=comm.size) as mesh:
        check_attention(name, on(mesh, name), problem, comm.rank, comm.size, mesh["sp"].device)


@EVERY_SCHEME
@given(nprocs=st.permutations(range(4)).map(lambda ranks: tuple(ranks[1:])), max_examples=10, problem=attention_problems(17))
def test_ranks_have_no_other_names_than_their_places(comm: Any, name: str, problem: AttentionProblem) -> None:
    """Communicators in any order of the world's ranks, with and without its rank 0."""
    with sp.Mesh(comm, device=device(), sp=comm.size) as mesh:
        check_attention(name, on(mesh, name), problem, comm.rank, comm.size, mesh["sp"].device)


@st.composite
def grids(draw: st.DrawFn) -> tuple[bool, int]:
    """Which axis varies fastest, and a number that picks a divisor of the number of ranks."""
    return draw(st.booleans()), draw(st.integers(0, 3))


@given(problem=attention_problems(), grid=grids())
def test_a_hybrid_of_any_grid_gives_what_one_device_gives(comm: Any, problem: AttentionProblem, grid: tuple[bool, int]) -> None:
    divisors = [u for u in range(1, comm.size + 1) if comm.size % u == 0]
    heads = divisors[grid[1] % len(divisors)]
    lengths = {"ring": comm.size // heads, "ulysses": heads}
    axes = ("ring", "ulysses") if grid[0] else ("ulysses", "ring")
    event(f"{lengths['ring']} x {lengths['ulysses']}")
    with sp.Mesh(comm, device=device(), **{axis: lengths[axis] for axis in axes}) as mesh:
        scheme = functools.partial(sp.hybrid_attention, mesh=mesh, axes=axes)
        check_attention("hybrid", scheme, problem, comm.rank, comm.size, mesh.device)


@EVERY_SCHEME
@given(max_examples=30, problem=attention_problems(), token=st.integers(0, 32))
def test_no_token_sees_the_future(comm: Any, name: str, problem: AttentionProblem, token: int) -> None:
    """Changing a token leaves every output before it bitwise unchanged."""
    problem = replace(
        problem, kv_len=problem.seq_len, kv_layout=problem.layout, mask=sp.Mask(causal=True, window=problem.mask.window)
    )
    if not token < problem.seq_len:
        return
    with sp.Mesh(comm, device=device(), sp=comm.size) as mesh, torch.no_grad():
        shards = Shards(problem, comm.rank, comm.size, mesh["sp"].device)
        before, _ = shards.run(on(mesh, name))
        changed = [x.clone() for x in shards.whole]
        for x in changed:
            x[:, token] += 3.0
        parts = (shards.queries(changed[0])[0], *shards.keys(changed[1], changed[2]))
        shards.local = [x.clone().to(before.device) for x in parts]
        after, _ = shards.run(on(mesh, name))
        earlier = shards.sharding.positions(comm.rank) < token
        assert torch.equal(before[:, earlier], after[:, earlier])


@EVERY_SCHEME
@spmd()
def test_the_same_call_gives_the_same_bits(comm: Any, name: str) -> None:
    with sp.Mesh(comm, device=device(), sp=comm.size) as mesh:
        runs = []
        for _ in range(3):
            shards = Shards(PLAIN, comm.rank, comm.size, mesh["sp"].device)
            out, lse = shards.run(on(mesh, name))
            runs.append([out, lse, *shards.gradients(out, lse)[0].values()])
        assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(runs[0], run, strict=True))


@EVERY_SCHEME
@spmd()
def test_calls_with_changing_shapes_and_two_meshes_do_not_disturb_each_other(comm: Any, name: str) -> None:
    """Forward A, forward B, backward A, backward B, on two communicators."""
    problems = [PLAIN, replace(PLAIN, seq_len=6, kv_len=6, kv_heads=3, layout="striped", kv_layout="striped", seed=8)]
    with sp.Mesh(comm, device=device(), sp=comm.size) as one, sp.Mesh(comm, device=device(), sp=comm.size) as two:
        under_way = []
        for problem, mesh in zip(problems, (one, two), strict=True):
            shards = Shards(problem, comm.rank, comm.size, mesh["sp"].device)
            under_way.append((shards, *shards.run(on(mesh, name))))
        for shards, out, lse in under_way:
            grads, want = shards.gradients(out, lse)
            torch.testing.assert_close(out.detach(), *shards.queries(shards.reference().out))
            torch.testing.assert_close(grads["dk"], *shards.keys(want.dk))


@EVERY_SCHEME
@spmd()
def test_checkpointing_and_no_grad(comm: Any, name: str) -> None:
    with sp.Mesh(comm, device=device(), sp=comm.size) as mesh:
        shards = Shards(PLAIN, comm.rank, comm.size, mesh["sp"].device)
        out, lse = shards.run(on(mesh, name))
        grads, _ = shards.gradients(out, lse)

        def again(*local: Tensor) -> Tensor:
            shards.local = list(local)
            return shards.run(on(mesh, name))[0]

        inputs = shards.local
        kept = checkpoint(again, *inputs, use_reentrant=False)
        with torch.no_grad():
            bare = again(*inputs)
        assert torch.equal(kept, out)
        assert torch.equal(bare, out)
        assert not bare.requires_grad
        found = torch.autograd.grad(kept, inputs, shards.queries(PLAIN.upstream_gradient())[0].to(kept.device))
        assert all(torch.equal(a, b) for a, b in zip(found, grads.values(), strict=True))


@EVERY_SCHEME
@spmd(1)
def test_one_rank_sends_nothing(comm: Any, name: str) -> None:
    with sp.Mesh(comm, device=device(), sp=1) as mesh:
        shards = Shards(PLAIN, 0, 1, mesh["sp"].device)
        out, lse = shards.run(on(mesh, name))
        shards.gradients(out, lse)
        assert mesh["sp"].counters.total().bytes_sent == 0


@spmd()
def test_a_block_travels_only_as_far_as_it_is_seen(comm: Any) -> None:
    """Contiguous and causal: rank r's keys go to the ranks behind it and no further; documents of one shard go nowhere."""
    size = comm.size
    problem = replace(PLAIN, seq_len=4 * size, kv_len=4 * size, layout="contiguous", kv_layout="contiguous")
    with sp.Mesh(comm, device=device(), sp=size) as mesh:
        for mask, messages in (
            (sp.Mask(causal=True), [rank + 1 if rank < size - 1 else 0 for rank in range(size)]),
            (sp.Mask(documents=tuple(range(0, 4 * size + 1, 4))), [0] * size),
            (sp.Mask(causal=True, window=2), [1 if rank < size - 1 else 0 for rank in range(size)]),
        ):
            mesh["sp"].counters.reset()
            Shards(replace(problem, mask=mask), comm.rank, size, mesh["sp"].device).run(on(mesh, "ring"))
            count = mesh["sp"].counters["ring"]
            assert count.messages == messages[comm.rank]
            assert count.bytes_sent == messages[comm.rank] * 2 * 2 * 4 * 2 * 4 * 8


@pytest.mark.parametrize("name", ["allgather_kv", "ring"])
@spmd(4)
def test_half_precision_does_not_suffer_from_more_ranks(comm: Any, name: str) -> None:
    """What is summed over blocks and ranks is summed in float32: the errors of four ranks are about those of one.

    A kernel rounds each block's part of out once more, and of dk and dv each part instead of the whole, which is better.
    """
    layout = {"layout": "contiguous", "kv_layout": "contiguous", "mask": sp.Mask()}
    problem = replace(PLAIN, seq_len=128, kv_len=128, head_dim=16, dtype="bfloat16", **layout)

    def errors(group: sp.Communicator) -> Tensor:
        shards = Shards(problem, group.rank, group.size, group.device)
        out, lse = shards.run(functools.partial(SCHEMES[name], comm=group))
        grads, want = shards.gradients(out, lse)
        pairs = [(out, *shards.queries(shards.reference().out)), (grads["dq"], *shards.queries(want.dq))]
        pairs += [(grads["dk"], *shards.keys(want.dk)), (grads["dv"], *shards.keys(want.dv))]
        squares = torch.stack([(a.detach().cpu().double() - b).square().mean() for a, b in pairs])
        return sp.all_reduce(squares, comm=group).div(group.size).sqrt()

    with sp.Mesh(comm, device=device(), one=1, four=4) as mesh:
        ratios = errors(mesh["four"]) / errors(mesh["one"])
        assert (ratios <= torch.tensor([1.3, 1.3, 0.9, 0.9], dtype=ratios.dtype)).all(), ratios.tolist()
