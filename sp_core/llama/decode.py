"""`Decoder`: append tokens to sequences, with a key/value cache that is split over ranks.

    prefill: many new tokens. Each rank computes some of them; an attention scheme lets these see
             the keys and values of all ranks:  q_r  (k v)_0..P-1
    decode:  few new tokens. Every rank computes all of them, attends to the keys and values in its
             part of the cache, and the partial results are merged:  merge_r attend(q, (k v)_r)

Shapes: N sequences, S new tokens, E model dim, H heads, K key/value heads, D head dim, V
vocabulary, P sequence ranks, T tensor ranks.

The cache (`sp_core.llama.cache`) holds keys and values of all tokens so far, each rank those of
about 1/P of the tokens.
"""

from collections.abc import Callable, Sequence
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor

from sp_core import arguments
from sp_core.agreement import make_alike
from sp_core.attention import Logits, block_attention, merge_into, without_autocast
from sp_core.collectives.api import all_gather, broadcast
from sp_core.communicator import Communicator
from sp_core.errors import DtypeError, ShapeError
from sp_core.llama import pipeline
from sp_core.llama.cache import Cache, NewTokens, Places
from sp_core.llama.config import Tokens, check_length, check_tokens, flat
from sp_core.llama.model import LayerAttend, Llama, Pass, check_model
from sp_core.nn.parallel import Lengths
from sp_core.nn.replicated import precision
from sp_core.sharding import Sharding, split_ranges, split_sizes

DecoderStep = tuple[Pass, Callable[[Tensor], Tensor]]
"""A micro-batch's pass, and a function from the result (S, E) to the last tokens' (N', E)."""


class Decoder:
    """A batch of sequences, of any lengths, that a model continues, with their keys and values.

    Every rank of a replica makes one and calls the same methods. If the layers are split over
    pipeline stages, stages compute different micro-batches at the same time.

    Args:
        model: the model that continues the sequences. On a CPU each token takes less time if the
            weights are frozen: `model.requires_grad_(False)`.
        room: for each sequence, the number of tokens that it may get in all. Memory for the keys
            and values of so many is allocated at once.
        micro_batches: the number of parts into which the sequences are divided; the number of
            stages if not given.

    Communication:
        One agreement (32-byte all-reduce).

    Raises:
        ShapeError, TypeError, ValueError: less than one micro-batch, more room than the model has
            positions, or arguments of another type. RankError: too little memory.
        CollectiveMismatch: ranks with different arguments. All on every rank, but a wrong `model`.
    """

    def __init__(
        self, model: Llama, room: Sequence[int], *, micro_batches: int | None = None
    ) -> None:
        check_model(model)
        count = model.grid.stages.size if micro_batches is None else arguments.plain(micro_batches)

        def make() -> tuple[list[Cache], str]:
            model.check_parts()
            arguments.check(room=room, micro_batches=micro_batches)
            for number, most in enumerate(room):
                check_length(f"the room of sequence {number}", most, 0, model.config)
            self.dtype, self.parts = model.dtype, split_ranges(len(room), count)
            self.modules = [*model.modules()]
            caches = [Cache(model, [room[number] for number in part]) for part in self.parts]
            return caches, f"Decoder({[*map(int, room)]}, micro_batches={count}, {self.dtype})"

        self.model = model
        self.caches = make_alike(model.grid.model, make)
        model.join_weights()

    def prefill(self, tokens: Tokens) -> Tensor:
        """Append tokens to sequences, each sequence rank computing some of the tokens.

        Args:
            tokens: for each sequence its new tokens, equal on every rank; an empty list for a
                sequence that gets none.

        Returns:
            (N', V): the logits after the last new token of each of the N' sequences that got any,
            on every rank.

        Communication:
            One agreement (32-byte all-reduce), also with `check="agree"`, and those of the
            attention scheme. Per layer the messages of the scheme, with all cached tokens as keys,
            and two all-reduces over the tensor ranks; one more for the embedding. Then one
            all-gather of (N', E) over the sequence ranks, and one of (N', V) over the tensor ranks.
            With `tp_sp` as `Llama.forward`, and one more all-gather of (N', E). Between stages one
            message of (S/P, E), or (S/P/T, E), for each micro-batch; then one broadcast of (N', V).

        Raises:
            ShapeError, ValueError, TypeError: more tokens than a sequence has room for, no token,
                or a token not in the vocabulary. On every rank.
            DtypeError: a model that has been converted, or a part of it; or a model of a half type
                under autocast to another half type. On every rank.
            TypeError: a part that the model reads was replaced, or has hooks. On every rank. Or a
                layer runs blocks twice or more: on all ranks of its stage. Let the error leave the
                block of the mesh, because other stages wait.
            CollectiveMismatch: ranks with different tokens. On every rank. No error adds tokens.
        """
        return self._run("prefill", tokens, self._prefill_step)

    def decode(self, tokens: Tokens) -> Tensor:
        """Append tokens to sequences, usually one each, every sequence rank computing all of them.

        Args, returns, raises: as `prefill`.

        Communication:
            One agreement (32-byte all-reduce). Per layer one all-gather of (S, H/T, D + 1) over the
            sequence ranks, and two all-reduces over the tensor ranks; one more for the embedding.
            Then, if there are several tensor ranks, for each micro-batch one broadcast of its
            (N', E) over the sequence ranks, and one all-gather of (N', V) over the tensor ranks.
            Between stages as `prefill`.
        """
        return self._run("decode", tokens, self._decode_step)

    @torch.no_grad()
    def _run(
        self, what: str, tokens: Tokens, step_of: Callable[[Cache, NewTokens], DecoderStep]
    ) -> Tensor:
        """Run `prefill` or `decode`: check the call on all ranks, and return logits (N', V).

        `what` is the name of the method; `step_of` prepares what to compute for a micro-batch.
        """
        torch.clear_autocast_cache()  # casts of earlier weights; fused optimizers mark no change
        model, grid, stages = self.model, self.model.grid, self.model.grid.stages
        before = [(cache, cache.lengths, [*map(len, cache.owned)]) for cache in self.caches]
        try:
            added = self._add(what, tokens)
            number, vocab = sum(map(bool, tokens)), model.config.vocab_size
            with grid.tensor.agreed(), grid.sequence.agreed(), stages.agreed():
                passes, lasts = zip(*(step_of(cache, new) for cache, new in added), strict=True)
                hidden = pipeline.forward(model, passes)
                logits = torch.empty(number, vocab, dtype=self.dtype, device=stages.device)
                if model.is_last:
                    rows = [last(row) for last, (row,) in zip(lasts, hidden, strict=True)]
                    sizes = split_sizes(vocab, grid.tensor.size)
                    own = model.logits(torch.cat(rows)).to(self.dtype)  # autocast lowers it
                    logits = all_gather(own, comm=grid.tensor, dim=1, sizes=sizes)
                return broadcast(logits, comm=stages, root=stages.size - 1)
        except BaseException:  # some layers have no keys of the new tokens
            for cache, lengths, counts in before:
                cache.lengths, cache.owned = lengths, [*map(list, map(islice, cache.owned, counts))]
            raise

    def _prefill_step(self, cache: Cache, new: NewTokens) -> DecoderStep:
        """Prepare `prefill` of a micro-batch: each sequence rank computes some new tokens."""
        mine = new.shares[self.model.grid.sequence.rank]
        added = [[new.positions[place] for place in share] for share in new.shares]
        sharding, kept = map(Sharding.from_positions, (added, cache.owned))
        mask = cache.mask(sharding.end, kept.end)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            cache.write(layer, k, v)
            return self.model.attend(
                q, *cache.read(layer), sharding=sharding, kv_sharding=kept, mask=mask
            )

        one = self._pass(cache, new, mine, attend, self.model.lengths(len(mine)))
        return one, lambda row: self._last(row, new, one.lengths)

    def _decode_step(self, cache: Cache, new: NewTokens) -> DecoderStep:
        """Prepare `decode` of a micro-batch with few new tokens.

        Each sequence rank computes the queries of all new tokens, and attends to the keys of its
        own part of the cache, for some sequences at a time. The partial results of all ranks are
        then merged.
        """
        model, comm = self.model, self.model.grid.sequence
        mine, positions = new.shares[comm.rank], torch.tensor(new.positions, device=comm.device)
        end, kept = len(cache.room) * cache.slot, cache.positions[: len(cache.owned[comm.rank])]
        mask, blocks = cache.mask(end, end), list[tuple[Places, Places, dict[str, Any]]]()
        for i, j in zip(cache.groups(positions), cache.groups(kept), strict=True):
            allowed = mask.allowed(positions[i], kept[j])
            blocks.append((i, j, {} if allowed.all() else {"kind": "partial", "allowed": allowed}))

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            cache.write(layer, k[:, mine], v[:, mine])
            logits = Logits.of(q)
            q, k, v = (x.transpose(1, 2) for x in (q, *map(model.spread, cache.read(layer))))
            with without_autocast(q):
                parts = [
                    block_attention(q[:, :, i], k[:, :, j], v[:, :, j], **how, logits=logits)
                    for i, j, how in blocks
                ]
            out, lse = (torch.cat(part, 2) for part in zip(*parts, strict=True))
            return _merged(out, lse, comm).transpose(1, 2).to(q.dtype)

        one = self._pass(cache, new, range(len(new.positions)), attend)
        if model.grid.tensor.size == 1:
            return one, lambda row: row[new.ends()]
        # tensor groups that lie differently on nodes may add in other orders
        return one, lambda row: broadcast(row[new.ends()], comm=comm)

    def _add(self, what: str, tokens: Tokens) -> list[tuple[Cache, NewTokens]]:
        """Check that the ranks of a replica agree on a valid call, and add tokens to the caches.

        Returns:
            For each micro-batch that gets a token, its cache and its new tokens.
        """
        shown = [length for cache in self.caches for length in cache.lengths]

        def place() -> tuple[list[tuple[Cache, Tokens, list[int]]], str]:
            arguments.check(tokens=tokens)
            if len(tokens) != len(shown):
                raise ShapeError(
                    f"tokens for {len(tokens)} sequences were given; there are {len(shown)}. Give "
                    f"an empty list for none."
                )
            owns: list[Tokens] = [[tokens[n] for n in part] for part in self.parts]
            parts = zip(self.caches, owns, self.parts, strict=True)
            placed = [(cache, own, cache.place(own, part.start)) for cache, own, part in parts]
            self.model.check_parts()
            # `Llama.dtype` walks through the tree of modules, which takes longer for each token
            held = (x for part in self.modules for x in part._parameters.values() if x is not None)
            if any(x.dtype != self.dtype for x in held):
                raise DtypeError(
                    f"the model has been converted to {self.model.dtype}; the decoder holds keys "
                    f"and values in {self.dtype}. Convert the model back, or make another decoder."
                )
            check_tokens([*chain.from_iterable(tokens)], self.model.config)
            if not any(tokens):
                raise ValueError(f"{what} was given no token for any sequence; give at least one.")
            kind = precision(self.dtype, self.model.grid.everyone.device)
            return placed, f"{what}({list(map(list, tokens))}) after {shown}, {kind}"

        placed = make_alike(self.model.grid.model, place)
        return [(cache, cache.add(own, where)) for cache, own, where in placed if where]

    def _pass(
        self,
        cache: Cache,
        new: NewTokens,
        places: Sequence[int],
        attend: LayerAttend,
        lengths: Lengths = None,
    ) -> Pass:
        """Return a `Pass` of one row (1, S): the new tokens with the indices `places`."""
        where = [new.positions[place] % cache.slot for place in places]
        tokens = flat(new.tokens)[list(places)].unsqueeze(0).to(self.model.grid.everyone.device)
        called = set[int]()  # the layers whose keys and values the cache has

        def alike(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if layer in called:
                raise TypeError(
                    f"layers.{self.model.own_layers[layer]} runs blocks twice or more, and the "
                    "cache has room for one run of each layer. Make more layers, each with one "
                    "block."
                )
            called.add(layer)
            return attend(layer, q.to(self.dtype), k, v)  # autocast lowers q, but not the cache

        return Pass(tokens, where, alike, lengths)

    def _last(self, row: Tensor, new: NewTokens, lengths: Lengths) -> Tensor:
        """Gather the hidden state of each sequence's last new token: (N', E) on every rank.

        `row` is the result of the layers for this rank's new tokens. With `lengths` (TP-SP) the
        tensor ranks gather first, then the sequence ranks.
        """
        tensor, comm, ends = self.model.grid.tensor, self.model.grid.sequence, set(new.ends())
        held = [[place for place in share if place in ends] for share in new.shares]
        mine = [index for index, place in enumerate(new.shares[comm.rank]) if place in ends]
        if lengths is None:
            rows = row[mine]
        else:
            parts = [
                [index - part.start for index in mine if index in part]
                for part in split_ranges(sum(lengths), tensor.size)
            ]
            rows = all_gather(row[parts[tensor.rank]], comm=tensor, sizes=list(map(len, parts)))
        rows = all_gather(rows, comm=comm, sizes=list(map(len, held)))
        order = torch.tensor([place for part in held for place in part], device="cpu").argsort()
        return rows[order.to(rows.device)]


def _merged(out: Tensor, lse: Tensor, comm: Communicator) -> Tensor:
    """Merge the attention of all ranks in rank order, so that every rank gets the same bits.

    Gather out (1, H/T, S, D) and lse (1, H/T, S) of each rank's keys; return out of all keys.
    """
    if comm.size == 1:
        return out
    part = torch.cat((out.to(lse.dtype), lse.unsqueeze(-1)), -1)
    parts = all_gather(part, comm=comm, sizes=[1] * comm.size)
    total, total_lse = parts[:1, ..., :-1].clone(), parts[:1, ..., -1].clone()
    for part in parts[1:].split(1):
        merge_into(total, total_lse, part[..., :-1], part[..., -1])
    return total
