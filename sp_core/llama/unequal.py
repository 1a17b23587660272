"""`prefill_unequal`: logits after the last token of sequences of unequal length.

An assignment of `sp_core.scheduling` sorts the sequences into three kinds:

    sharded  all sequence ranks share a sequence     zigzag shards, attention by the grid's scheme
    packed   one sequence rank computes it whole     local attention, several packed into one row
    waiting  as packed, on the rank that first has nothing else to do

A row is a tensor of shape (1, S) with several sequences one after the other, which the mask keeps
apart as documents. A row has up to `PASS_TOKENS` tokens, or one longer sequence.
Shapes: N sequences, S tokens, E model dim, V vocabulary, P sequence ranks, T tensor ranks.
"""

from collections.abc import Iterator, Sequence
from itertools import chain, cycle, islice
from typing import cast
from zlib import crc32

import torch
from torch import Tensor

from sp_core import arguments
from sp_core.attention import local_attention
from sp_core.collectives.api import all_gather, broadcast
from sp_core.errors import ShapeError
from sp_core.llama.config import LlamaConfig, Tokens, check_sequences
from sp_core.llama.model import Llama, Pass, check_model
from sp_core.llama.train import packed
from sp_core.mask import document_positions
from sp_core.scheduling import Assignment, Work
from sp_core.segments import grouped
from sp_core.sharding import Sharding, split_sizes

PASS_TOKENS = 1024
"""The most tokens of packed sequences that are computed together. More need more memory; fewer
make the matrix products small."""
Rows = dict[int, Tensor]
"""The hidden state (E,) of the last token of some sequences, by the index of the sequence."""


def work_of(config: LlamaConfig) -> Work:
    """Return the floating-point operations of a forward pass, per token and per pair of tokens.

    Embedding, norms and the output layer are not counted.
    """
    attention = 4 * config.num_attention_heads * config.head_dim
    return Work(
        2 * config.layer_weights * config.num_hidden_layers, attention * config.num_hidden_layers
    )


def prefill_unequal(
    model: Llama, sequences: Tokens, plan: Assignment, *, pass_tokens: int = PASS_TOKENS
) -> Tensor:
    """Compute the logits after the last token of each sequence. Every rank calls this.

    Args:
        model: the model, on a mesh without the axes "dp" and "pp".
        sequences: for each sequence its tokens, at least one; equal on every rank.
        plan: made by a function of `sp_core.scheduling`, such as `balanced`, for these lengths and
            the number of sequence ranks. It says which sequences all sequence ranks share, and
            which rank computes the others.
        pass_tokens: the most tokens of sequences that a rank packs into one row; a longer sequence
            has a row of its own.

    Returns:
        (N, V) in the order of the sequences, on every rank.

    Communication:
        One agreement (32-byte all-reduce). For a shared sequence the messages of the attention
        scheme; for other sequences none between sequence ranks. Ranks draw rows of waiting
        sequences from a shared counter: each draw is one access and a broadcast of a number over
        the tensor ranks. The sequence ranks make and free this counter with two more agreements.
        Over the tensor ranks two all-reduces per layer, and one for the embedding, for each shared
        sequence and each other row. In the end two all-gathers over the sequence ranks, of N/P
        numbers and of (N/P, V/T), and one of (N, V/T) over the tensor ranks.

    Raises:
        ShapeError, ValueError, TypeError: a plan for different lengths or ranks, an empty sequence,
            more tokens than the model has positions, a token that is not in the vocabulary, or a
            mesh with replicas.
        DtypeError: a model of several dtypes, or of a half type under autocast to another.
        CollectiveMismatch: ranks with different sequences, plans or autocast.

    All of these errors are raised on every rank, but that of a wrong `model` on this rank.
    """
    check_model(model)

    def call() -> str:
        _check(model, sequences, plan, pass_tokens)
        digest = crc32(f"{list(map(list, sequences))} {plan}".encode())
        return (
            f"prefill_unequal({len(sequences)} sequences and a plan #{digest:08x}, {pass_tokens=}, "
            f"{model.precision})"
        )

    model.grid.everyone.agree_on(call)
    return collect(model, compute(model, sequences, plan, pass_tokens=pass_tokens), len(sequences))


@torch.no_grad()
def compute(
    model: Llama, sequences: Tokens, plan: Assignment, *, pass_tokens: int = PASS_TOKENS
) -> Rows:
    """Compute this rank's part of `prefill_unequal`, without a check that the ranks agree.

    Returns:
        Hidden states of the last tokens that this rank computed, by the index of the sequence.
    """
    torch.clear_autocast_cache()  # it may have casts of earlier weights
    rows: Rows = {}
    for number in plan.sharded:
        rows |= _computed(model, (number,), sequences, plan)
    for numbers in chain(
        grouped(plan.packed[model.grid.sequence.rank], plan.tokens, pass_tokens),
        _taken(model, list(grouped(plan.waiting, plan.tokens, pass_tokens))),
    ):
        rows |= _computed(model, numbers, sequences, plan, alone=True)
    return rows


@torch.no_grad()
def collect(model: Llama, rows: Rows, count: int) -> Tensor:
    """Return the logits (N, V) of all sequences on every rank, from the result of `compute`.

    Every rank calls this. `count` is N.
    """
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


def _computed(
    model: Llama,
    numbers: Sequence[int],
    sequences: Tokens,
    plan: Assignment,
    *,
    alone: bool = False,
) -> Rows:
    """Compute the sequences with these indices, packed into one row.

    With `alone` this rank computes the row by itself. Else all sequence ranks call this and share
    the row.

    Returns:
        The hidden state of each sequence's last token, if this rank has that token.
    """
    # the causal mask hides from a sequence's tokens those that fill it up to its length in the plan
    filled = [[*islice(cycle(sequences[one]), plan.tokens(one))] for one in numbers]
    tokens, mask = packed(filled)
    comm = model.grid.sequence
    rank, size = (0, 1) if alone else (comm.rank, comm.size)
    sharding = Sharding.zigzag(tokens.shape[1], size)
    own = sharding.shard(tokens, rank, 1).to(comm.device)

    def attend(_: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if alone:
            return cast("Tensor", local_attention(q, model.spread(k), model.spread(v), mask=mask))
        return model.attend(q, k, v, sharding=sharding, mask=mask)

    positions = sharding.positions(rank)
    (row,) = model.hidden(own, Pass(own, document_positions(positions, mask), attend))
    places = {position: place for place, position in enumerate(positions.tolist())}
    starts = zip(numbers, mask.documents or (), strict=False)
    lasts = {number: start + len(sequences[number]) - 1 for number, start in starts}
    # clones, because a view would keep the hidden states of all tokens of the row
    return {number: row[places[last]].clone() for number, last in lasts.items() if last in places}


def _taken(model: Llama, waiting: Sequence[tuple[int, ...]]) -> Iterator[tuple[int, ...]]:
    """Yield the rows of `waiting` that this rank is to compute, until no row is left.

    Rows are handed out while the ranks compute: whoever is free takes the next one. A row is a
    tuple of indices of sequences. Tensor rank 0 takes the number of the next row from a counter
    that all sequence ranks share, and broadcasts it to the other tensor ranks. Every rank calls
    this.
    """
    if not waiting:
        return
    tensor, counter = model.grid.tensor, model.grid.sequence.counter()
    while True:
        number = tensor.rank or counter.take()  # the broadcast takes rank 0's number
        place = int(broadcast(torch.tensor([number], device=tensor.device), comm=tensor))
        if place >= len(waiting):
            break
        yield waiting[place]
    # MPI blocks in free(), and an error of another rank would not end that
    model.grid.sequence.agree_on(lambda: "free() of a counter")
    counter.free()


def _check(model: Llama, sequences: Tokens, plan: Assignment, pass_tokens: int) -> None:
    """Raise an error, on this rank, if an argument of `prefill_unequal` is wrong."""
    model.check_parts()
    arguments.check(sequences=sequences, pass_tokens=pass_tokens)
    arguments.check_type(
        "plan", plan, Assignment, "Make one with a policy of sp_core.scheduling, such as balanced."
    )
    grid, lengths = model.grid, tuple(map(len, sequences))
    for axis, group in (("dp", grid.replicas), ("pp", grid.stages)):
        if group.size > 1:
            raise ShapeError(
                f"the mesh has the axis {axis!r} of {group.size}; plans of unequal sequences are "
                f"for tensor and sequence ranks. Make the mesh again and leave {axis} out."
            )
    if plan.lengths != lengths or plan.size != grid.sequence.size:
        pairs = enumerate(zip(lengths, plan.lengths, strict=False))
        others = [
            f"; sequence {n} has {a} tokens, in the plan {b}" for n, (a, b) in pairs if a != b
        ]
        raise ShapeError(
            f"the plan is for {len(plan.lengths)} sequences of {sum(plan.lengths)} tokens on "
            f"{plan.size} ranks; given were "
            f"{len(lengths)} of {sum(lengths)} on {grid.sequence.size} sequence ranks"
            f"{''.join(others[:1])}. Make a plan for these, in this order."
        )
    check_sequences(sequences, model.config, more=0)
