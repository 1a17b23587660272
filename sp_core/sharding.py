"""Define `Sharding`: which rank holds which tokens of a sequence. Nothing here communicates.

A sharding maps every rank to the global positions of its tokens, in the order in which the rank
holds them. Masks, rotary angles, labels and document boundaries derive from these positions.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, Self

import torch
from torch import Tensor

from sp_core.arguments import check, check_type, length_along, plain
from sp_core.errors import ShapeError
from sp_core.mask import FAR64, HashedOnce, Mask, count_visible, runs
from sp_core.segments import (
    Segment,
    concatenated,
    consecutive,
    deal_chunks,
    split_ranges as split_ranges,
    split_sizes as split_sizes,
)

LEAST_CHUNK = 32
"""`Sharding.balanced` halves no chunk of at most this many tokens: short ones make kernels slow."""


@dataclass(frozen=True)
class Sharding(HashedOnce):
    """The global positions of the tokens that each rank holds, in the rank's own order.

    Make one with `contiguous`, `zigzag`, `striped`, `balanced` or `from_positions`, which check
    their arguments; `Sharding(segments)` does not. Shards may be uneven and empty. Some methods
    take tensors in the order of an all-gather: the shards of all ranks in rank order.

    Args:
        segments: for each rank the position ranges that it holds, one after the other.
    """

    segments: tuple[tuple[Segment, ...], ...]

    def __post_init__(self) -> None:
        if not self.segments:
            raise ShapeError("a sharding needs at least 1 rank; 0 were given. Pass size >= 1.")

    @classmethod
    def contiguous(cls, seq_len: int, size: int, start: int = 0) -> Self:
        """Give each rank one consecutive range. The ranges are as even as possible.

        Args:
            seq_len: number of tokens, >= 0.
            size: number of ranks, >= 1.
            start: global position of the first token.

        Raises:
            ShapeError: negative `seq_len` or `start`, `size` < 1, or a position of 2**62 or more.
            TypeError: an argument is not a whole number.
        """
        tokens, size = _tokens(seq_len, size, start)
        return cls(tuple((tokens[p.start : p.stop],) for p in split_ranges(len(tokens), size)))

    @classmethod
    def zigzag(cls, seq_len: int, size: int, start: int = 0) -> Self:
        """Give rank r chunk `r` and then chunk `2*size-1-r` of `2*size` chunks.

        All ranks then have nearly equal work in causal attention.

        Arguments and errors are those of `contiguous`.

        Source: head-tail balanced ring attention, zhuzilin/ring-flash-attention,
        `zigzag_ring_flash_attn`.
        """
        tokens, size = _tokens(seq_len, size, start)
        chunks = [tokens[p.start : p.stop] for p in split_ranges(len(tokens), 2 * size)]
        return cls(tuple((chunks[rank], chunks[2 * size - 1 - rank]) for rank in range(size)))

    @classmethod
    def striped(cls, seq_len: int, size: int, start: int = 0) -> Self:
        """Give rank r the tokens with the indices r, `r + size`, `r + 2*size` and so on.

        In every step of causal ring attention the ranks then have nearly equal work.

        Arguments and errors are those of `contiguous`.

        Source: Brandon et al. 2023, Striped Attention, arXiv:2311.09431, section 3.
        """
        tokens, size = _tokens(seq_len, size, start)
        return cls(tuple((tokens[rank::size],) for rank in range(size)))

    @classmethod
    def balanced(
        cls, seq_len: int, size: int, mask: Mask, *, chunk: int | None = None, start: int = 0
    ) -> Self:
        """Deal chunks of tokens to ranks, equally many to each, so that work is nearly equal.

        The work is the number of visible (query, key) pairs. The work of two ranks differs by at
        most that of one chunk, and their tokens differ by at most one chunk.

        Args:
            seq_len, size, start: as in `contiguous`.
            mask: which keys each query sees, in attention over these tokens.
            chunk: tokens of a chunk, >= 1; the last chunk may be shorter. None starts with half a
                shard, and halves the chunk while a rank has more than 1.02 times the mean work and
                the chunk has more than `LEAST_CHUNK` tokens.

        Raises:
            TypeError: `mask` is not a `Mask`, or `chunk` not a whole number.
            ShapeError: as in `contiguous`; `chunk` < 1, or tokens outside the mask's documents.

        Source: the dispatch solver of MagiAttention, SandAI-org/MagiAttention; here each rank gets
        one of every `size` chunks, which bounds the difference of work.
        """
        tokens, size = _tokens(seq_len, size, start)
        check(chunk=chunk)
        check_type("mask", mask, Mask, "Pass Mask(causal=True), or Mask() to see everything.")
        if chunk is not None and chunk < 1:
            raise ShapeError(f"chunk={chunk} was given; pass at least 1 token.")
        others = mask.kv_documents
        work = count_visible(mask, tokens, range(others[-1]) if others else tokens).cumsum(0)
        length = plain(chunk) or max(-(-len(tokens) // (2 * size)), 1)
        hands, even = deal_chunks(work, size, length)
        while not even and chunk is None and length > LEAST_CHUNK:
            length = -(-length // 2)
            hands, even = deal_chunks(work, size, length)
        parts = (consecutive(sorted(hand)) for hand in hands)
        owned = ((tokens[p.start * length : p.stop * length] for p in own) for own in parts)
        return cls(tuple(map(tuple, owned)))

    @classmethod
    def from_positions(cls, positions: Sequence[Sequence[int]]) -> Self:
        """Give each rank the global positions of its list. Each token is on exactly one rank.

        Args:
            positions: for each rank the positions of its tokens, in its own order.

        Raises:
            ShapeError: a position that is owned twice, is negative, or is 2**62 or more.
            TypeError: positions that are not whole numbers for each rank; or one of 2**62 or more
                that is not in a range or torch tensor.
        """
        positions = list(positions) if isinstance(positions, Iterable) else positions
        check(positions=positions)
        segments = tuple(tuple(runs(owned)) for owned in positions)
        flat = sorted(position for owned in segments for run in owned for position in run)
        twice = [a for a, b in pairwise(flat) if a == b]
        if twice or (flat and not 0 <= flat[0] <= flat[-1] < FAR64):
            raise ShapeError(
                f"positions must be >= 0, below 2**62 and owned by exactly one rank; given were "
                f"{flat[0]} to {flat[-1]}, owned twice: {twice[:5]}. Give every token to one rank."
            )
        return cls(segments)

    __hash__ = HashedOnce.__hash__

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.segments)

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """The number of tokens of each rank, in rank order."""
        return tuple(sum(map(len, owned)) for owned in self.segments)

    @property
    def seq_len(self) -> int:
        """The number of tokens of all ranks."""
        return sum(self.lengths)

    @cached_property
    def end(self) -> int:
        """One more than the greatest position of any rank's tokens.

        This is `seq_len` if positions start at 0 without gaps.
        """
        return max((s[-1] + 1 for s in self.gathered_segments if len(s)), default=0)

    def local_len(self, rank: int) -> int:
        """Return the number of tokens of `rank`."""
        return self.lengths[self._checked(rank)]

    def positions(self, rank: int) -> Tensor:
        """Return the positions of the tokens of `rank` in the rank's order, int64 (local_len,)."""
        return concatenated(self.segments[self._checked(rank)])

    @cached_property
    def gathered_segments(self) -> tuple[Segment, ...]:
        """The segments of all ranks in the order of an all-gather."""
        return tuple(segment for owned in self.segments for segment in owned)

    @cached_property
    def sorted_segments(self) -> tuple[Segment, ...]:
        """The segments of all ranks in ascending order of their first positions."""
        return tuple(self.gathered_segments[place] for place in self._segment_order)

    @cached_property
    def sorted_positions(self) -> Tensor:
        """The positions of all tokens after `sort_segments`, int64 `(seq_len,)`."""
        return concatenated(self.sorted_segments)

    def sort_segments(self, gathered: Tensor, dim: int) -> Tensor:
        """Reorder whole segments from the order of an all-gather to that of their first positions.

        A segment is a range of positions, with a step if striped. Its tokens stay together, unlike
        in `restore`, so that the positions stay a few arithmetic progressions.

        Args:
            gathered: any shape, `gathered.shape[dim] == seq_len`.
            dim: the sequence dimension.
        """
        return self._permuted(gathered, dim, range(len(self._segment_order)), self._segment_order)

    def unsort_segments(self, x: Tensor, dim: int) -> Tensor:
        """Reorder x from the order of `sort_segments` to that of an all-gather."""
        order = self._segment_order
        return self._permuted(x, dim, order, sorted(range(len(order)), key=order.__getitem__))

    def _permuted(self, x: Tensor, dim: int, held: Iterable[int], order: list[int]) -> Tensor:
        """Cut x, the segments `held`, along `dim`, and join part order[0], order[1], ..."""
        self._check_tokens(x, dim)
        if order == sorted(order):
            return x
        parts = x.split([len(self.gathered_segments[place]) for place in held], dim)
        return torch.cat([parts[place] for place in order], dim)

    def sorted_ranges(self, rank: int) -> list[range]:
        """Return for each segment of `rank` the range to which `sort_segments` moves it."""
        order, lengths = self._segment_order, [len(segment) for segment in self.gathered_segments]
        stops = dict(zip(order, accumulate(lengths[place] for place in order), strict=True))
        before = sum(map(len, self.segments[: self._checked(rank)]))
        places = range(before, before + len(self.segments[rank]))
        return [range(stops[place] - lengths[place], stops[place]) for place in places]

    def shard(self, x: Tensor, rank: int, dim: int) -> Tensor:
        """Take the tokens of `rank` from a tensor that holds all tokens in order of position.

        Args:
            x: any shape, `x.shape[dim] == seq_len`.
            rank: the rank whose shard is taken.
            dim: the sequence dimension.

        Returns:
            A tensor with `local_len(rank)` tokens along `dim`: a view of x if the shard is one
            entry of `segments` and no position between is missing, else a new tensor.

        Raises:
            ShapeError, TypeError: x is no tensor of `seq_len` tokens along `dim`, or no such rank.
        """
        self._check_tokens(x, dim)
        match self.segments[self._checked(rank)]:
            case (owned,) if owned and self._is_dense and 1 in (owned.step, len(owned)):
                return x.narrow(dim, owned.start - self._first, len(owned))
        places = self.positions(rank) - self._first
        if not self._is_dense:
            places = torch.searchsorted(self._ascending, self.positions(rank))
        return x.index_select(dim, places.to(x.device))

    def unshard(self, shards: Sequence[Tensor], dim: int) -> Tensor:
        """Reverse `shard`: put all tokens together in ascending order of position.

        Args:
            shards: one tensor per rank, with `local_len(rank)` tokens along `dim`.
            dim: the sequence dimension.

        Returns:
            A new tensor with `seq_len` tokens along `dim`.

        Raises:
            ShapeError: wrong number of shards, a shard of wrong length, or no such `dim`.
        """
        check(shards=shards)
        given = tuple(length_along(shard, dim) for shard in shards)
        if given != self.lengths:
            text = f"this sharding has shards of {self.lengths} tokens, "
            raise ShapeError(f"{text}but dim {dim} of those given has {given}.")
        return self.restore(torch.cat(list(shards), dim), dim)

    def restore(self, gathered: Tensor, dim: int) -> Tensor:
        """Reorder tokens from the order of an all-gather to ascending order of position.

        `gathered` has `seq_len` tokens along `dim`; otherwise this raises ShapeError. If they are
        in order, return `gathered` itself.
        """
        self._check_tokens(gathered, dim)
        index = self._restore_index
        return gathered if index is None else gathered.index_select(dim, index.to(gathered.device))

    def group(self, groups: Sequence[Sequence[int]]) -> "Sharding":
        """Return the sharding whose rank i holds the i-th group's tokens, one rank after the other.

        Args:
            groups: the ranks of each group. Every rank must be in exactly one group.

        Raises:
            ShapeError: the groups do not cover the ranks exactly once.
        """
        check(groups=groups)
        if sorted(rank for group in groups for rank in group) != list(range(self.size)):
            text = f"groups {groups} must hold each of the ranks 0..{self.size - 1} exactly once."
            raise ShapeError(text)
        owned = ((s for rank in group for s in self.segments[rank]) for group in groups)
        return Sharding(tuple(map(tuple, owned)))

    def _checked(self, rank: int) -> int:
        """Return `rank` if it is a rank of this sharding, else raise a ShapeError."""
        check(rank=rank)
        if not 0 <= rank < self.size:
            raise ShapeError(f"rank {rank} was given; this sharding has ranks 0..{self.size - 1}.")
        return rank

    def _check_tokens(self, x: Tensor, dim: int) -> None:
        """Raise a ShapeError unless `x` has all tokens of this sharding along `dim`."""
        if (given := length_along(x, dim)) != self.seq_len:
            raise ShapeError(
                f"this sharding covers {self.seq_len} tokens, but dim {dim} of the tensor with "
                f"shape {tuple(x.shape)} has {given}. Make the sharding for {given} tokens, or "
                "pass the sequence dimension."
            )

    @cached_property
    def fingerprint(self) -> str:
        """A short text that identifies the sharding, for agreements of ranks and for people."""
        told = [[(*s[:2], len(s)) for s in owned] for owned in self.segments]  # not `stop`
        digest = hashlib.blake2b(repr(told).encode(), digest_size=4).hexdigest()
        return f"{self.seq_len} tokens over {self.size} ranks #{digest}"

    @cached_property
    def _segment_order(self) -> list[int]:
        segments = self.gathered_segments
        return sorted(range(len(segments)), key=lambda place: segments[place].start)

    @cached_property
    @torch.inference_mode(False)
    def _ascending(self) -> Tensor:
        return concatenated(self.gathered_segments).sort().values

    @cached_property
    @torch.inference_mode(False)
    def _restore_index(self) -> Tensor | None:
        """The index of each token in an all-gather, in order of position; None if 0, 1, 2, ..."""
        order = concatenated(self.gathered_segments).argsort()
        return None if torch.equal(order, torch.arange(len(order), device="cpu")) else order

    @cached_property
    def _first(self) -> int:
        return min((s.start for s in self.gathered_segments if len(s)), default=self.end)

    @cached_property
    def _is_dense(self) -> bool:
        """Whether all ranks' positions have no gaps: position p is then at index p - `_first`."""
        return self.end - self._first == self.seq_len


def check_sharding(sharding: Sharding, comm: Any, what: str, argument: str = "sharding") -> None:
    """Raise an error if a value is not a `Sharding` over the ranks of a communicator.

    Args:
        sharding: the value to check.
        comm: the `Communicator` whose ranks hold the tokens.
        what: the name of the call or tensor, for the text of a ShapeError.
        argument: the argument's name, for the text of a TypeError.

    Raises:
        TypeError: the value is not a `Sharding`.
        ShapeError: the sharding is not for the number of ranks of `comm`.
    """
    check_type(
        argument, sharding, Sharding, "Make one, such as Sharding.contiguous(seq_len, size)."
    )
    if sharding.size != comm.size:
        raise ShapeError(
            f"{what}: the sharding is for {sharding.size} ranks, {comm.name} has {comm.size}. Make "
            f"it with size={comm.size}."
        )


def _tokens(seq_len: int, size: int, start: int) -> tuple[range, int]:
    """Check the arguments of `contiguous`. Return the positions of all tokens, and `size`."""
    check(seq_len=seq_len, size=size, start=start)
    if seq_len < 0 or size < 1 or start < 0 or int(start) + int(seq_len) > FAR64:
        raise ShapeError(
            "a sharding needs seq_len >= 0, size >= 1, start >= 0 and positions below 2**62; "
            f"seq_len={seq_len}, size={size} and start={start} were given."
        )
    return range(int(start), int(start) + int(seq_len)), int(size)
