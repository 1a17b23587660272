"""`Cache`: keys and values of sequences that a `Decoder` continues, split over sequence ranks.

Each sequence has a range of `slot` positions in one common numbering: token t of sequence i has
position i * slot + t. So sequences of any lengths need no padding, and masks and rotary angles
follow from positions alone. The room of a sequence is the most tokens that it may reach.

Shapes: S new tokens, K key/value heads, D head dim, P sequence ranks, T tensor ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, islice

import torch
from torch import Tensor

from sp_core.errors import ShapeError
from sp_core.llama.config import Tokens
from sp_core.llama.model import Llama
from sp_core.mask import Mask, position_tensor

GROUP = 8
"""The number of sequences that are decoded at once. Each query is multiplied by the keys of all
these, so the work of a token grows with this number."""

Places = Tensor | slice
"""Indices along a dim."""


@dataclass(frozen=True)
class NewTokens:
    """The new tokens of a micro-batch: some sequences of a batch that are computed together.

    Args:
        tokens: for each sequence its new tokens.
        positions: the position of each new token in the cache, one sequence after the other.
        shares: for each sequence rank the indices, into `positions`, of the tokens whose keys and
            values that rank keeps.
    """

    tokens: Tokens
    positions: list[int]
    shares: list[list[int]]

    def ends(self) -> list[int]:
        """Return the index into `positions` of the last new token of each sequence that got any."""
        return [
            stop - 1
            for new, stop in zip(self.tokens, accumulate(map(len, self.tokens)), strict=True)
            if new
        ]


class Cache:
    """Hold this rank's part of the keys and values of some sequences. No method communicates.

    All memory is allocated at once: for each layer of this stage, 2 * K/T * D numbers for each of
    ceil(sum(room) / P) tokens. All ranks must make the same calls, to know where each token is.

    Args:
        model: the model of these keys and values.
        room: for each sequence, the largest number of tokens that it may reach.
    """

    @torch.inference_mode(False)  # later calls in any mode write to the memory
    def __init__(self, model: Llama, room: Sequence[int]) -> None:
        comm, config = model.grid.sequence, model.config
        self.rank, self.room = comm.rank, tuple(map(int, room))
        self.slot, self.lengths = max(self.room, default=0), [0] * len(room)
        self.owned: list[list[int]] = [[] for _ in range(comm.size)]
        tokens = -(-sum(self.room) // comm.size)
        # the keys of a head lie side by side: one query reads them twice as fast on a CPU
        shape = (len(model.own_layers), 2, len(model.kv_heads), tokens, config.head_dim)
        self.rows = torch.zeros(shape, dtype=model.dtype, device=comm.device)
        self.positions = torch.zeros(tokens, dtype=torch.int64, device=comm.device)

    def place(self, tokens: Tokens, first: int) -> list[int]:
        """Return the positions in the cache that new tokens will get, sequence after sequence.

        Args:
            tokens: for each sequence its new tokens.
            first: the index of the first sequence in the whole batch, for errors.

        Raises:
            ShapeError: on this rank: a sequence would get more tokens than it has room for.
        """
        for number, (length, new, room) in enumerate(
            zip(self.lengths, tokens, self.room, strict=True), first
        ):
            if length + len(new) > room:
                raise ShapeError(
                    f"sequence {number} has {length} tokens and room for {room}; {len(new)} more "
                    "were given. Make the Decoder with a larger `room`."
                )
        starts = [number * self.slot + length for number, length in enumerate(self.lengths)]
        return [
            start + t for start, new in zip(starts, tokens, strict=True) for t in range(len(new))
        ]

    def add(self, tokens: Tokens, positions: list[int]) -> NewTokens:
        """Record new tokens at the positions that `place` returned, and assign them to ranks.

        `write` then stores the keys and values of this rank's tokens.
        """
        shares = self.shares(len(positions))
        self.lengths = [length + len(new) for length, new in zip(self.lengths, tokens, strict=True)]
        for owned, share in zip(self.owned, shares, strict=True):
            owned.extend(positions[place] for place in share)
        mine = [positions[place] for place in shares[self.rank]]
        kept = len(self.owned[self.rank])
        self.positions[kept - len(mine) : kept] = position_tensor(mine)
        return NewTokens(tokens, positions, shares)

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Store a layer's k and v (1, S, K/T, D) of the S tokens that `add` last gave this rank."""
        stop = len(self.owned[self.rank])
        start = stop - k.shape[1]
        keys, values = self.rows[layer, :, :, start:stop]
        keys[:], values[:] = k.transpose(1, 2), v.transpose(1, 2)

    def read(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return views of k and v (1, tokens, K/T, D) of a layer for all tokens of this rank."""
        kept = self.rows[layer, :, :, : len(self.owned[self.rank])].transpose(1, 2)
        return kept[:1], kept[1:]

    def groups(self, positions: Tensor) -> Sequence[Places]:
        """Divide tokens at these positions into those of the first GROUP sequences, the next, ...

        Return the indices of each group's tokens. If there is one group, they are a slice, so that
        nothing is copied.
        """
        if len(self.room) <= GROUP:
            return [slice(None)]
        group, count = positions // (GROUP * self.slot), -(-len(self.room) // GROUP)
        return [*group.argsort(stable=True).split(group.bincount(minlength=count).tolist())]

    def mask(self, end: int, kv_end: int) -> Mask:
        """Return a causal mask with each sequence as a document, so that no sequence sees another.

        Positions are those in the cache: sequence i begins at i * slot. Queries have positions
        below `end`, and keys positions below `kv_end`.
        """
        slots = [number * self.slot for number in range(len(self.room))]
        documents, kv_documents = (
            (*(min(start, stop) for start in slots), stop) for stop in (end, kv_end)
        )
        return Mask(causal=True, documents=documents, kv_documents=kv_documents)

    def shares(self, number: int) -> list[list[int]]:
        """Return for each rank which of `number` new tokens the rank keeps, by index.

        The ranks' totals in the cache then differ by at most one token. Ranks 0 to P - 1 get ranges
        from the front, and ranks P - 1 to 0 from the back: equal work under a causal mask if there
        is one sequence. With sequences of unequal lengths, the work is uneven.
        """
        counts = [len(owned) for owned in self.owned]
        each, more = divmod(sum(counts) + number, len(counts))
        first = sorted(range(len(counts)), key=lambda rank: (-counts[rank], rank))[:more]
        quotas = [each + (rank in first) - count for rank, count in enumerate(counts)]
        places = iter(range(number))
        fronts = [[*islice(places, quota - quota // 2)] for quota in quotas]
        backs = [[*islice(places, quota // 2)] for quota in reversed(quotas)]
        return [front + back for front, back in zip(fronts, reversed(backs), strict=True)]
