"""Pack small blocks side by side into square tiles, and run all tiles of one size in one call.

Packed documents make thousands of small blocks, for which a kernel call each costs more than their
work. A tile shows each query the keys of its own block only. For torch's CPU kernel.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from itertools import starmap
from typing import NamedTuple

import torch
from torch import Tensor

from sp_core.attention import kernels
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


def packed(
    blocks: tuple[Block, ...], q: Tensor, logits: Logits
) -> tuple[tuple[Block, ...], tuple[Pack, ...]]:
    """Return the blocks that are computed one by one, and packs of the others."""
    if not q.numel() or not on_cpu(q) or logits.is_plain:
        return blocks, ()
    return _packed(blocks, ELEMENTS * q.shape[2] // q.numel())


@lru_cache(maxsize=64)
def _packed(blocks: tuple[Block, ...], tokens: int) -> tuple[tuple[Block, ...], tuple[Pack, ...]]:
    """Pack the small blocks whose queries and keys come after those of the packed ones before."""
    groups: dict[int, list[list[Block]]] = {side: [[]] for side in SIDES}
    q_stop = kv_stop = 0
    for block in blocks:
        side = next((side for side in SIDES if max(block.shape) <= side), 0)
        after = block.q_start >= q_stop and block.kv_start >= kv_stop
        if side and after and block.kind != "partial":
            if sum(max(other.shape) for other in groups[side][-1]) >= tokens:
                groups[side].append([])
            groups[side][-1].append(block)
            q_stop, kv_stop = block.q_stop, block.kv_stop
    many = [(found, side) for side in SIDES for found in groups[side] if len(found) >= LEAST_BLOCKS]
    taken = {block for found, _ in many for block in found}
    return tuple(block for block in blocks if block not in taken), tuple(starmap(_pack, many))


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
