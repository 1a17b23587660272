"""What docstrings say under "Communication:", as rows: each runs a call and states what is sent.

P ranks hold even shards. Numbers are float32 unless a row says otherwise, so one has 4 bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import sp_core as sp
from sp_core.agreement import DIGEST_BYTES, RECORD_BYTES
from sp_core.nn import gradients, loss

MESSAGES = ("shift", "ring", "pipeline", "tied")
"""Operations whose point-to-point messages are counted; of all others it is the calls."""
Sent = tuple[int | None, int]
"""Calls or messages (None: as many as it likes), and bytes."""
Book = dict[str, Sent]
TOKENS, KV = 12, 2 * 2 * 4
"""Tokens of a sequence, which all numbers of ranks divide; elements of keys and values of one."""

Row = Callable[[Any], Any]
Rows = dict[tuple[str, ...], Row]
"""What to run, by axes and the names of the functions that it states."""

ROWS: Rows = {}
"""Rows for a `Scene`, all of whose ranks are along the axis."""


def row(rows: Rows, *key: str) -> Callable[[Row], Row]:
    """Enter a row."""

    def enter(run: Row) -> Row:
        assert key not in rows
        rows[key] = run
        return run

    return enter


class Scene:
    """A mesh all of whose ranks are along one axis.

    Args:
        mesh: made with `check="off"`: what agrees always is counted, and nothing else.
        axis: of all its ranks.
        folder: for files.
    """

    def __init__(self, mesh: sp.Mesh, axis: str, folder: Path) -> None:
        self.mesh, self.comm, self.folder = mesh, mesh[axis], folder
        self.size, self.rank, self.told = self.comm.size, self.comm.rank, 0

    @contextmanager
    def sends(self, agreements: int = 0, **promised: Sent) -> Iterator[None]:
        """Compare what a block sends with what is promised; a single rank sends no bytes.

        In `self.told` agreements the numbers of the ranks differ, so they are gathered.
        """
        self.comm.counters.reset()
        yield
        found = self.now
        if agreements:
            numbers = self.told * self.to_others(RECORD_BYTES // 4)
            promised["control"] = (agreements, agreements * DIGEST_BYTES + numbers)
        if self.size == 1:
            promised = {op: (calls, 0) for op, (calls, _) in promised.items() if calls != 0}
        any_number = {op for op, (calls, _) in promised.items() if calls is None}
        assert found | {op: (None, found.get(op, (0, 0))[1]) for op in any_number} == promised

    @property
    def now(self) -> Book:
        """What has been counted."""
        every = self.comm.counters.snapshot().items()
        kind = {op: "messages" if op in MESSAGES else "calls" for op, _ in every}
        counted = {op: (int(x[kind[op]]), int(x["bytes_sent"])) for op, x in every}
        return {op: sent for op, sent in counted.items() if any(sent)}

    @property
    def others(self) -> bool:
        """Whether there are other ranks: layers of a single one call no collective."""
        return self.size > 1

    def to_others(self, elements: int) -> int:
        """Bytes of so many elements, sent to every other rank."""
        return (self.size - 1) * 4 * elements

    def of_others(self, elements: int) -> int:
        """Bytes of the other ranks' parts of so many elements."""
        return 4 * elements * (self.size - 1) // self.size

    def parallel(self, kind: Any, inputs: int, outputs: int, sharding: sp.Sharding) -> Any:
        """A parallel linear layer."""
        return kind.from_linear(nn.Linear(inputs, outputs), comm=self.comm, sharding=sharding)

    @property
    def own(self) -> int:
        """Tokens of a rank."""
        return TOKENS // self.size


def leaf(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(shape, dtype=dtype, requires_grad=True)


def parameter_bytes(module: nn.Module) -> int:
    return sum(p.nbytes for p in module.parameters())


@row(ROWS, "sp", "Communicator.agree_on")
def _(scene: Scene) -> None:
    """The scene's mesh has check="off"."""
    with scene.sends(agreements=1):
        assert scene.comm.agree_on(lambda: "a call", lambda: 7) == (7,) * scene.size
    with scene.sends():
        assert scene.comm.agree_on(lambda: "a call", always=False) == ()


@row(ROWS, "sp", "copy_all_to_group")
def _(scene: Scene) -> None:
    dtypes = (torch.float64, torch.bfloat16, torch.float64, torch.float16)
    shapes: list[tuple[int, ...]] = [(2, 3), (4,), (), (3,)]
    learning = [leaf(*each, dtype=dtype) for each, dtype in zip(shapes, dtypes, strict=True)]
    tensors = [*learning, torch.ones(5)]
    with scene.sends(agreements=1):
        copies = sp.copy_all_to_group(tensors, comm=scene.comm)
    total = sum(x.double().sum() for x in copies)
    assert isinstance(total, Tensor)
    with scene.sends(all_reduce=(3, 7 * 8 + 4 * 2 + 3 * 2)):
        total.backward()


@row(ROWS, "sp", "all_reduce_")
def _(scene: Scene) -> None:
    with scene.sends(all_reduce=(1, 20)):
        sp.all_reduce_(torch.ones(5), comm=scene.comm)


@row(ROWS, "sp", "SelfAttention.forward", "TransformerBlock.forward")
def _(scene: Scene) -> None:
    sharding, x = sp.Sharding.zigzag(TOKENS, scene.size), leaf(1, scene.own, 8)
    keys, sums = scene.to_others(scene.own * KV), scene.of_others(TOKENS * KV)
    options: Any = {"num_kv_heads": 2, "head_dim": 4, "comm": scene.comm}
    attention = sp.SelfAttention(8, 4, **options)
    with scene.sends(agreements=2, all_gather=(None, keys)):
        out = attention(x, sharding=sharding)
    with scene.sends(
        all_gather=(None, keys),
        reduce_scatter=(None, sums),
        all_reduce=(scene.others, parameter_bytes(attention)),
    ):
        out.sum().backward()
    for p, more in ((0.0, 0), (0.5, 1)):
        block = sp.TransformerBlock(8, 4, dropout=p, **options)
        with scene.sends(agreements=5 + more, all_gather=(None, keys)):
            out = block(x, sharding=sharding, seed=1)
        with scene.sends(
            all_gather=(None, keys),
            reduce_scatter=(None, sums),
            all_reduce=(4 * scene.others, parameter_bytes(block)),
        ):
            out.sum().backward()
    with torch.no_grad(), scene.sends(agreements=6, all_gather=(None, keys)):
        block(x, sharding=sharding, seed=1)


@row(ROWS, "sp", "ColumnParallelLinear.forward", "RowParallelLinear.forward")
def _(scene: Scene) -> None:
    sharding, x = sp.Sharding.striped(TOKENS, scene.size), leaf(2, scene.own, 5)
    gather, scatter = (
        (None, scene.to_others(2 * scene.own * 5)),
        (None, scene.of_others(2 * TOKENS * 5)),
    )
    column = scene.parallel(sp.ColumnParallelLinear, 5, 12, sharding)
    line = scene.parallel(sp.RowParallelLinear, 12, 5, sharding)
    with scene.sends(agreements=1, all_gather=gather):
        inner = column(x)
    with scene.sends(agreements=1, reduce_scatter=scatter):
        out = line(inner)
    again = (None, 2 * gather[1])
    with scene.sends(all_gather=again, reduce_scatter=scatter, all_reduce=(1, 5 * 4)):
        out.sum().backward()
    column.requires_grad_(False)  # then nobody needs the whole input again
    out = line(column(x))
    with scene.sends(all_gather=gather, reduce_scatter=scatter, all_reduce=(1, 5 * 4)):
        out.sum().backward()
    column.requires_grad_(True)
    out = line(column(x.detach()))  # then nobody needs the gradient of the input
    with scene.sends(all_gather=again, all_reduce=(1, 5 * 4)):
        out.sum().backward()


@row(ROWS, "sp", "ColumnParallelLinear.to_linear", "RowParallelLinear.to_linear")
def _(scene: Scene) -> None:
    sharding, part = sp.Sharding.striped(TOKENS, scene.size), 12 // scene.size
    column = scene.parallel(sp.ColumnParallelLinear, 5, 12, sharding)
    line = scene.parallel(sp.RowParallelLinear, 12, 5, sharding)
    with scene.sends(agreements=1, all_gather=(2, scene.to_others(part * 6))):
        column.to_linear()
    with scene.sends(agreements=1, all_gather=(1, scene.to_others(part * 5))):
        line.to_linear()


@row(ROWS, "sp", "next_token_labels")
def _(scene: Scene) -> None:
    sharding, tokens = (
        sp.Sharding.zigzag(TOKENS, scene.size),
        torch.ones(2, scene.own, dtype=torch.int64),
    )
    borders = [2 * 8 * (scene.rank > 0), 2 * 8 * (scene.rank < scene.size - 1)]
    shifts = min(scene.size - 1, 2)  # on two ranks both borders are in one
    scene.told = shifts if scene.size > 2 else 0  # else both ranks have one border
    with scene.sends(agreements=1 + shifts, shift=(shifts, sum(borders))):
        loss.next_token_labels(tokens, comm=scene.comm, sharding=sharding)


@row(ROWS, "sp", "next_token_loss")
def _(scene: Scene) -> None:
    """As the ranks that split the vocabulary, and as those that have other tokens."""
    alone, logits, labels = scene.mesh[()], leaf(2, 3, 4), torch.zeros(2, 3, dtype=torch.int64)
    with scene.sends(agreements=1, all_reduce=(2, 4 * (2 * 6 + 2 * 6))):
        mean = loss.next_token_loss(logits, labels, tensor=scene.comm, data=alone, chunk=4)
    with scene.sends():
        mean.backward()
    head: dict[str, Any] = {"head": leaf(2, 4), "chunk": 4}
    with scene.sends(agreements=1, all_reduce=(4, 4 * (2 * 6 + 2 * 6))):
        mean = loss.next_token_loss(logits, labels, tensor=scene.comm, data=alone, **head)
    with scene.sends(all_reduce=(4, 4 * (2 * 6 + 2 * 6))):
        mean.backward()
    with scene.sends(agreements=1, all_reduce=(2, 8 + 4)):
        mean = loss.next_token_loss(logits, labels, tensor=alone, data=scene.comm)
    with scene.sends():
        mean.backward()


@row(ROWS, "sp", "reduce_gradients", "clip_gradient_norm")
def _(scene: Scene) -> None:
    """As the ranks that have other tokens, as those that split the weights, and as stages."""
    alone, shape = scene.mesh[()], (scene.size, 3)
    for ranks, data, tensor in ((1, scene.comm, alone), (scene.size, alone, scene.comm)):
        cut = gradients.Placement.split(shape, 0, ranks)
        shared = gradients.Placement.replicated(shape, ranks, partial=True)
        weights = []
        dtypes = ((cut, torch.float32), (shared, torch.bfloat16), (shared, torch.float64))
        for placement, dtype in dtypes:
            weight = nn.Parameter(torch.ones(placement.local_shape(tensor.rank), dtype=dtype))
            weights.append(gradients.place(weight, placement))
        whole = 3 * scene.size
        sums = (2, whole * (2 + 8)) if tensor is scene.comm else (3, whole * (4 + 2 + 8))
        with scene.sends(agreements=1, all_reduce=sums):
            gradients.reduce_gradients(weights, data=data, tensor=tensor)
        stages = None if tensor is scene.comm else scene.comm
        with scene.sends(agreements=1, all_reduce=(1, 8)):
            gradients.clip_gradient_norm(weights, 1.0, tensor=tensor, stages=stages)


@row(ROWS, "sp", "shared_empty", "fence")
def _(scene: Scene) -> None:
    with scene.sends(agreements=1):
        x = sp.shared_empty((3,), comm=scene.comm)
    if scene.comm.window is None:
        with scene.sends(agreements=1):
            sp.fence(comm=scene.comm)
        return
    with scene.sends():
        sp.peer(x, 0, comm=scene.comm)
    sp.fence(comm=scene.comm)
    assert scene.comm.counters["control"].bytes_sent == 0
