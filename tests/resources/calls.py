"""Use everything public once: `CALLS` holds one row for each use."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import sp_core as sp
from sp_core.schedules import ALGORITHMS
from sp_core.schemes import SCHEMES

COLLECTIVES: dict[str, dict[str, Any]] = {
    "all_gather": {},
    "reduce_scatter": {},
    "all_reduce": {},
    "all_to_all": {"split_dim": 1, "concat_dim": 0},
    "shift": {},
    "broadcast": {"root": 1},
    "reduce": {"root": 1},
    "copy_to_group": {},
    "reduce_from_group": {},
    "gather_replicated": {},
}


class Place:
    """Where calls are made: meshes that share memory, send messages, split weights or layers.

    Args:
        comm: the ranks.
        folder: for files; the same on every rank.
    """

    def __init__(self, comm: Any, folder: Path) -> None:
        self.comm, self.folder, size = comm, folder, comm.size
        self.kept: list[Any] = []  # what a test that leaks on purpose puts there
        self.window = sp.Mesh(comm, transport="window", ring=size, ulysses=1)
        self.messages = sp.Mesh(comm, transport="host", ring=1, ulysses=size)
        self.tensor, self.stages = sp.Mesh(comm, tp=size), sp.Mesh(comm, pp=size)
        self.meshes = (self.window, self.messages, self.tensor, self.stages)

    def __enter__(self) -> Place:
        return self

    def __exit__(self, *raised: Any) -> None:
        for mesh in self.meshes:
            mesh.__exit__(*raised)

    def mesh(self, n: int) -> sp.Mesh:
        """Return the mesh with shared memory, or in every second call the one with messages."""
        return self.window if n % 2 else self.messages

    def group(self, n: int) -> sp.Communicator:
        """Return all ranks of `mesh(n)`."""
        return self.mesh(n)["ring", "ulysses"]


Call = Callable[[Place, int], object]
CALLS: dict[str, Call] = {}
"""Each row is called with a place and a number, another one in every call and at least 4."""
TURNS: dict[str, int] = {"plans": 16, "generating": 3}
"""After so many calls a row has used all it takes turns with; 2 unless it is named here."""


def row(function: Call) -> Call:
    """Enter a row under the name of its function."""
    CALLS[function.__name__] = function
    return function


def leaf(*shape: int) -> Tensor:
    """Make a tensor that needs a gradient."""
    return torch.ones(shape, requires_grad=True)


def _differentiated(name: str, op: str, place: Place, n: int) -> None:
    """Run a collective and its backward; algorithms take turns."""
    comm, arguments = place.group(n), dict(COLLECTIVES[op])
    usable = [a for a in ALGORITHMS.get(op, ["auto"]) if a != "window" or comm.window is not None]
    if op in ALGORITHMS:
        arguments["algorithm"] = usable[n // 2 % len(usable)]
    result: Any = getattr(sp, name)(leaf(n, comm.size), comm=comm, **arguments)
    comm.poll()
    (result.wait() if isinstance(result, sp.Pending) else result).sum().backward()


for _op in COLLECTIVES:
    for _name in (_op, f"{_op}_start"):
        if hasattr(sp, _name):
            CALLS[_name] = partial(_differentiated, _name, _op)
    TURNS[_op] = 2 * len(ALGORITHMS.get(_op, ["auto"]))


@row
def never_waited_for(place: Place, n: int) -> None:
    """A started collective that only `poll` brings to its end."""
    comm = place.group(n)
    sp.all_reduce_start(torch.ones(n), comm=comm, algorithm="ring")
    while comm._pending:
        comm.poll()


@row
def copy_all_to_group(place: Place, n: int) -> None:
    copies = sp.copy_all_to_group([leaf(n), leaf(2).double()], comm=place.group(n))
    sum(x.sum() for x in copies).backward()  # type: ignore[union-attr]


@row
def plans(place: Place, n: int) -> None:
    comm = place.group(n)
    ops = ["all_reduce_", *list(COLLECTIVES)[:7]]
    op = ops[n // 2 % len(ops)]
    plan = sp.plan(op, torch.ones(n, comm.size), comm=comm, **COLLECTIVES.get(op, {}))
    plan.run()
    plan.finish(plan.start())
    sp.all_reduce_(torch.ones(n), comm=comm)


@row
def shared_memory(place: Place, n: int) -> None:
    comm = place.window["ring"]
    x = sp.shared_empty((n, 3), comm=comm)
    sp.fence(comm=comm)
    sp.peer(x, 1 - comm.rank, comm=comm).sum()
    sp.fence(comm=comm)


def qkv(n: int) -> tuple[Tensor, Tensor, Tensor]:
    """Make one rank's part of an attention problem."""
    return leaf(1, n, 4, 4), leaf(1, n, 2, 4), leaf(1, n, 2, 4)


def _scheme(name: str, place: Place, n: int) -> None:
    comm = place.group(n)
    sharding = sp.Sharding.zigzag(comm.size * n, comm.size)
    out = SCHEMES[name](*qkv(n), comm=comm, sharding=sharding, mask=sp.Mask(causal=True))
    assert isinstance(out, Tensor)
    out.sum().backward()


CALLS.update({f"{name}_attention": partial(_scheme, name) for name in SCHEMES})


@row
def hybrid_attention(place: Place, n: int) -> None:
    mesh, size = place.mesh(n), place.comm.size
    sharding = sp.Sharding.contiguous(size * n, size)
    out, lse = sp.hybrid_attention(*qkv(n), mesh=mesh, sharding=sharding, return_lse=True)
    (out.sum() + lse.sum()).backward()


@row
def resident_attention(place: Place, n: int) -> None:
    """Keys and values that live in shared memory."""
    comm = place.window["ring"]
    k, v = (sp.shared_empty((1, n, 2, 4), comm=comm).requires_grad_() for _ in range(2))
    sharding = sp.Sharding.striped(comm.size * n, comm.size)
    out = sp.ring_attention(qkv(n)[0], k, v, comm=comm, sharding=sharding)
    assert isinstance(out, Tensor)
    out.sum().backward()


@row
def one_device(place: Place, n: int) -> None:
    q, k, v = qkv(n)
    mask = sp.Mask(causal=True, documents=(0, 2, n))
    out, lse = sp.local_attention(q, k, v, mask=mask, return_lse=True)
    out.sum().backward()
    part = out.detach().transpose(1, 2), lse.detach()
    sp.merge(*part, *part)
    sp.dropout(sp.Rope(4).apply(q, range(n)), 0.5, seed=n, positions=range(n)).sum().backward()
    mask.allowed(range(n), range(n))
    mask.check_lengths(n)
    assert mask.key_documents == (0, 2, n)
    assert mask.difference_range()[0] == 0


@row
def shardings(place: Place, n: int) -> None:
    x = torch.ones(n, 2)
    for sharding in (
        sp.Sharding.zigzag(n, 2),
        sp.Sharding.from_positions([[1, 0], list(range(2, n))]),
    ):
        parts = [sharding.shard(x, rank, 0) for rank in range(2)]
        sharding.unshard(parts, 0)
        sharding.restore(torch.cat(parts), 0)
        sharding.unsort_segments(sharding.sort_segments(torch.cat(parts), 0), 0)
        sharding.group([[0, 1]]).positions(0)
        assert sum(map(len, sharding.sorted_ranges(0))) == sharding.local_len(0) <= sharding.seq_len
        assert sharding.causal_work(0) > 0


@row
def layers(place: Place, n: int) -> None:
    comm, size = place.group(n), place.comm.size
    options: Any = {"comm": comm, "dtype": torch.float64}  # oneDNN keeps its float32 GELU by sizes
    x = sp.RMSNorm(8, **options)(leaf(1, n, 8).double())
    options |= {"rope": sp.Rope(4), "mask": sp.Mask(causal=True), "dropout": 0.5}
    block = sp.TransformerBlock(8, 2, **options)
    block(x, sharding=sp.Sharding.zigzag(size * n, size), seed=n).sum().backward()


@row
def parallel_linear(place: Place, n: int) -> None:
    comm, sharding = place.group(n), sp.Sharding.contiguous(2 * n, 2)
    column = sp.ColumnParallelLinear.from_linear(nn.Linear(4, 6), comm=comm, sharding=sharding)
    line = sp.RowParallelLinear.from_linear(nn.Linear(6, 4), comm=comm, sharding=sharding)
    line(column(leaf(1, n, 4))).sum().backward()
    column.to_linear(), line.to_linear()


@row
def meshes(place: Place, n: int) -> None:
    transport = ("host", "window")[n % 2]
    with sp.Mesh(place.comm, transport=transport, a=place.comm.size, b=1) as mesh:
        assert mesh["b", "a"].rank == mesh["a"].rank
        group = mesh["a"]
        sp.all_reduce(torch.ones(n), comm=group)
    group.abandon()  # it has been freed


@row
def communicators(place: Place, n: int) -> None:
    comm = place.group(n)
    counter = comm.counter()
    counter.take()
    counter.free()
    other = 1 - comm.rank
    handle = comm.exchange([(other, torch.ones(n))], [(other, torch.empty(n))])
    comm.wait(handle, "exchange")
    comm.counters.reset()


@row
def refusals(place: Place, n: int) -> None:
    """Errors, which every rank raises."""
    comm = place.group(n)
    wrong: list[Callable[[], object]] = [
        lambda: sp.all_gather(torch.ones(n), comm=comm, dim=3),
        lambda: sp.all_reduce(torch.ones(n), comm=comm, algorithm="magic"),
        lambda: sp.all_reduce(torch.ones(n + comm.rank), comm=comm),
        lambda: sp.Mesh(place.comm, a=place.comm.size + 1),
        lambda: sp.ring_attention(*qkv(n), comm=comm, sharding=sp.Sharding.zigzag(n, 2)),
    ]
    for call in wrong:
        with contextlib.suppress(ValueError, sp.RankError):
            call()
            raise AssertionError("it was accepted")
