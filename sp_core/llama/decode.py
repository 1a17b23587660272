"""Sequences that grow: many tokens at once with the sequence split over the ranks, or one by one against a split cache.

    prefill: each rank has some of the new tokens, and a scheme lets them see all that is kept      q_r  (k v)_0..P-1
    decode:  every rank has the new tokens and attends to what it keeps; the parts are merged       merge_r attend(q, (k v)_r)

Shapes: N sequences, S new tokens, E model dim, H heads, D head dim, V vocabulary, P sequence ranks, T tensor ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sp_core import arguments
from sp_core.attention import block_attention, merge_into
from sp_core.collectives.api import all_gather
from sp_core.communicator import Communicator
from sp_core.errors import ShapeError
from sp_core.llama import pipeline
from sp_core.llama.cache import Cache
from sp_core.llama.layers import Lengths
from sp_core.llama.model import LayerAttend, Llama, check_tokens
from sp_core.sharding import Sharding, split_ranges, split_sizes

Tokens = Sequence[Sequence[int]]


class Decoder:
    """A batch of sequences, of any lengths, that one model continues.

    Where the layers of the model are split over stages, the sequences go through these in micro-batches, several at a time.

    Args:
        model: the weights.
        room: for each sequence, how many tokens it may get in all.
        micro_batches: into how many parts the batch is cut; as many as there are stages if not given.

    Raises:
        ShapeError: less than one micro-batch.
    """

    def __init__(self, model: Llama, room: Sequence[int], *, micro_batches: int | None = None) -> None:
        count = model.grid.stages.size if micro_batches is None else micro_batches
        if count < 1:
            raise ShapeError(f"micro_batches={count} was given; needed at least 1.")
        self.model = model
        self.parts = split_ranges(len(room), max(min(count, len(room)), 1))
        self.caches = [Cache(model, [room[number] for number in part]) for part in self.parts]

    def prefill(self, tokens: Tokens) -> Tensor:
        """Append tokens to each sequence, with the work split over the sequence ranks.

        Args:
            tokens: for each sequence its new tokens, on every rank; none for one that waits.

        Returns:
            (N', V): the logits after the last new token of each sequence that got one, on every rank.

        Communication:
            Per layer that of the scheme, with everything that is kept as keys, and two all-reduces over the tensor ranks; one more
            for the embedding. Then one all-gather of (N', E) and one of (N', V). With `tp_sp` as `Llama.forward`, and one more
            all-gather of (N', E). Between stages one message of (S/P, E), or (S/P/T, E), for each micro-batch; then one broadcast
            of (N', V).

        Raises:
            ShapeError, ValueError: no room, no token, or one that is not in the vocabulary. On every rank.
        """
        return self._run("prefill", tokens, self._spread)

    def decode(self, tokens: Tokens) -> Tensor:
        """Append tokens to each sequence, usually one, with the work on every sequence rank and the cache split over them.

        Args, returns, raises: as `prefill`.

        Communication:
            Per layer one all-gather of (S, H/T, D + 1) over the sequence ranks, and two all-reduces over the tensor ranks; one more
            for the embedding. Then one all-gather of (N', V). Between stages as `prefill`.
        """
        return self._run("decode", tokens, self._everywhere)

    def _run(self, what: str, tokens: Tokens, step_of: Callable[[Cache, _New], _Step]) -> Tensor:
        """Agree on a call, then compute it for one micro-batch after the other."""
        steps = [step_of(cache, new) for cache, new in self._add(what, tokens)]
        hidden = pipeline.forward(self.model, [step.flight for step in steps])
        config, count = self.model.config, sum(map(bool, tokens))
        logits = None
        if self.model.is_last:
            logits = self._logits(torch.cat([step.last(x) for step, x in zip(steps, hidden, strict=True)]))
        return pipeline.from_last(self.model, logits, (count, config.vocab_size))

    def _spread(self, cache: Cache, new: _New) -> _Step:
        """Each rank computes some of the new tokens."""
        rank = self.model.grid.sequence.rank
        sharding = Sharding.from_positions([[new.positions[place] for place in share] for share in new.shares])
        kept = cache.sharding()
        mask = cache.mask(sharding.end, kept.end)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            cache.write(layer, k, v)
            return self.model.attend(q, *cache.read(layer), sharding=sharding, kv_sharding=kept, mask=mask)

        lengths = split_sizes(len(new.shares[rank]), self.model.grid.tensor.size) if self.model.tp_sp else None
        return _Step(self._flight(cache, new, new.shares[rank], attend, lengths), lambda hidden: self._last(hidden, new, lengths))

    def _everywhere(self, cache: Cache, new: _New) -> _Step:
        """Every rank computes all new tokens, against the keys that it keeps."""
        model, comm = self.model, self.model.grid.sequence
        mine = new.shares[comm.rank]
        end = len(cache.room) * cache.slot
        visible = cache.mask(end, end).allowed(new.positions, cache.owned[comm.rank]).to(comm.device)
        kind, allowed = ("full", None) if visible.all() else ("partial", visible)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            cache.write(layer, k[:, mine], v[:, mine])
            keys, values = (model.spread(x).transpose(1, 2) for x in cache.read(layer))
            part = block_attention(q.transpose(1, 2), keys, values, kind=kind, allowed=allowed, scale=q.shape[-1] ** -0.5)
            return _merged(*part, comm).transpose(1, 2).to(q.dtype)

        places = list(range(len(new.positions)))
        return _Step(self._flight(cache, new, places, attend), lambda hidden: hidden[0, _ends(new.tokens)])

    def _add(self, what: str, tokens: Tokens) -> list[tuple[Cache, _New]]:
        """Agree on a call, and let the caches take the tokens in; micro-batches without a new token are left out."""
        counts: list[int] = []
        shown = [length for cache in self.caches for length in cache.lengths]
        found: list[list[int]] = []

        def check() -> int:
            arguments.check(tokens=tokens)
            counts.extend(map(len, tokens))
            if len(counts) != len(shown):
                raise ShapeError(
                    f"tokens for {len(counts)} sequences were given; there are {len(shown)}. Give an empty list for none."
                )
            found.extend(
                cache.place([counts[number] for number in part], part.start)
                for cache, part in zip(self.caches, self.parts, strict=True)
            )
            check_tokens(_flat(tokens), self.model.config)
            if not sum(counts):
                raise ValueError(f"{what} was given no token for any sequence; give at least one.")
            return 0

        self.model.grid.model.agree_on(lambda: f"{what}({list(map(list, tokens))}) after {shown}", check)
        added = []
        for cache, part, positions in zip(self.caches, self.parts, found, strict=True):
            shares = cache.shares(len(positions))
            cache.add([counts[number] for number in part], positions, shares)
            if positions:
                added.append((cache, _New([tokens[number] for number in part], positions, shares)))
        return added

    def _flight(
        self, cache: Cache, new: _New, places: Sequence[int], attend: LayerAttend, lengths: Lengths = None
    ) -> pipeline.Flight:
        """New tokens at these places of their line, as (1, S)."""
        where = [new.positions[place] % cache.slot for place in places]
        tokens = _flat(new.tokens)[list(places)].unsqueeze(0).to(self.model.grid.everyone.device)
        return pipeline.Flight(tokens, where, attend, lengths)

    @torch.no_grad()
    def _last(self, hidden: Tensor, new: _New, lengths: Lengths) -> Tensor:
        """The last new token of each sequence (N', E), from the ranks that have them: first those of the same shard."""
        tensor, comm, ends = self.model.grid.tensor, self.model.grid.sequence, set(_ends(new.tokens))
        held = [[place for place in share if place in ends] for share in new.shares]
        mine = [index for index, place in enumerate(new.shares[comm.rank]) if place in ends]
        if lengths is None:
            rows = hidden[0, mine]
        else:
            parts = [[index - part.start for index in mine if index in part] for part in split_ranges(sum(lengths), tensor.size)]
            rows = all_gather(hidden[0, parts[tensor.rank]], comm=tensor, sizes=list(map(len, parts)))
        rows = all_gather(rows, comm=comm, sizes=list(map(len, held)))
        order = torch.tensor([place for part in held for place in part]).argsort()
        return rows[order.to(rows.device)]

    @torch.no_grad()
    def _logits(self, hidden: Tensor) -> Tensor:
        """(N', E) to (N', V)."""
        comm = self.model.grid.tensor
        return all_gather(self.model.logits(hidden), comm=comm, dim=1, sizes=split_sizes(self.model.config.vocab_size, comm.size))


@dataclass(frozen=True)
class _New:
    """New tokens of a micro-batch, their positions in its cache, and which of them, by their places, each rank keeps."""

    tokens: Tokens
    positions: list[int]
    shares: list[list[int]]


@dataclass(frozen=True)
class _Step:
    """What the stages compute for a micro-batch, and how the last tokens (N', E) are found in what comes out (1, S, E)."""

    flight: pipeline.Flight
    last: Callable[[Tensor], Tensor]


def _merged(out: Tensor, lse: Tensor, comm: Communicator) -> Tensor:
    """Attention to what all ranks keep, from (1, H/T, S, D) and (1, H/T, S) of each; merged in one order, so bitwise alike."""
    parts = all_gather(torch.cat((out.to(lse.dtype), lse.unsqueeze(-1)), -1), comm=comm, sizes=[1] * comm.size)
    total, total_lse = parts[:1, ..., :-1].clone(), parts[:1, ..., -1].clone()
    for rank in range(1, comm.size):
        part = parts[rank : rank + 1]
        merge_into(total, total_lse, part[..., :-1], part[..., -1])
    return total


def _flat(tokens: Tokens) -> Tensor:
    return torch.tensor([token for new in tokens for token in new], dtype=torch.int64)


def _ends(tokens: Tokens) -> list[int]:
    """Where in the line of new tokens the last one of each sequence is that got any."""
    ends, stop = [], 0
    for new in tokens:
        stop += len(new)
        if new:
            ends.append(stop - 1)
    return ends
