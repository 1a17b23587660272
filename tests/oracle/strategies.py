"""Draw attention problems: valid by construction, and specifications rather than data.

A problem is a handful of small numbers and a seed, so that it prints on one line, travels to every
rank, and shrinks; each rank makes the tensors from the seed by itself.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from sp_core.mask import Mask
from sp_core.sharding import Sharding

DTYPES = ("float64", "float32", "bfloat16", "float16")


def balanced(length: int, size: int, start: int = 0) -> Sharding:
    """Return a sharding of short chunks, balanced for a causal window."""
    return Sharding.balanced(length, size, Mask(causal=True, window=9), chunk=3, start=start)


LAYOUTS: dict[str, Callable[..., Sharding]] = {
    "contiguous": Sharding.contiguous,
    "zigzag": Sharding.zigzag,
    "striped": Sharding.striped,
}
DRAWN = {**LAYOUTS, "balanced": balanced}
STORAGES = ("plain", "transposed", "padded", "spread", "expanded")
MOST_RANKS = 8  # values that depend on a shard's length are drawn for at most so many ranks


SLOPES = (0.5, 8.0, -0.05)
"""ALiBi slopes of head 0: gentle, steep, and one that favours distant keys."""


def slopes(num_heads: int, first: float | None) -> tuple[float, ...] | None:
    """Return one ALiBi slope per head, all different, as Press et al. do for 2^n heads."""
    if first is None:
        return None
    return tuple(first * 2 ** (-8 * head / num_heads) for head in range(num_heads))


@dataclass(frozen=True)
class AttentionProblem:
    """Describe an attention problem over the whole sequence, of (B, S, H, D) and (B, S, K, D).

    Args:
        batch, seq_len, kv_len, kv_heads, group, head_dim: sizes; there are `kv_heads * group` query
            heads.
        dtype: name of a torch dtype.
        layout, kv_layout: how tokens and keys are sharded: names of the table `DRAWN`.
        mask: which keys a query sees.
        softmax_scale: None for the default.
        magnitude: the queries are multiplied by this, so logits grow with it.
        values: "normal", "constant" (V is the same everywhere) or "cancelling" (V alternates in
            sign).
        upstream: gradient of the output: "normal", "one token", "expanded" (stride 0), "transposed"
            (in memory) or "zero".
        needs_grad: which of q, k, v require a gradient.
        storage: how the tensors lie in memory, one of `STORAGES`.
        seed: the seed of the tensors.
        late: whether one rank is delayed a little on purpose.
        start, kv_start: global position of the first token.
        softcap: bound of the logits, or None.
        sinks: about how large the drawn logits of the sinks are, or None for none. They need a
            gradient if the seed is even.
        alibi: ALiBi slope of head 0; those of the other heads are nearer to 0. None for none.
    """

    batch: int
    seq_len: int
    kv_len: int
    kv_heads: int
    group: int
    head_dim: int
    dtype: str
    layout: str
    kv_layout: str
    mask: Mask
    softmax_scale: float | None
    magnitude: float
    values: str
    upstream: str
    needs_grad: tuple[bool, bool, bool]
    storage: str
    seed: int
    late: bool = False
    start: int = 0
    kv_start: int = 0
    softcap: float | None = None
    sinks: float | None = None
    alibi: float | None = None

    @property
    def torch_dtype(self) -> torch.dtype:
        """Return the torch dtype."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    def sharding(self, size: int) -> Sharding:
        """Return the sharding of the queries over `size` ranks."""
        return SHARDINGS[self.layout](self.seq_len, size, self.start)

    def kv_sharding(self, size: int) -> Sharding:
        """Return the sharding of the keys over `size` ranks."""
        return SHARDINGS[self.kv_layout](self.kv_len, size, self.kv_start)

    def terms(self) -> dict[str, Any]:
        """Return the terms of the logits that are not None, as keyword arguments of attention."""
        given: dict[str, Any] = {"softmax_scale": self.softmax_scale, "softcap": self.softcap}
        given["alibi"] = slopes(self.kv_heads * self.group, self.alibi)
        if self.sinks is not None:
            heads = self._normal(3, self.kv_heads * self.group)
            given["sinks"] = (heads * self.sinks).to(self.torch_dtype)
        return {name: value for name, value in given.items() if value is not None}

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k and v of the whole sequence, in the problem's dtype and without gradient."""
        queries = (self.batch, self.seq_len, self.kv_heads * self.group, self.head_dim)
        keys = (self.batch, self.kv_len, self.kv_heads, self.head_dim)
        q = self._normal(0, *queries) * self.magnitude
        k, v = self._normal(4, *keys), self._normal(5, *keys)
        if self.values == "constant":
            v = torch.ones_like(v)
        elif self.values == "cancelling":
            v = torch.ones_like(v) * (1 - 2 * (torch.arange(self.kv_len) % 2))[:, None, None]
        if self.storage == "expanded":
            q, k, v = (x[:1].expand_as(x) for x in (q, k, v))
        return q.to(self.torch_dtype), k.to(self.torch_dtype), v.to(self.torch_dtype)

    def upstream_gradient(self) -> Tensor:
        """Return the gradient of the output of the whole sequence."""
        shape = (self.batch, self.seq_len, self.kv_heads * self.group, self.head_dim)
        grad = self._normal(1, *shape)
        if self.upstream == "one token":
            token = torch.arange(self.seq_len) == self.seed % max(self.seq_len, 1)
            grad = grad * token[:, None, None]
        elif self.upstream == "expanded":
            grad = self._normal(1, 1)
        elif self.upstream == "zero":
            grad = torch.zeros(1, dtype=torch.float64)
        return grad.to(self.torch_dtype).expand(shape)

    def upstream_lse_gradient(self) -> Tensor | None:
        """Return the gradient of the log-sum-exp (B, H, S) for every third seed, else None."""
        if self.seed % 3:
            return None
        grad = self._normal(2, self.batch, self.kv_heads * self.group, self.seq_len)
        return grad.to(self.torch_dtype).double()

    def _normal(self, number: int, *shape: int) -> Tensor:
        """Return normally distributed float64 numbers, others for each `number`."""
        generator = torch.Generator().manual_seed(self.seed + number)
        return torch.randn(shape, generator=generator, dtype=torch.float64)


def listed(length: int, size: int, start: int) -> Sharding:
    """Return a sharding of `length` positions over `size` ranks, in shuffled order and with gaps.

    The positions are drawn from the 2 * `length` positions from `start` on. Shards have random
    lengths. Equal arguments give equal shardings.
    """
    chance = random.Random(f"{length} {size} {start}")
    positions = chance.sample(range(start, start + 2 * length), length)
    cuts = sorted(chance.randint(0, length) for _ in range(size - 1))
    bounds = pairwise((0, *cuts, length))
    return Sharding.from_positions([positions[begin:end] for begin, end in bounds])


EVERY_LAYOUT: dict[str, Callable[[int, int, int], Sharding]] = {**LAYOUTS, "listed": listed}
SHARDINGS = DRAWN | EVERY_LAYOUT


def seeds() -> st.SearchStrategy[int]:
    """Draw seeds of random tensors."""
    return st.integers(0, 2**16)


def placed(x: Tensor, storage: str) -> Tensor:
    """Return a copy of x (B, S, heads, D) in the named layout; NaN lies beside its elements."""
    if storage == "transposed":
        return x.transpose(1, 2).clone(memory_format=torch.contiguous_format).transpose(1, 2)
    if storage == "tokens last":
        return x.movedim(1, 3).clone(memory_format=torch.contiguous_format).movedim(3, 1)
    if storage == "expanded":
        return x[:1].clone().expand_as(x)
    if storage == "padded":
        room = x.new_full([length + 3 for length in x.shape], torch.nan)[1:-2, 2:-1, 1:-2, 2:-1]
        return room.copy_(x)
    if storage == "spread":
        room = x.new_full([*x.shape[:-1], 2 * x.shape[-1]], torch.nan)[..., ::2]
        return room.copy_(x)
    return x.clone()


@st.composite
def lengths(draw: st.DrawFn, max_len: int) -> int:
    """Draw lengths up to a maximum; small ones more often, which leave ranks empty."""
    return draw(
        st.integers(0, min(MOST_RANKS + 1, max_len) if draw(st.integers(0, 3)) == 0 else max_len)
    )


@st.composite
def shard_lengths(draw: st.DrawFn, length: int) -> int:
    """Draw the length of a sequence's longest shard over some number of ranks, at least 1."""
    return max(1, -(-length // draw(st.integers(1, MOST_RANKS))))


@st.composite
def boundaries(draw: st.DrawFn, length: int, documents: int) -> tuple[int, ...]:
    """Draw document boundaries 0 <= ... <= length, some where shards begin; some may be equal."""
    shard = draw(shard_lengths(length))
    places = st.integers(0, length) | st.integers(0, length // shard).map(
        lambda number: number * shard
    )
    inner = draw(st.lists(places, min_size=documents - 1, max_size=documents - 1))
    return (0, *sorted(inner), length)


@st.composite
def windows(draw: st.DrawFn, longest: int, kv_len: int) -> int:
    """Draw windows of any length, more often about the length of a shard."""
    if draw(st.integers(0, 3)) == 0:
        return draw(st.just(1) | st.integers(1, longest + 2))
    shard = draw(shard_lengths(kv_len))
    return max(1, draw(st.sampled_from([shard - 1, shard, shard + 1, 2 * shard + 1])))


@st.composite
def masks(draw: st.DrawFn, seq_len: int, kv_len: int) -> Mask:
    """Draw masks: causal, window and documents, more often with limits near ends of shards."""
    window = draw(windows(max(seq_len, kv_len), kv_len)) if draw(st.integers(0, 2)) else None
    documents = kv_documents = None
    if draw(st.integers(0, 2)):
        number = draw(st.sampled_from([1, 2, 3, 4, 6]))
        documents = draw(boundaries(seq_len, number))
        if seq_len != kv_len or not draw(st.integers(0, 3)):
            kv_documents = draw(boundaries(kv_len, number))
    return Mask(draw(st.booleans()), window, documents, kv_documents)


@st.composite
def attention_problems(
    draw: st.DrawFn, max_len: int = 33, dtypes: tuple[str, ...] = DTYPES
) -> AttentionProblem:
    """Draw self and cross attention of every kind that the schemes promise."""
    seq_len = draw(lengths(max_len))
    kv_len = draw(st.just(seq_len) | lengths(max_len))
    layout = draw(st.sampled_from(sorted(DRAWN)))
    dtype = draw(st.sampled_from(dtypes))
    return AttentionProblem(
        batch=draw(st.integers(1, 3)),
        seq_len=seq_len,
        kv_len=kv_len,
        kv_heads=draw(st.sampled_from([1, 1, 1, 2, 2, 3, 3, 4, 5, 6, 7, 8, 9])),
        group=draw(st.sampled_from([1, 1, 2, 3, 7])),
        head_dim=draw(st.sampled_from([1, 4, 5, 8, 16])),
        dtype=dtype,
        layout=layout,
        kv_layout=layout if seq_len == kv_len else draw(st.sampled_from(sorted(DRAWN))),
        mask=draw(masks(seq_len, kv_len)),
        softmax_scale=draw(st.none() | st.sampled_from([0.25, 1.0])),
        # at 1e4 the gradients of keys leave the range of float16
        magnitude=draw(
            st.sampled_from(
                [1.0, 1.0, 30.0, 1e3] if dtype == "float16" else [1.0, 1.0, 30.0, 1e3, 1e4]
            )
        ),
        values=draw(st.sampled_from(["normal", "normal", "constant", "cancelling"])),
        upstream=draw(st.sampled_from(["normal", "one token", "expanded", "transposed", "zero"])),
        needs_grad=draw(
            st.just((True, True, True)) | st.tuples(st.booleans(), st.booleans(), st.booleans())
        ),
        storage=draw(st.sampled_from(STORAGES)),
        seed=draw(seeds()),
        late=draw(st.integers(0, 7)) == 7,
        softcap=draw(st.none() | st.sampled_from([0.5, 5.0, 50.0])),
        sinks=draw(st.none() | st.sampled_from([1.0, 30.0])),
        alibi=draw(st.none() | st.sampled_from(SLOPES)),
    )
