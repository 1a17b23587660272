"""Run many blocks in one call of a kernel.

Packed documents make thousands of small blocks, for which a kernel call each costs more than their
work. The flash kernel for CUDA takes them as sequences of different lengths. For torch's CPU kernel
they are packed side by side into square tiles. A tile shows each query the keys of its own block
only.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import chain, starmap
from typing import NamedTuple

import torch
from torch import Tensor

from sp_core.attention import cuda, kernels
from sp_core.attention.logits import Logits
from sp_core.attention.tiles import on_cpu
from sp_core.mask import Block

SIDES = (16, 32)
"""Tokens of the sides of tiles. A block goes into the smallest that holds it."""
ELEMENTS = 2**17
"""Elements of the queries of a pack, about: its tensors stay in the cache."""
LEAST_BLOCKS = 4
"""Fewer blocks are not packed: they would be gathered for nothing."""


class Side(NamedTuple):
    """Where the queries, or the keys, of a pack come from.

    Args:
        source: token in the shard of every slot of all tiles, in turn; any token in an empty slot.
        slots: the slots that are not empty.
        tokens: their tokens; none occurs twice.
    """

    source: Tensor
    slots: Tensor
    tokens: Tensor


class Pack(NamedTuple):
    """Tiles of one size.

    Args:
        side: slots of a tile.
        queries, keys: the tokens in them.
        first, last: slots of the first and the last key that a query sees, (tiles, 1, side, 1).
    """

    side: int
    queries: Side
    keys: Side
    first: Tensor
    last: Tensor

    def allowed(self, batch: int) -> Tensor:
        """Make the dense mask, bool (B * tiles, 1, side, side)."""
        slot = torch.arange(self.side)
        return ((slot >= self.first) & (slot <= self.last)).repeat(batch, 1, 1, 1)

    def gather(self, side: Side, x: Tensor) -> Tensor:
        """Return the tokens of the tiles, (B * tiles, H, side, D), from x (B, H, S, D)."""
        found = x.transpose(1, 2).index_select(1, side.source)
        return found.reshape(-1, self.side, *x.shape[1::2]).transpose(1, 2)

    def scatter(self, side: Side, part: Tensor, into: Tensor) -> None:
        """Write the tokens of the tiles to their places: the reverse of `gather`."""
        flat = part.transpose(1, 2).reshape(len(into), -1, *into.shape[1::2])
        into.transpose(1, 2).index_copy_(1, side.tokens, flat.index_select(1, side.slots))

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, logits: Logits, out: Tensor, lse: Tensor
    ) -> None:
        """Write out (B, H, Sq, D) and lse (B, H, Sq) of the queries in the tiles."""
        q_, k_, v_ = (
            self.gather(self.queries, q),
            self.gather(self.keys, k),
            self.gather(self.keys, v),
        )
        parts = kernels.forward(q_, k_, v_, "partial", self.allowed(len(q)), logits)
        self.scatter(self.queries, parts[0], out)
        self.scatter(self.queries, parts[1].unsqueeze(-1), lse.unsqueeze(-1))

    def backward(
        self, tensors: tuple[Tensor, ...], logits: Logits, grads: Iterable[Tensor]
    ) -> None:
        """Write dq, dk and dv of the tokens in the tiles.

        Args:
            tensors: grad_out, q, k, v, out and lse of the whole shards.
            logits: how they follow from q k^T.
            grads: dq, dk and dv of the whole shards; changed.
        """
        sides = (self.queries, self.queries, self.keys, self.keys, self.queries)
        do, q, k, v, out = (self.gather(side, x) for side, x in zip(sides, tensors, strict=False))
        lse = self.gather(self.queries, tensors[-1].unsqueeze(-1)).squeeze(-1).contiguous()
        allowed = self.allowed(len(tensors[0]))
        parts = kernels.backward(do, q, k, v, out, lse, "partial", allowed, logits)
        for side, part, into in zip(sides[1:], parts, grads, strict=False):
            self.scatter(side, part, into)


class Sequences(NamedTuple):
    """Blocks that are the sequences of one call of the flash kernel.

    Args:
        causal: whether all are causal, or all full.
        queries, keys: the tokens in them.
        lengths: of the queries of each block, and of its keys.
    """

    causal: bool
    queries: Side
    keys: Side
    lengths: cuda.Lengths

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, logits: Logits, out: Tensor, lse: Tensor
    ) -> None:
        """Write out (B, H, Sq, D) and lse (B, H, Sq) of the queries in the blocks."""
        q, k, v = _tokens(q, self.queries), _tokens(k, self.keys), _tokens(v, self.keys)
        parts = cuda.sequences(q, k, v, self.lengths, self.causal, logits.softmax_scale)
        _put(parts[0], self.queries, out)
        _put(parts[1].unsqueeze(-1), self.queries, lse.unsqueeze(-1))

    def backward(
        self, tensors: tuple[Tensor, ...], logits: Logits, grads: Iterable[Tensor]
    ) -> None:
        """Write dq, dk and dv of the tokens in the blocks; the arguments are those of `Pack`."""
        sides = (self.queries, self.queries, self.keys, self.keys, self.queries)
        given = [_tokens(x, side) for x, side in zip(tensors, sides, strict=False)]
        lse = _tokens(tensors[-1].unsqueeze(-1), self.queries).squeeze(-1)
        how = self.lengths, self.causal, logits.softmax_scale
        parts = cuda.sequences_backward(given, lse, *how)
        for part, side, into in zip(parts, sides[1:], grads, strict=False):
            _put(part, side, into)


def _tokens(x: Tensor, side: Side) -> Tensor:
    """Return some tokens (B * tokens, H, D) of x (B, H, S, D)."""
    return x.transpose(1, 2).index_select(1, side.tokens.to(x.device)).flatten(0, 1)


def _put(part: Tensor, side: Side, into: Tensor) -> None:
    """Write tokens to their places: the reverse of `_tokens`."""
    part = part.unflatten(0, (len(into), -1)).to(into.dtype)
    into.transpose(1, 2).index_copy_(1, side.tokens.to(into.device), part)


Packs = tuple[Pack | Sequences, ...]


def packed(blocks: tuple[Block, ...], q: Tensor, logits: Logits) -> tuple[tuple[Block, ...], Packs]:
    """Return the blocks that are computed one by one, and packs of the others."""
    if not q.numel() or logits.is_plain:
        return blocks, ()
    if on_cpu(q):
        return _packed(blocks, ELEMENTS * q.shape[2] // q.numel())
    kernel = kernels.backend_for(q.device.type, q.dtype, q.shape[-1], "full", logits)
    return _sequences(blocks) if kernel == "flash_cuda" else (blocks, ())


@lru_cache(maxsize=64)
def _packed(blocks: tuple[Block, ...], tokens: int) -> tuple[tuple[Block, ...], Packs]:
    """Pack small blocks."""
    groups: dict[int, list[list[Block]]] = {side: [[]] for side in SIDES}
    for block in _apart(blocks, SIDES[-1]):
        side = next(side for side in SIDES if max(block.shape) <= side)
        if sum(max(other.shape) for other in groups[side][-1]) >= tokens:
            groups[side].append([])
        groups[side][-1].append(block)
    many = [(found, side) for side in SIDES for found in groups[side] if len(found) >= LEAST_BLOCKS]
    return _without(blocks, [found for found, _ in many]), tuple(starmap(_pack, many))


@lru_cache(maxsize=64)
def _sequences(blocks: tuple[Block, ...]) -> tuple[tuple[Block, ...], Packs]:
    """Make sequences of blocks."""
    kinds: dict[str, list[Block]] = {"causal": [], "full": []}
    for block in _apart(blocks):
        kinds[block.kind].append(block)
    many = {kind: found for kind, found in kinds.items() if len(found) >= LEAST_BLOCKS}
    made = (
        Sequences(
            kind == "causal",
            _side_of([block.queries for block in found]),
            _side_of([block.keys for block in found]),
            (tuple(block.shape[0] for block in found), tuple(block.shape[1] for block in found)),
        )
        for kind, found in many.items()
    )
    return _without(blocks, many.values()), tuple(made)


def _side_of(parts: Iterable[slice]) -> Side:
    tokens = torch.cat([torch.arange(part.start, part.stop) for part in parts])
    return Side(tokens, torch.arange(len(tokens)), tokens)


def _apart(blocks: Iterable[Block], most: int = sys.maxsize) -> Iterator[Block]:
    """Yield the short blocks whose queries and keys come after those of the yielded ones before."""
    q_stop = kv_stop = 0
    for block in blocks:
        after = block.q_start >= q_stop and block.kv_start >= kv_stop
        if after and block.kind != "partial" and max(block.shape) <= most:
            yield block
            q_stop, kv_stop = block.q_stop, block.kv_stop


def _without(blocks: Iterable[Block], groups: Iterable[Iterable[Block]]) -> tuple[Block, ...]:
    taken = set(chain.from_iterable(groups))
    return tuple(block for block in blocks if block not in taken)


def _pack(blocks: list[Block], side: int) -> Pack:
    """Place blocks in turn; one that does not fit begins a new tile."""
    tile, rows, columns = -1, side, side
    slots: tuple[list[int], list[int]] = ([], [])
    tokens: tuple[list[int], list[int]] = ([], [])
    seen: tuple[list[int], list[int]] = ([], [])
    for block in blocks:
        height, width = block.shape
        if max(rows + height, columns + width) > side:
            tile, rows, columns = tile + 1, 0, 0
        for number, start, part in ((0, rows, block.queries), (1, columns, block.keys)):
            tokens[number].extend(range(part.start, part.stop))
            start += tile * side
            slots[number].extend(range(start, start + part.stop - part.start))
        ends = range(columns, columns + width)
        seen[0].extend([columns] * height)
        seen[1].extend(ends if block.kind == "causal" else [ends[-1]] * height)
        rows, columns = rows + height, columns + width
    queries, keys = (_side((tile + 1) * side, *found) for found in zip(slots, tokens, strict=True))
    limits = torch.tensor([1, 0])[:, None].repeat(1, (tile + 1) * side)  # empty slots see nothing
    limits[:, queries.slots] = torch.tensor(seen)
    first, last = limits.view(2, -1, 1, side, 1)
    return Pack(side, queries, keys, first, last)


def _side(length: int, slots: list[int], tokens: list[int]) -> Side:
    index = torch.full((length,), tokens[0])
    index[slots] = torch.tensor(tokens)
    return Side(index, torch.tensor(slots), torch.tensor(tokens))
