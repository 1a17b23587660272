"""Compute many small blocks of attention in one call of a kernel.

A block is some queries against some keys of two shards. Packed documents make thousands of small
blocks, and a kernel call for each block would cost more than its work. `packed` collects them:

- `Sequences`, for the flash kernel for CUDA: blocks as sequences of different lengths.
- `Pack`, for torch's CPU kernel: square tiles of equal size. Several blocks lie along the diagonal
  of a tile, and a mask hides from each query the keys of other blocks.

A row of a tile (for a query) or a column (for a key) is called a slot. Slots of all tiles of a pack
are numbered one after the other. Some slots at the end of a tile stay empty.
"""

import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import chain, starmap
from typing import NamedTuple

import torch
from torch import Tensor

from sp_core.attention import cuda, kernels
from sp_core.attention.logits import Logits
from sp_core.attention.tiles import on_cpu
from sp_core.mask import Block
from sp_core.segments import concatenated, grouped

SIDES = (16, 32)
"""Sizes of tiles, in tokens. A block goes into the smallest tile that holds it."""
ELEMENTS = 2**17
"""The approximate number of elements of q in a pack. Its tensors then fit into the cache."""
LEAST_BLOCKS = 4
"""The least number of blocks that are packed. Copying fewer blocks into a pack saves no time."""
MOST_SEQUENCES = 1024
"""The most sequences of all examples in one call of CUDA's flash kernel. With more examples, a call
has one sequence of each. For each sequence the kernel's backward allocates 128 more rows of dq, in
float32. Its grid takes at most 65,535 sequences."""


class Side(NamedTuple):
    """Map the slots of a pack to tokens of a shard, either for its queries or for its keys.

    A pack is a padded batch of documents, and a slot is a place for one token in it.

    Args:
        source: for every slot the index of its token in the shard, int64 (all slots,). An empty
            slot has the index of any token of the pack.
        slots: the numbers of the n slots that are not empty, int64 (n,).
        tokens: source[slots], int64 (n,). No token occurs twice.
    """

    source: Tensor
    slots: Tensor
    tokens: Tensor


class Pack(NamedTuple):
    """Hold small blocks, placed in tiles of side x side, for a single call of torch's CPU kernel.

    Args:
        side: the number of queries, and of keys, of a tile.
        queries, keys: the tokens in the rows, and in the columns, of the tiles.
        first, last: for each query the first and the last slot, within the tile, of the keys that
            it sees; (tiles, 1, side, 1) each. For an empty slot first > last.
    """

    side: int
    queries: Side
    keys: Side
    first: Tensor
    last: Tensor

    def allowed(self, batch: int) -> Tensor:
        """Return the mask of the tiles of `batch` examples, bool (batch * tiles, 1, side, side)."""
        slot = torch.arange(self.side, device="cpu")
        return ((slot >= self.first) & (slot <= self.last)).repeat(batch, 1, 1, 1)

    def gather(self, side: Side, x: Tensor) -> Tensor:
        """Return tiles with tokens of x, of shape (B * tiles, H, self.side, D).

        Args:
            side: `queries` or `keys`; its `source` has the index of the token for each slot.
            x: (B, H, S, D), the queries, or the keys or values, of the shard.
        """
        found = x.transpose(1, 2).index_select(1, side.source)
        return found.reshape(-1, self.side, *x.shape[1::2]).transpose(1, 2)

    def scatter(self, side: Side, part: Tensor, into: Tensor) -> None:
        """Copy tiles back: overwrite the pack's tokens in `into` with their rows of `part`.

        Empty slots are not copied, and tokens outside the pack are not changed.

        Args:
            side: `queries` or `keys`; it says which slot holds which token.
            part: (B * tiles, H, self.side, D), as from `gather`.
            into: (B, H, S, D), all tokens of the shard.
        """
        flat = part.transpose(1, 2).reshape(len(into), -1, *into.shape[1::2])
        into.transpose(1, 2).index_copy_(1, side.tokens, flat.index_select(1, side.slots))

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, logits: Logits, out: Tensor, lse: Tensor
    ) -> Tensor:
        """Compute attention in the pack's blocks, and write its queries' rows of `out` and `lse`.

        Args:
            q: (B, H, Sq, D), all queries of the shard.
            k, v: (B, K, Sk, D), all keys and values of the other shard.
            logits: how the logits follow from q k^T.
            out: (B, H, Sq, D); rows of the pack's queries are overwritten.
            lse: (B, H, Sq); rows of the pack's queries are overwritten.

        Returns:
            The indices of the pack's queries in the shard, int64.
        """
        q_, k_, v_ = (
            self.gather(self.queries, q),
            self.gather(self.keys, k),
            self.gather(self.keys, v),
        )
        parts = kernels.forward(q_, k_, v_, "partial", self.allowed(len(q)), logits)
        self.scatter(self.queries, parts[0], out)
        self.scatter(self.queries, parts[1].unsqueeze(-1), lse.unsqueeze(-1))
        return self.queries.tokens

    def backward(
        self, tensors: tuple[Tensor, ...], logits: Logits, grads: Iterable[Tensor]
    ) -> None:
        """Compute the gradients of the pack's blocks, and write its tokens' rows of `grads`.

        These rows are overwritten. So call this before the gradients of other blocks are added.

        Args:
            tensors: (grad_out, q, k, v, out, lse), shaped as in `forward`; grad_out as out.
            logits: how the logits follow from q k^T.
            grads: (dq, dk, dv), with the shapes of q, k and v.
        """
        sides = (self.queries, self.queries, self.keys, self.keys, self.queries)
        do, q, k, v, out = (self.gather(side, x) for side, x in zip(sides, tensors, strict=False))
        lse = self.gather(self.queries, tensors[-1].unsqueeze(-1)).squeeze(-1).contiguous()
        allowed = self.allowed(len(tensors[0]))
        parts = kernels.backward(do, q, k, v, out, lse, "partial", allowed, logits)
        for side, part, into in zip(sides[1:4], parts, grads, strict=True):
            self.scatter(side, part, into)


class Sequences(NamedTuple):
    """Hold blocks of one kind as sequences for a single call of the flash kernel for CUDA.

    Args:
        causal: True if all blocks are causal, False if all are full.
        queries, keys: the indices in the shard of the queries, and of the keys, of all blocks, one
            block after the other; int64.
        lengths: the number of queries of each block; the number of keys of each block.
    """

    causal: bool
    queries: Tensor
    keys: Tensor
    lengths: cuda.SequenceLengths

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, logits: Logits, out: Tensor, lse: Tensor
    ) -> Tensor:
        """Compute attention in the blocks; arguments and result are those of `Pack.forward`."""
        q, k, v = _tokens(q, self.queries), _tokens(k, self.keys), _tokens(v, self.keys)
        parts = cuda.sequences(q, k, v, self.lengths, self.causal, logits.softmax_scale)
        _put(parts[0], self.queries, out)
        _put(parts[1].unsqueeze(-1), self.queries, lse.unsqueeze(-1))
        return self.queries

    def backward(
        self, tensors: tuple[Tensor, ...], logits: Logits, grads: Iterable[Tensor]
    ) -> None:
        """Compute the blocks' gradients; arguments and effects are those of `Pack.backward`."""
        sides = (self.queries, self.queries, self.keys, self.keys, self.queries)
        given = [_tokens(x, places) for x, places in zip(tensors, sides, strict=False)]
        lse = _tokens(tensors[-1].unsqueeze(-1), self.queries).squeeze(-1)
        parts = cuda.sequences_backward(given, lse, self.lengths, self.causal, logits.softmax_scale)
        for part, places, into in zip(parts, sides[1:4], grads, strict=True):
            _put(part, places, into)


def _tokens(x: Tensor, places: Tensor) -> Tensor:
    """Copy the tokens of x (B, H, S, D) at n places, as (B * n, H, D)."""
    return x.transpose(1, 2).index_select(1, cuda.on_device(places, x.device)).flatten(0, 1)


def _put(part: Tensor, places: Tensor, into: Tensor) -> None:
    """Write `part` (B * n, H, D) over the tokens at n places of `into` (B, H, S, D)."""
    part = part.unflatten(0, (len(into), -1)).to(into.dtype)
    into.transpose(1, 2).index_copy_(1, cuda.on_device(places, into.device), part)


Packs = tuple[Pack | Sequences, ...]


def packed(blocks: tuple[Block, ...], q: Tensor, logits: Logits) -> tuple[tuple[Block, ...], Packs]:
    """Choose which blocks are computed one by one, and which in packs, many in a kernel call.

    Args:
        blocks: the planned blocks, in order of their queries.
        q: (B, H, Sq, D); its shape, dtype and device decide whether and how blocks are packed.
        logits: with softcap or ALiBi nothing is packed. Nor is a FakeTensor, because packs hold
            tensors and are cached for later calls with values.

    Returns:
        The blocks to compute one by one, and the packs of all other blocks. No two packed blocks
        share a query or a key.
    """
    has_values = type(q).__torch_dispatch__ is Tensor.__torch_dispatch__
    if not has_values or not q.numel() or logits.needs_plain_kernel:
        return blocks, ()
    if on_cpu(q):
        return _packed(blocks, ELEMENTS * q.shape[2] // q.numel())
    kernel = kernels.backend_for(q, "full", logits)
    most = max(1, MOST_SEQUENCES // len(q))
    return _sequences(blocks, most) if kernel == "flash_cuda" else (blocks, ())


@lru_cache(maxsize=64)
def _packed(blocks: tuple[Block, ...], tokens: int) -> tuple[tuple[Block, ...], tuple[Pack, ...]]:
    """Put blocks of at most 32 queries and 32 keys into tiles.

    Return the blocks that are in no tile, and packs of less than `tokens` + side tokens each.
    """
    by_side: dict[int, list[Block]] = {side: [] for side in SIDES}
    for block in _apart(blocks, SIDES[-1]):
        by_side[next(side for side in SIDES if max(block.shape) <= side)].append(block)
    many = [
        (found, side)
        for side, some in by_side.items()
        for found in grouped(some, lambda block: max(block.shape), tokens + side - 1)
        if len(found) >= LEAST_BLOCKS
    ]
    return _without(blocks, [found for found, _ in many]), tuple(starmap(_pack, many))


@lru_cache(maxsize=64)
def _sequences(blocks: tuple[Block, ...], most: int) -> tuple[tuple[Block, ...], Packs]:
    """Make each `Sequences` of up to `most` blocks of one kind; return what `packed` returns."""
    kinds: dict[str, list[Block]] = {"causal": [], "full": []}
    for block in _apart(blocks):
        kinds[block.kind].append(block)
    many = [
        (kind, part)
        for kind, found in kinds.items()
        if len(found) >= LEAST_BLOCKS
        for part in grouped(found, lambda block: 1, most)
    ]
    made = (
        Sequences(
            kind == "causal",
            concatenated([range(block.q_start, block.q_stop) for block in found]),
            concatenated([range(block.kv_start, block.kv_stop) for block in found]),
            (tuple(block.shape[0] for block in found), tuple(block.shape[1] for block in found)),
        )
        for kind, found in many
    )
    return _without(blocks, [found for _, found in many]), tuple(made)


def _apart(blocks: Iterable[Block], most: int = sys.maxsize) -> Iterator[Block]:
    """Yield full and causal blocks that share no query and no key with each other.

    Each block comes after all queries and keys of the block yielded before it. Blocks with more
    than `most` queries or keys are skipped.
    """
    q_stop = kv_stop = 0
    for block in blocks:
        after = block.q_start >= q_stop and block.kv_start >= kv_stop
        if after and block.kind != "partial" and max(block.shape) <= most:
            yield block
            q_stop, kv_stop = block.q_stop, block.kv_stop


def _without(blocks: Iterable[Block], groups: Iterable[Iterable[Block]]) -> tuple[Block, ...]:
    """Return the blocks that are in none of the groups."""
    taken = set(chain.from_iterable(groups))
    return tuple(block for block in blocks if block not in taken)


def _pack(blocks: Sequence[Block], side: int) -> Pack:
    """Place blocks in tiles of side x side, each after the previous one along the diagonal.

    A block that does not fit into the current tile begins a new tile.
    """
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
    # empty slots see nothing
    limits = torch.tensor([[1], [0]], device="cpu").repeat(1, (tile + 1) * side)
    limits[:, queries.slots] = torch.tensor(seen, device="cpu")
    first, last = limits.view(2, -1, 1, side, 1)
    return Pack(side, queries, keys, first, last)


def _side(length: int, slots: list[int], tokens: list[int]) -> Side:
    """Return a `Side` of `length` slots: token tokens[i] in slot slots[i], the rest empty."""
    index = torch.full((length,), tokens[0], device="cpu")
    index[slots] = torch.tensor(tokens, device="cpu")
    return Side(index, torch.tensor(slots, device="cpu"), torch.tensor(tokens, device="cpu"))
