"""Sequences that grow: many tokens at once with the sequence split over the ranks, or one by one against a split cache.

    prefill: each rank has some of the new tokens, and a scheme lets them see all that is kept      q_r  (k v)_0..P-1
    decode:  every rank has the new tokens and attends to what it keeps; the parts are merged       merge_r attend(q, (k v)_r)

Shapes: N sequences, S new tokens, E model dim, H heads, D head dim, V vocabulary, P sequence ranks, T tensor ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sp_core.attention import block_attention, merge_into
from sp_core.autograd import all_gather
from sp_core.communicator import Communicator
from sp_core.llama.cache import Cache
from sp_core.llama.layers import Lengths
from sp_core.llama.model import LayerAttend, Llama, check_tokens
from sp_core.sharding import Sharding, split_ranges, split_sizes

Tokens = Sequence[Sequence[int]]


class Decoder:
    """A batch of sequences, of any lengths, that one model continues.

    Args:
        model: the weights.
        room: for each sequence, how many tokens it may get in all.
    """

    def __init__(self, model: Llama, room: Sequence[int]) -> None:
        self.model = model
        self.cache = Cache(model, room)

    def prefill(self, tokens: Tokens) -> Tensor:
        """Append tokens to each sequence, with the work split over the sequence ranks.

        Args:
            tokens: for each sequence its new tokens, on every rank; none for one that waits.

        Returns:
            (N', V): the logits after the last new token of each sequence that got one, on every rank.

        Communication:
            Per layer that of the scheme, with everything that is kept as keys, and two all-reduces over the tensor ranks; then one
            all-gather of (N', E) and one of (N', V). With `tp_sp` as `Llama.forward`, and one more all-gather of (N', E).

        Raises:
            ShapeError, ValueError: no room, no token, or one that is not in the vocabulary. On every rank.
        """
        positions, shares = self._add("prefill", tokens)
        rank, cache = self.model.grid.sequence.rank, self.cache
        new, kept = Sharding.from_positions([[positions[place] for place in share] for share in shares]), cache.sharding()
        mask = cache.mask(new.end, kept.end)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            cache.write(layer, k, v)
            return self.model.attend(q, *cache.read(layer), sharding=new, kv_sharding=kept, mask=mask)

        lengths = split_sizes(len(shares[rank]), self.model.grid.tensor.size) if self.model.tp_sp else None
        hidden = self._hidden(tokens, positions, shares[rank], attend, lengths)
        return self._logits(self._last(hidden[0], tokens, shares, lengths))

    def decode(self, tokens: Tokens) -> Tensor:
        """Append tokens to each sequence, usually one, with the work on every sequence rank and the cache split over them.

        Args, returns, raises: as `prefill`.

        Communication:
            Per layer one all-gather of (S, H/T, D + 1) over the sequence ranks, and two all-reduces over the tensor ranks; then one
            all-gather of (N', V).
        """
        positions, shares = self._add("decode", tokens)
        model, cache, comm = self.model, self.cache, self.model.grid.sequence
        mine = shares[comm.rank]
        end = len(cache.room) * cache.slot
        visible = cache.mask(end, end).allowed(positions, cache.owned[comm.rank]).to(comm.device)
        kind, allowed = ("full", None) if visible.all() else ("partial", visible)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            cache.write(layer, k[:, mine], v[:, mine])
            keys, values = (model.spread(x).transpose(1, 2) for x in cache.read(layer))
            part = block_attention(q.transpose(1, 2), keys, values, kind=kind, allowed=allowed, scale=q.shape[-1] ** -0.5)
            return _merged(*part, comm).transpose(1, 2).to(q.dtype)

        hidden = self._hidden(tokens, positions, list(range(len(positions))), attend)
        return self._logits(hidden[0, _ends(tokens)])

    def _add(self, what: str, tokens: Tokens) -> tuple[list[int], list[list[int]]]:
        """Agree on a call, and let the cache take the tokens in: their positions, and which of them each rank keeps."""
        counts = [len(new) for new in tokens]
        found: list[list[int]] = []

        def check() -> int:
            found.append(self.cache.place(counts))
            check_tokens(_flat(tokens), self.model.config)
            if not sum(counts):
                raise ValueError(f"{what} was given no token for any sequence; give at least one.")
            return 0

        self.model.grid.model.agree_on(lambda: f"{what}({list(map(list, tokens))}) after {self.cache.lengths}", check)
        shares = self.cache.shares(sum(counts))
        self.cache.add(counts, found[0], shares)
        return found[0], shares

    @torch.no_grad()
    def _hidden(
        self, tokens: Tokens, positions: Sequence[int], places: Sequence[int], attend: LayerAttend, lengths: Lengths = None
    ) -> Tensor:
        """(1, S of these places, E), or with `lengths` this tensor rank's part of them."""
        device = self.model.grid.everyone.device
        where = [positions[place] % self.cache.slot for place in places]
        return self.model.hidden(_flat(tokens)[list(places)].unsqueeze(0).to(device), where, attend, lengths)

    @torch.no_grad()
    def _last(self, hidden: Tensor, tokens: Tokens, shares: Sequence[Sequence[int]], lengths: Lengths) -> Tensor:
        """The last new token of each sequence (N', E), from the ranks that have them: first those of the same shard."""
        tensor, comm, ends = self.model.grid.tensor, self.model.grid.sequence, set(_ends(tokens))
        held = [[place for place in share if place in ends] for share in shares]
        mine = [index for index, place in enumerate(shares[comm.rank]) if place in ends]
        if lengths is None:
            rows = hidden[mine]
        else:
            parts = [[index - part.start for index in mine if index in part] for part in split_ranges(sum(lengths), tensor.size)]
            rows = all_gather(hidden[parts[tensor.rank]], comm=tensor, sizes=list(map(len, parts)))
        rows = all_gather(rows, comm=comm, sizes=list(map(len, held)))
        order = torch.tensor([place for part in held for place in part]).argsort()
        return rows[order.to(rows.device)]

    @torch.no_grad()
    def _logits(self, hidden: Tensor) -> Tensor:
        """(N', E) to (N', V)."""
        comm = self.model.grid.tensor
        return all_gather(self.model.logits(hidden), comm=comm, dim=1, sizes=split_sizes(self.model.config.vocab_size, comm.size))


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
