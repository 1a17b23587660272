"""Test every scheme against the dense reference: any mask, layout, heads, dtype and ranks."""

import functools
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from kit.meshed import meshed
from oracle.attention_check import Shards, check_attention
from oracle.strategies import AttentionProblem, attention_problems
from oracle.ways import Way, ways
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import sp_core as sp
from sp_core.schemes import SCHEMES, problem
from sp_core.testing import device, given, session, spmd

pytestmark = pytest.mark.usefixtures("short_slots")
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
    storage="plain",
    seed=7,
    sinks=1.0,
)

WHOLE = replace(PLAIN, layout="contiguous", kv_layout="contiguous", mask=sp.Mask())


def on(mesh: sp.Mesh, name: str) -> Callable[..., Any]:
    return functools.partial(SCHEMES[name], comm=mesh["sp"])


@pytest.fixture(autouse=True)
def memory_that_nobody_has_written_holds_nan() -> Iterator[None]:
    """Fill new tensors on the CPU with NaN. Memory of MPI and of torch's kernels is not covered."""
    torch.use_deterministic_algorithms(device().type == "cpu")
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.explore
@EVERY_SCHEME
@given(problem=attention_problems(), options=ways())
@meshed(device=device)
def test_a_scheme_gives_what_one_device_gives(
    mesh: sp.Mesh, name: str, problem: AttentionProblem, options: Way
) -> None:
    check_attention(name, on(mesh, name), problem, mesh["sp"])


def some_ranks() -> st.SearchStrategy[tuple[int, ...]]:
    """Draw some of the launch's ranks, in any order."""
    size = session.current.world_size or 4
    chosen = st.tuples(st.permutations(range(size)), st.integers(1, max(1, size - 1)))
    return chosen.map(lambda drawn: tuple(drawn[0][: drawn[1]]))


@pytest.mark.explore
@EVERY_SCHEME
@given(
    nprocs=st.deferred(some_ranks), max_examples=10, problem=attention_problems(17), options=ways()
)
@meshed(device=device)
def test_ranks_have_no_other_names_than_their_places(
    mesh: sp.Mesh, name: str, problem: AttentionProblem, options: Way
) -> None:
    """Communicators hold the world's ranks in any order, with and without the world's rank 0."""
    check_attention(name, on(mesh, name), problem, mesh["sp"])


AXES = ("copies", "ring", "ulysses")


GRIDS = st.tuples(st.permutations(AXES).map(tuple), st.integers(0, 59))
"""The order of the axes of a mesh, and a number that picks their lengths."""


def lengths_of(grid: tuple[tuple[str, ...], int], size: int) -> dict[str, Any]:
    """Return the axes of a mesh over all ranks. In every second grid, axis copies has length 1."""
    divisors = [n for n in range(1, size + 1) if size % n == 0]
    pairs = [
        (r, u)
        for r in divisors
        for u in divisors
        if size % (r * u) == 0 and (r * u == size or grid[1] % 2)
    ]
    ring, ulysses = pairs[grid[1] // 2 % len(pairs)]
    lengths = {"copies": size // (ring * ulysses), "ring": ring, "ulysses": ulysses}
    return {axis: lengths[axis] for axis in grid[0]}


@pytest.mark.explore
@given(problem=attention_problems(), grid=GRIDS, way=ways())
def test_a_hybrid_of_any_grid_gives_what_one_device_gives(
    comm: Any, problem: AttentionProblem, grid: tuple[tuple[str, ...], int], way: Way
) -> None:
    """The two axes come in either order. Along the third axis, each group has its own problem."""
    lengths = lengths_of(grid, comm.size)
    axes: Any = tuple(axis for axis in grid[0] if axis != "copies")
    with sp.Mesh(comm, device=device(), **way, **lengths) as mesh:
        # seed % 3 stays, which decides about a gradient of lse
        problem = replace(problem, seed=problem.seed + 3 * mesh["copies"].rank)
        scheme = functools.partial(sp.hybrid_attention, mesh=mesh, axes=axes)
        tokens = mesh[axes]
        check_attention("hybrid", scheme, problem, tokens)


@pytest.mark.parametrize(
    "needs", [(True, False, False), (False, True, False), (False, False, True)], ids=["q", "k", "v"]
)
@spmd(4)
@meshed(device=device, axes={"ring": 2, "ulysses": 2})
def test_groups_of_a_hybrid_with_other_lengths_agree_on_the_gradients_that_travel(
    mesh: sp.Mesh, needs: tuple[bool, bool, bool]
) -> None:
    """In a 2 x 2 grid one pair of ranks has as many queries as keys, and the other pair has not."""
    sizes: dict[str, Any] = {"batch": 1, "kv_heads": 1, "group": 1, "head_dim": 1}
    problem = replace(WHOLE, seq_len=2, kv_len=3, **sizes, needs_grad=needs, seed=0, sinks=None)
    axes = ("ring", "ulysses")
    scheme = functools.partial(sp.hybrid_attention, mesh=mesh, axes=axes)
    check_attention("hybrid", scheme, problem, mesh[axes])


@EVERY_SCHEME
@spmd()
@meshed(device=device)
def test_a_result_may_be_changed_in_place_and_no_gradient_is_wrong(
    mesh: sp.Mesh, name: str
) -> None:
    """The backward needs the result as it was, as that of torch's own attention, and says so.

    The result of Ulysses is a copy if there are several ranks. Then the gradient is right.
    """
    shards = Shards(PLAIN, mesh.rank, mesh.size, mesh["sp"].device)
    out, _ = shards.run(on(mesh, name))
    (grad,) = torch.autograd.grad(out.sum(), shards.local[0], retain_graph=True)
    wanted = 2 * out.detach()
    assert torch.equal(out.mul_(2), wanted)
    copies = name == "ulysses" and mesh.size > 1
    refused = pytest.raises(RuntimeError, match="modified by an inplace operation")
    with nullcontext() if copies else refused:
        (again,) = torch.autograd.grad(out.sum(), shards.local[0])
        assert torch.allclose(again, 2 * grad)


EVERY_SECOND = (*range(0, 41, 2), 41)
"""Boundaries of documents of two tokens, and of one."""


@EVERY_SCHEME
@pytest.mark.parametrize(
    "mask",
    [
        sp.Mask(causal=True),
        sp.Mask(causal=True, window=3),
        sp.Mask(causal=True, documents=EVERY_SECOND),
        sp.Mask(documents=EVERY_SECOND, kv_documents=(*range(22),)),
    ],
    ids=["causal", "window", "documents", "documents of one key"],
)
@spmd()
def test_the_default_device_of_torch_changes_nothing(comm: Any, name: str, mask: sp.Mask) -> None:
    kv_len = 41 if mask.key_documents is None else mask.key_documents[-1]
    problem, found = replace(PLAIN, seq_len=41, kv_len=kv_len, mask=mask), []
    for default in ("meta", device()):  # plans are cached: the other default comes first
        with torch.device(default), sp.Mesh(comm, device=device(), sp=comm.size) as mesh:
            with torch.device("cpu"):
                shards = Shards(problem, comm.rank, comm.size, device())
            found.append(shards.results(on(mesh, name)))
            found[-1]["all"] = sp.all_gather(found[-1]["out"], comm=mesh["sp"], dim=1)
    assert all(torch.equal(x, found[1][what]) for what, x in found[0].items())


@pytest.mark.parametrize("kind", ["messages", "shared memory"])
@spmd()
def test_a_block_travels_only_as_far_as_it_is_seen(comm: Any, kind: str) -> None:
    """Under a causal mask, rank r's keys go to ranks r + 1 to P - 1.

    Keys of documents inside one shard are not sent. With a window of two tokens only the last of
    four keys is sent. In the host's shared memory a rank reads only the blocks that it sees.
    """
    names = ("host", "window") if device().type == "cpu" else ("staged", "ipc")
    size, transport = comm.size, names[kind == "shared memory"]
    problem = replace(WHOLE, seq_len=4 * size, kv_len=4 * size)
    with sp.Mesh(comm, device=device(), transport=transport, sp=size) as mesh:
        rank, passes = comm.rank, comm.rank < size - 1
        for mask, keys, blocks, sums, read in (
            (sp.Mask(causal=True), 4, (rank + 1) * passes, rank + passes, rank),
            (sp.Mask(documents=tuple(range(0, 4 * size + 1, 4))), 0, 0, 0, 0),
            (sp.Mask(causal=True, window=2), 1, passes, passes + (rank > 0), int(rank > 0)),
        ):
            if transport == "window":
                blocks, sums = read, read
            mesh["sp"].counters.reset()
            shards = Shards(replace(problem, mask=mask), rank, size, mesh["sp"].device)
            out, lse = shards.run(on(mesh, "ring"))
            count = mesh["sp"].counters["ring"]
            assert count.messages == blocks
            shards.gradients(out, lse)
            assert count.messages == 2 * blocks + sums
            assert count.bytes_sent == count.messages * 2 * 2 * keys * 2 * 4 * 8


@pytest.mark.parametrize("name", ["allgather_kv", "ring"])
@spmd(4)
@meshed("four", device=device)
def test_half_precision_does_not_suffer_from_more_ranks(mesh: sp.Mesh, name: str) -> None:
    """Sums over blocks and ranks are made in float32, so four ranks err about as much as one.

    On another device than a CPU a kernel rounds each part of a result once more. If it computes
    each part in float32, equal parts make the error 2^0.5 times as large. CUDA's kernels also round
    the probabilities, for one rank too, so there the error grows only 1.5^0.5 times.
    """
    most = {"cpu": 1.1, "cuda": 1.3}.get(device().type, 1.5)
    problem = replace(WHOLE, seq_len=128, kv_len=128, head_dim=16, dtype="bfloat16")

    def errors(group: sp.Communicator) -> Tensor:
        shards = Shards(problem, group.rank, group.size, group.device)
        out, lse = shards.run(functools.partial(SCHEMES[name], comm=group))
        found, want = {"out": out, **shards.gradients(out, lse)}, shards.reference().values
        pairs = [(x, shards.part(what, want[what])) for what, x in found.items()]
        squares = torch.stack([(a.detach().cpu().double() - b).square().mean() for a, b in pairs])
        return sp.all_reduce(squares.to(group.device), comm=group).div(group.size).sqrt().cpu()

    ratios = errors(mesh["four"]) / errors(mesh[()])
    assert (ratios <= most).all(), ratios.tolist()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@EVERY_SCHEME
@spmd(1, 2)
@meshed(device=device)
def test_keys_that_many_queries_and_heads_read_have_the_bound_of_half_types(
    mesh: sp.Mesh, name: str, dtype: str
) -> None:
    """All summands of dv have one sign, so a sum made in a half type would stop growing."""
    sizes: dict[str, Any] = {"batch": 1, "seq_len": 1400, "kv_len": 4, "kv_heads": 1, "group": 64}
    problem = replace(WHOLE, **sizes, dtype=dtype, upstream="expanded", sinks=None)
    check_attention(name, on(mesh, name), problem, mesh["sp"])


@EVERY_SCHEME
@spmd(4)
@meshed(device=device)
def test_partial_sums_of_gradients_may_leave_the_range_of_float16(mesh: sp.Mesh, name: str) -> None:
    """Blocks, steps and copies of a head add 2^15 + 2^15 - 2^15, to the gradients of q and v."""
    queries = sp.Sharding.from_positions([[5, 6], [0], [2], [1]])
    keys = sp.Sharding.from_positions([[7], [8], [4], [0, 5, 6]])
    q, do = torch.zeros(2, 1, 5, 4, 1, dtype=torch.float64)
    k, v = torch.tensor([[128, 128, 0, -128, 0, 0], [1, -1, 1, -1, 1, -1]]).view(2, 1, 6, 1, 1)
    do[0, :4, :, 0] = torch.tensor([2**15, 2**15, -(2**15), 0]).diag()
    do[:, 4, 0] = 2**10
    found = []
    for dtype in (torch.float64, torch.float16):
        parts = (queries, q), (keys, k), (keys, v), (queries, do)
        *leaves, grad = (x.shard(y, mesh.rank, 1).to(device(), dtype) for x, y in parts)
        leaves = [x.requires_grad_() for x in leaves]
        given: Any = {"sharding": queries, "kv_sharding": keys, "mask": sp.Mask(causal=True)}
        out = on(mesh, name)(*leaves, **given)
        found.append(torch.autograd.grad(out, leaves, grad))
    assert all(torch.equal(a.half(), b) for a, b in zip(*found, strict=True))


@spmd(1, 2)
@meshed(device=device)
def test_a_checkpoint_of_torch_may_compute_a_given_attention_again(mesh: sp.Mesh) -> None:
    """The checkpoint ends its second call within `inner`, by an exception of torch."""
    sharding = sp.Sharding.contiguous(4, mesh.size)
    whole = torch.linspace(0, 1, 3 * 4 * 2 * 2, device=device()).view(3, 1, 4, 2, 2)
    q, k, v = sharding.shard(whole, mesh.rank, dim=2)
    given: Any = {"sharding": sharding, "inner": sp.local_attention}
    call, found = functools.partial(on(mesh, "ulysses"), **given), []
    for attend in (call, functools.partial(checkpoint, call, use_reentrant=False)):
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        found.append(torch.autograd.grad(attend(*leaves).square().sum(), leaves))
    torch.testing.assert_close(*found)


def test_allocations_of_k_and_v_are_told_apart_however_many_there_are() -> None:
    """Ranks with equal numbers read k and v in place. Here a tensor is its allocation's number."""
    comm: Any = SimpleNamespace(window=SimpleNamespace(number=int))
    places = [torch.tensor(number) for number in (0, 1, 2, 255, 256, 258, 1 << 16, (1 << 31) - 1)]
    numbers = {problem._memory_id((k, v), comm) for k, v in product(places, repeat=2)}
    assert len(numbers) == len(places) ** 2
    assert min(numbers) >= 0
