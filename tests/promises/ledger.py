"""List what docstrings say under "Communication:", as rows that run calls and count what is sent.

All ranks hold shards of equal length. Numbers are float32, 4 bytes each, unless a row differs.
"""

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
"""Operations whose point-to-point messages are counted; of all others the calls are counted."""
Sent = tuple[int | None, int]
"""The number of calls or messages (None: any number), and the number of bytes."""
Book = dict[str, Sent]
TOKENS, KV = 12, 2 * 2 * 4
"""Tokens of a sequence, divisible by each number of ranks; elements of a token's key and value."""

Row = Callable[[Any], Any]
Rows = dict[tuple[str, ...], Row]
"""Functions that run calls, by the mesh's axes and the names of the product's functions."""

ROWS: Rows = {}
"""Rows for a `Scene`, whose ranks are all along the row's axis."""


def row(rows: Rows, *key: str) -> Callable[[Row], Row]:
    """Return a decorator that enters a function into `rows` under its key."""

    def enter(run: Row) -> Row:
        assert key not in rows
        rows[key] = run
        return run

    return enter


class Scene:
    """Hold a mesh all of whose ranks are along one axis, and count what they send.

    Args:
        mesh: a mesh with one axis; with `check="agree"` there are more agreements.
        axis: the name of the axis along which all its ranks are.
        folder: the folder for files.
    """

    def __init__(self, mesh: sp.Mesh, axis: str, folder: Path) -> None:
        self.mesh, self.comm, self.folder = mesh, mesh[axis], folder
        self.size, self.rank, self.told = self.comm.size, self.comm.rank, 0

    @contextmanager
    def sends(self, agreements: int = 0, more: int = 0, **promised: Sent) -> Iterator[None]:
        """Compare what a `with` block sends with what is promised; a single rank sends no bytes.

        In `self.told` of the `agreements` the ranks pass different values, so that they also gather
        their records. `check="agree"` makes `more` agreements than these. `promised` has the calls
        or messages, and bytes, by operation.
        """
        self.comm.counters.reset()
        yield
        found = self.now
        if agreements := agreements + more * self.checks:
            numbers = self.told * self.to_others(RECORD_BYTES // 4)
            promised["control"] = (agreements, agreements * DIGEST_BYTES + numbers)
        if self.size == 1:
            promised = {op: (calls, 0) for op, (calls, _) in promised.items() if calls != 0}
        any_number = {op for op, (calls, _) in promised.items() if calls is None}
        assert found | {op: (None, found.get(op, (0, 0))[1]) for op in any_number} == promised

    @property
    def checks(self) -> bool:
        """Return whether every collective checks that the ranks agree on its arguments."""
        return self.comm.check == "agree"

    @property
    def now(self) -> Book:
        """Return the counted calls or messages, and bytes, of each operation."""
        every = self.comm.counters.snapshot().items()
        kind = {op: "messages" if op in MESSAGES else "calls" for op, _ in every}
        counted = {op: (int(x[kind[op]]), int(x["bytes_sent"])) for op, x in every}
        return {op: sent for op, sent in counted.items() if any(sent)}

    @property
    def others(self) -> bool:
        """Return whether there are other ranks; layers of a single rank call no collective."""
        return self.size > 1

    def to_others(self, elements: int) -> int:
        """Return the bytes of `elements` elements, sent to every other rank."""
        return (self.size - 1) * 4 * elements

    def of_others(self, elements: int) -> int:
        """Return the bytes of the other ranks' parts of `elements` elements."""
        return 4 * elements * (self.size - 1) // self.size

    def doubling(self) -> int:
        """Return the bytes that recursive doubling sends for one float64."""
        levels = self.size.bit_length() - 1
        acted_for = 2 * (self.size - (1 << levels))  # of two of these ranks the odd one acts
        if self.rank >= acted_for:
            return 8 * levels
        return 8 * (levels + 1) if self.rank % 2 else 8

    def parallel(self, kind: Any, inputs: int, outputs: int, sharding: sp.Sharding) -> Any:
        """Return a parallel linear layer."""
        return kind.from_linear(nn.Linear(inputs, outputs), comm=self.comm, sharding=sharding)

    @property
    def own(self) -> int:
        """Return the number of tokens of a rank."""
        return TOKENS // self.size


def leaf(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(shape, dtype=dtype, requires_grad=True)


def parameter_bytes(module: nn.Module) -> int:
    return sum(p.nbytes for p in module.parameters())


@row(ROWS, "sp", "Communicator.agree_on")
def _(scene: Scene) -> None:
    """Make an agreement that is always made, then one that `check="off"` leaves out."""
    with scene.sends(agreements=1):
        assert scene.comm.agree_on(lambda: "a call", lambda: 7) == (7,) * scene.size
    with scene.sends(more=1):
        told = scene.comm.agree_on(lambda: "a call", always=False)
    assert told == (0,) * (scene.size * scene.checks)


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
    with scene.sends(more=1, all_reduce=(3, 7 * 8 + 4 * 2 + 3 * 2)):
        total.backward()


@row(ROWS, "sp", "all_reduce_")
def _(scene: Scene) -> None:
    with scene.sends(more=1, all_reduce=(1, 20)):
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
        more=2 * scene.others,
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
            more=5 * scene.others,
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
    with scene.sends(more=3, all_gather=again, reduce_scatter=scatter, all_reduce=(1, 5 * 4)):
        out.sum().backward()
    column.requires_grad_(False)  # then no rank needs the whole input in backward
    out = line(column(x))
    with scene.sends(more=3, all_gather=gather, reduce_scatter=scatter, all_reduce=(1, 5 * 4)):
        out.sum().backward()
    column.requires_grad_(True)
    out = line(column(x.detach()))  # then no rank needs the input's gradient
    with scene.sends(more=3, all_gather=again, all_reduce=(1, 5 * 4)):
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
    shifts = min(scene.size - 1, 2)  # two ranks need one shift for both borders
    scene.told = shifts if scene.size > 2 else 0  # each of two ranks has one border
    with scene.sends(agreements=1 + shifts, shift=(shifts, sum(borders))):
        loss.next_token_labels(tokens, comm=scene.comm, sharding=sharding)


@row(ROWS, "sp", "next_token_loss")
def _(scene: Scene) -> None:
    """Let the ranks split the vocabulary, then let each rank have its own tokens."""
    alone, logits, labels = scene.mesh[()], leaf(2, 3, 4), torch.zeros(2, 3, dtype=torch.int64)
    with scene.sends(agreements=1, all_reduce=(2, 4 * (2 * 6 + 2 * 6))):
        mean = loss.next_token_loss(logits, labels, tensor=scene.comm, data=alone, chunk=4)
    with scene.sends():
        mean.backward()
    head: dict[str, Any] = {"head": leaf(2, 4), "chunk": 4}
    with scene.sends(agreements=1, all_reduce=(4, 4 * (2 * 6 + 2 * 6))):
        mean = loss.next_token_loss(logits, labels, tensor=scene.comm, data=alone, **head)
    with scene.sends(more=4, all_reduce=(4, 4 * (2 * 6 + 2 * 6))):
        mean.backward()
    with scene.sends(agreements=1, all_reduce=(2, 8 + 4)):
        mean = loss.next_token_loss(logits, labels, tensor=alone, data=scene.comm)
    with scene.sends():
        mean.backward()


@row(ROWS, "sp", "reduce_gradients", "clip_gradient_norm")
def _(scene: Scene) -> None:
    """Let each rank have its own tokens and be a stage, then let the ranks split the weights."""
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
        with scene.sends(agreements=1, all_reduce=(1, scene.doubling())):
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
    agreement = scene.checks * scene.others
    assert scene.comm.counters["control"].bytes_sent == agreement * DIGEST_BYTES
