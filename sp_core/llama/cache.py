"""Keys and values of the tokens so far, split along the sequence: each rank keeps those of about 1/P of all tokens.

The sequences of a batch lie one after the other on one line of positions, each in a slot of its own: token t of sequence i is at
i * slot + t. So sequences of any lengths need no padding, and masks and rotary angles follow from positions alone. Shapes: N
sequences, S tokens, K key/value heads, D head dim, P ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sp_core.errors import ShapeError
from sp_core.llama.layers import held_kv_heads
from sp_core.llama.model import Llama
from sp_core.mask import Mask
from sp_core.sharding import Sharding


class Cache:
    """Room for sequences that grow.

    Args:
        model: whose keys and values these are.
        room: for each sequence, how many tokens it may get.

    The tensors are made at once: for each layer of this stage, 2 * K/T * D numbers for ceil(sum(room) / P) tokens on every rank.
    """

    def __init__(self, model: Llama, room: Sequence[int]) -> None:
        comm, config = model.grid.sequence, model.config
        self.rank, self.size = comm.rank, comm.size
        self.room = tuple(room)
        self.slot = max(room, default=0)
        self.lengths = [0] * len(room)
        self.owned: list[list[int]] = [[] for _ in range(comm.size)]
        heads = len(held_kv_heads(config, model.grid.tensor))
        shape = (len(model.own), 2, -(-sum(room) // comm.size), heads, config.head_dim)
        self.rows = torch.zeros(shape, dtype=model.dtype, device=comm.device)

    def place(self, counts: Sequence[int], first: int = 0) -> list[int]:
        """The positions of so many new tokens for each sequence, in the order of the sequences.

        Args:
            counts: one for each sequence.
            first: the number that an error gives to the first sequence.

        Raises:
            ShapeError: there is no room for them.
        """
        for number, (length, count, room) in enumerate(zip(self.lengths, counts, self.room, strict=True)):
            if length + count > room:
                raise ShapeError(
                    f"sequence {first + number} has {length} tokens and room for {room}; {count} more were given. Make more room."
                )
        starts = [number * self.slot + length for number, length in enumerate(self.lengths)]
        return [start + t for start, count in zip(starts, counts, strict=True) for t in range(count)]

    def add(self, counts: Sequence[int], positions: Sequence[int], shares: Sequence[Sequence[int]]) -> None:
        """Take new tokens in: `shares` says for each rank which of the positions it keeps, by their places in the list."""
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]
        for owned, share in zip(self.owned, shares, strict=True):
            owned.extend(positions[place] for place in share)

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Keep keys and values (1, S, K/T, D) of this rank's newest tokens, which have been added."""
        stop = len(self.owned[self.rank])
        start = stop - k.shape[1]
        self.rows[layer, 0, start:stop], self.rows[layer, 1, start:stop] = k[0], v[0]

    def read(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values (1, S/P, K/T, D) of all of this rank's tokens, without a copy."""
        kept = self.rows[layer, :, : len(self.owned[self.rank])]
        return kept[0].unsqueeze(0), kept[1].unsqueeze(0)

    def sharding(self) -> Sharding:
        """Who keeps which tokens."""
        return Sharding.from_positions(self.owned)

    def mask(self, end: int, kv_end: int) -> Mask:
        """Causal, each sequence for itself, for queries and keys at positions below these."""
        return Mask(causal=True, documents=self._documents(end), kv_documents=self._documents(kv_end))

    def shares(self, number: int) -> list[list[int]]:
        """Deal so many new tokens out, so that no rank keeps two tokens more than another.

        Each rank gets a piece from the front and one from the back, in opposite orders: under a causal mask these are equal work.
        """
        counts = [len(owned) for owned in self.owned]
        each, more = divmod(sum(counts) + number, self.size)
        first = sorted(range(self.size), key=lambda rank: (-counts[rank], rank))[:more]
        quotas = [each + (rank in first) - count for rank, count in enumerate(counts)]
        fronts = [quota - quota // 2 for quota in quotas]
        pieces = [*enumerate(fronts), *((rank, quotas[rank] - fronts[rank]) for rank in reversed(range(self.size)))]
        shares: list[list[int]] = [[] for _ in quotas]
        start = 0
        for rank, length in pieces:
            shares[rank].extend(range(start, start + length))
            start += length
        return shares

    def _documents(self, end: int) -> tuple[int, ...]:
        return (*(min(number * self.slot, end) for number in range(len(self.room))), end)
