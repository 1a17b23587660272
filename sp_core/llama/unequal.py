"""Prefill of sequences of unequal length as a plan says.

Some shared by all sequence ranks, the others each whole on one of them.

    shared:  q_r, (k v)_r of a zigzag shard   ->  the grid's scheme
    packed:  whole sequences as documents     ->  local attention

Shapes: N sequences, S tokens, E model dim, V vocabulary, P sequence ranks, T tensor ranks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from sp_core import arguments
from sp_core.attention import local_attention
from sp_core.collectives.api import all_gather, broadcast
from sp_core.errors import ShapeError
from sp_core.llama.config import LlamaConfig
from sp_core.llama.model import (
    CAUSAL,
    Llama,
    Pass,
    Tokens,
    check_model,
    check_tokens,
    document_positions,
    flat,
)
from sp_core.llama.train import packed
from sp_core.scheduling import Plan, Work
from sp_core.scheduling.plan import passes
from sp_core.sharding import Sharding, split_sizes

PASS_TOKENS = 1024
"""Tokens of short sequences that are computed together; more need more memory, and less makes
the products small."""
Rows = dict[int, Tensor]
"""Hidden states (E,) of the last tokens of some sequences, by the number of the sequence."""


def work_of(config: LlamaConfig) -> Work:
    """Return the operations of the layers in a forward pass, without embedding, norms and head."""
    attention = 4 * config.num_attention_heads * config.head_dim
    return Work(
        2 * config.layer_weights * config.num_hidden_layers, attention * config.num_hidden_layers
    )


def prefill_unequal(
    model: Llama, sequences: Tokens, plan: Plan, *, pass_tokens: int = PASS_TOKENS
) -> Tensor:
    """Compute the logits after the last token of each sequence.

    Args:
        model: the weights; without replicas and pipeline stages.
        sequences: of any lengths, at least one token each; the same on every rank.
        plan: from `sp_core.scheduling`, for these lengths and the sequence ranks.
        pass_tokens: how many tokens of packed sequences are computed together.

    Returns:
        (N, V) in the order of the sequences, on every rank.

    Communication:
        For a shared sequence that of the scheme over the sequence ranks; none over them for a
        packed one; for a run of waiting ones an access to a shared counter. Over the tensor ranks
        two all-reduces per layer, and one for the embedding, for each shared sequence and each run
        of others; and a broadcast of a number for each access. In the end two all-gathers over the
        sequence ranks, of (N/P, V/T) and of N/P numbers, and one of (N, V/T) over the tensor ranks.

    Raises:
        ShapeError, ValueError: a plan for other lengths or ranks, an empty sequence, a token that
            is not in the vocabulary, or a mesh with replicas or stages.
        CollectiveMismatch: ranks with different sequences or plans.

    All of these on every rank.
    """
    check_model(model)

    def call() -> str:
        _check(model, sequences, plan, pass_tokens)
        digest = hashlib.blake2b(
            repr((list(map(list, sequences)), plan)).encode(), digest_size=8
        ).hexdigest()
        return f"prefill_unequal({len(sequences)} sequences and a plan #{digest}, {pass_tokens=})"

    model.grid.everyone.agree_on(call)
    return collect(model, compute(model, sequences, plan, pass_tokens=pass_tokens), len(sequences))


@torch.no_grad()
def compute(model: Llama, sequences: Tokens, plan: Plan, *, pass_tokens: int = PASS_TOKENS) -> Rows:
    """Do this rank's part of `prefill_unequal` after the ranks have agreed.

    Return the rows of the last tokens that it had.
    """
    rows: Rows = {}
    for number in plan.sharded:
        rows |= _shared(model, number, _filled(sequences, plan, number), len(sequences[number]))
    for numbers in passes(plan, plan.packed[model.grid.sequence.rank], pass_tokens):
        rows |= _packed(model, numbers, sequences, plan)
    for numbers in _taken(model, list(passes(plan, plan.waiting, pass_tokens))):
        rows |= _packed(model, numbers, sequences, plan)
    return rows


@torch.no_grad()
def collect(model: Llama, rows: Rows, count: int) -> Tensor:
    """Gather the logits (N, V) on every rank, from the rows that each has."""
    sequence, tensor, config = model.grid.sequence, model.grid.tensor, model.config
    numbers = torch.tensor(list(rows), dtype=torch.int64, device=sequence.device)
    empty = torch.empty(0, config.hidden_size, dtype=model.dtype, device=sequence.device)
    own = model.logits(torch.stack(list(rows.values())) if rows else empty)
    order = all_gather(numbers, comm=sequence).argsort()
    assert len(order) == count
    gathered = all_gather(own, comm=sequence)[order]
    return all_gather(
        gathered, comm=tensor, dim=1, sizes=split_sizes(config.vocab_size, tensor.size)
    )


def _shared(model: Llama, number: int, tokens: Sequence[int], length: int) -> Rows:
    """Compute a sequence that the sequence ranks share.

    The rank with the last token returns its row.
    """
    comm = model.grid.sequence
    sharding = Sharding.zigzag(len(tokens), comm.size)
    mine = sharding.shard(torch.tensor([tokens], dtype=torch.int64), comm.rank, 1).to(comm.device)
    hidden = model.hidden(mine, replace(model.one_pass(mine, sharding, CAUSAL), lengths=None))
    last = sharding.positions(comm.rank) == length - 1
    return {number: hidden[0, last].squeeze(0)} if last.any() else {}


def _packed(model: Llama, numbers: Sequence[int], sequences: Tokens, plan: Plan) -> Rows:
    """Compute whole sequences on this rank, packed as documents into one row."""
    row, mask = packed([_filled(sequences, plan, number) for number in numbers])
    tokens = row.to(model.grid.sequence.device)

    def attend(_: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = local_attention(q, model.spread(k), model.spread(v), mask=mask)
        assert isinstance(out, Tensor)
        return out

    hidden = model.hidden(
        tokens, Pass(tokens, document_positions(torch.arange(tokens.shape[1]), mask), attend)
    )
    starts = zip(numbers, mask.documents or (), strict=False)
    return {number: hidden[0, start + len(sequences[number]) - 1] for number, start in starts}


def _taken(model: Llama, waiting: Sequence[tuple[int, ...]]) -> Iterator[tuple[int, ...]]:
    """Yield the waiting runs that this rank takes.

    Tensor rank 0 draws their numbers from a shared counter for all tensor ranks.
    """
    if not waiting:
        return
    counter = model.grid.sequence.counter()
    while True:
        drawn = torch.tensor(
            [counter.take() if model.grid.tensor.rank == 0 else 0], device=model.grid.tensor.device
        )
        place = int(broadcast(drawn, comm=model.grid.tensor))
        if place >= len(waiting):
            break
        yield waiting[place]
    counter.free()


def _filled(sequences: Tokens, plan: Plan, number: int) -> list[int]:
    """Return a sequence with its padding, which no token before it sees."""
    return [*sequences[number], *[0] * (plan.tokens(number) - len(sequences[number]))]


def _check(model: Llama, sequences: Tokens, plan: Plan, pass_tokens: int) -> None:
    arguments.check(sequences=sequences, pass_tokens=pass_tokens)
    arguments.check_type(
        "plan", plan, Plan, "Make one with a policy of sp_core.scheduling, such as balanced."
    )
    grid, lengths = model.grid, tuple(map(len, sequences))
    if grid.everyone.size > grid.model.size:
        raise ShapeError(
            f"the mesh has {grid.replicas.size} replicas; unequal sequences are planned without. "
            f"Leave dp out."
        )
    if plan.lengths != lengths or plan.size != grid.sequence.size:
        raise ShapeError(
            f"the plan is for {len(plan.lengths)} sequences of {sum(plan.lengths)} tokens on "
            f"{plan.size} ranks; given were "
            f"{len(lengths)} of {sum(lengths)} on {grid.sequence.size} sequence ranks. Make a "
            f"plan for these."
        )
    if pass_tokens < 1 or 0 in lengths:
        what = (
            f"pass_tokens={pass_tokens}"
            if pass_tokens < 1
            else f"sequence {lengths.index(0)} without tokens"
        )
        raise ValueError(f"{what} was given; needed at least 1.")
    check_tokens(flat(sequences), model.config)
