"""Micro-batches through the stages of a model: each stage computes its layers for one while others compute theirs for others.

    stage s:  x <- s - 1    y = layers_s(x)    y -> s + 1          backward:  dy <- s + 1    dx = layers_s'(x)^T dy    dx -> s - 1

Shapes: B sequences of a micro-batch, S tokens, E model dim, V vocabulary, P sequence ranks, T tensor ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial

import torch
from torch import Tensor

from sp_core import arguments
from sp_core.collectives.api import all_reduce, broadcast
from sp_core.communicator import agreeing_in_turn
from sp_core.errors import ShapeError
from sp_core.llama.layers import Lengths
from sp_core.llama.mail import Mail
from sp_core.llama.model import CAUSAL, LayerAttend, Llama, check_model, check_tokens, document_positions
from sp_core.loss import IGNORED, check_shard, next_token_loss
from sp_core.mask import Mask, Positions
from sp_core.scheduling.pipeline import Order, one_forward_one_backward, prefill_only
from sp_core.sharding import Sharding

Ordering = Callable[[int, int], tuple[Order, ...]]
"""A schedule by number of stages and of micro-batches."""


@dataclass(frozen=True)
class Flight:
    """What every stage knows of a micro-batch: the tokens (B, S) of this rank, their positions, how they attend, and with TP-SP how
    many of them each tensor rank has between the splits of the weights."""

    tokens: Tensor
    positions: Positions
    attend: LayerAttend
    lengths: Lengths = None


@dataclass(frozen=True)
class MicroBatch:
    """Sequences that go through the stages together; other micro-batches may have other lengths.

    Args:
        tokens: int64 (B, S/P), the same on all tensor ranks and stages.
        labels: int64 (B, S/P), as from `next_token_labels`, on every stage.
        sharding: who owns which tokens, over the sequence ranks.
        mask: who sees whom.
    """

    tokens: Tensor
    labels: Tensor
    sharding: Sharding
    mask: Mask = CAUSAL


@torch.no_grad()
def forward(model: Llama, flights: Sequence[Flight]) -> list[Tensor]:
    """Hidden states (B, S, E) of each micro-batch: after the last norm on the last stage, after the own layers on the others.

    Communication:
        For each micro-batch one message of (B, S, E) from each stage to the next.
    """
    stages = model.grid.stages
    order = prefill_only(stages.size, len(flights))[stages.rank] if flights else ()
    mail = Mail(stages, model.dtype, [_shape(model, flights[slot.batch].tokens, flights[slot.batch].lengths) for slot in order])
    results = []
    for slot in order:
        flight = flights[slot.batch]
        x = flight.tokens if model.is_first else mail.receive()
        results.append(model.hidden(x, flight.positions, flight.attend, flight.lengths))
        if not model.is_last:
            mail.send(results[-1])
    mail.finish()
    return results


def from_last(model: Llama, x: Tensor | None, shape: Sequence[int]) -> Tensor:
    """What the last stage has, on every stage."""
    stages = model.grid.stages
    blank = torch.empty(tuple(shape), dtype=model.dtype, device=stages.device)
    return broadcast(blank if x is None else x, comm=stages, root=stages.size - 1)


def loss_and_gradients(model: Llama, batches: Sequence[MicroBatch], *, ordering: Ordering = one_forward_one_backward) -> Tensor:
    """The mean loss over all valid tokens of all micro-batches; its gradients are added to those of the parameters.

    Then `sum_tied_gradients`, and `reduce_gradients` as for any model.

    Args:
        model: with any number of stages.
        batches: at least one; as many on every rank. Replicas may have others.
        ordering: a schedule with backwards, such as `gpipe`; the gradients are the same sums in another order.

    Returns:
        The mean on every rank, a scalar without gradient.

    Communication:
        For each micro-batch one message of (B, S/P, E), or (B, S/P/T, E), from each stage to the next, and one back; one broadcast
        of a number. Over the other ranks that of the layers and of `next_token_loss`.

    Raises:
        ShapeError, DtypeError, ValueError: no micro-batch, no valid label, or tokens, labels or a mask that do not fit. On every
            rank of the mesh.
    """
    check_model(model)
    grid = model.grid
    orders = _agree(model, batches, ordering)
    valid = torch.stack([(batch.labels != IGNORED).sum() for batch in batches]).sum()
    count = int(all_reduce(valid, comm=grid.data))
    if count == 0:  # on every stage: the loss, which would say so, is computed on the last one only
        raise ValueError(f"no label of any micro-batch is valid (all are {IGNORED}); the mean of nothing is not defined.")
    order = orders[grid.stages.rank]
    every = [(slot.direction, batches[slot.batch].tokens) for slot in order]
    shapes = {d: [_shape(model, tokens, model.lengths(tokens)) for direction, tokens in every if direction == d] for d in "FB"}
    mail = Mail(grid.stages, model.dtype, shapes["F"], shapes["B"])
    stage = _Stage(model, batches, mail, count)
    for slot in order:
        (stage.forward if slot.direction == "F" else stage.backward)(slot.batch)
    mail.finish()
    return broadcast(stage.loss, comm=grid.stages, root=grid.stages.size - 1)


class _Stage:
    """One stage's part of a step, and what it holds between the forward and the backward of a micro-batch."""

    def __init__(self, model: Llama, batches: Sequence[MicroBatch], mail: Mail, count: int) -> None:
        self._model, self._batches, self._mail, self._count = model, batches, mail, count
        self._held: dict[int, tuple[Tensor, Tensor]] = {}
        self.loss = torch.zeros((), dtype=torch.float64, device=model.grid.everyone.device)

    def forward(self, number: int) -> None:
        """From the stage before to the one after; on the last one to the loss."""
        model, batch = self._model, self._batches[number]
        x = batch.tokens if model.is_first else self._mail.receive().requires_grad_()
        positions = document_positions(batch.sharding.positions(model.grid.sequence.rank), batch.mask)
        attend = partial(model.attend, sharding=batch.sharding, mask=batch.mask)
        lengths = model.lengths(batch.tokens)
        y = model.hidden(x, positions, lambda layer, q, k, v: attend(q, k, v), lengths)
        if model.is_last:
            tensor, data = model.grid.tensor, model.grid.data
            y = next_token_loss(model.logits(y, lengths), batch.labels, tensor=tensor, data=data, count=self._count)
            self.loss += y.detach()
        else:
            self._mail.send(y)
        self._held[number] = x, y

    def backward(self, number: int) -> None:
        """From the stage after to the one before; on the last one from the loss."""
        x, y = self._held.pop(number)
        y.backward(None if self._model.is_last else self._mail.receive(backward=True))
        if not self._model.is_first:
            self._mail.send(torch.zeros_like(x) if x.grad is None else x.grad, backward=True)


@torch.no_grad()
def sum_tied_gradients(model: Llama) -> None:
    """Add the gradients of a tied embedding and head, which the first and the last stage hold, on both of them.

    Every rank calls this, once before each step of the optimizer, before or after `reduce_gradients`.

    Communication:
        One message of the embedding each way between the first and the last stage, if the head is tied and they differ.
    """
    stages = model.grid.stages
    if not model.config.tie_word_embeddings or stages.size == 1:
        return
    ends = model.is_first or model.is_last
    other = 0 if model.is_last else stages.size - 1
    sends: list[tuple[int, Tensor]] = []
    recvs: list[tuple[int, Tensor]] = []
    if ends:
        weight = model.embed_tokens.weight
        weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
        sends, recvs = [(other, weight.grad.clone().view(-1))], [(other, torch.empty_like(weight).view(-1))]
    stages.wait(stages.exchange(sends, recvs, "tied"), "tied")
    if ends:
        assert weight.grad is not None
        weight.grad += recvs[0][1].view_as(weight)


def _shape(model: Llama, tokens: Tensor, lengths: Lengths) -> tuple[int, ...]:
    """Of what a rank of a stage sends for these tokens."""
    batch, length = tokens.shape
    return batch, length if lengths is None else lengths[model.grid.tensor.rank], model.config.hidden_size


def _agree(model: Llama, batches: Sequence[MicroBatch], ordering: Ordering) -> tuple[Order, ...]:
    """Agree over ranks with the same tokens, then over those of one replica, then over all.

    Replicas may have micro-batches of other shapes.

    Returns:
        The order of every stage.
    """
    grid, orders = model.grid, list[tuple[Order, ...]]()

    def call() -> str:
        return f"loss_and_gradients({len(batches)} micro-batches, in {orders[0]})"

    @cache
    def same_tokens() -> str:
        return f"{call()} of {[(batch.tokens.tolist(), batch.labels.tolist()) for batch in batches]}"

    def same_shapes() -> str:
        return f"{call()} of {[(len(batch.tokens), batch.sharding.fingerprint, batch.mask) for batch in batches]}"

    def check() -> int:
        _check(model, batches, ordering)
        orders.append(ordering(grid.stages.size, len(batches)))
        return 0

    with agreeing_in_turn() as agree_on:
        agree_on(grid.stages, same_tokens, check)
        for comm, text in ((grid.tensor, same_tokens), (grid.model, same_shapes), (grid.everyone, call)):
            agree_on(comm, text, lambda: 0)
    return orders[0]


def _check(model: Llama, batches: Sequence[MicroBatch], ordering: Ordering) -> None:
    arguments.check(batches=batches, ordering=ordering)
    if not batches:
        raise ShapeError("no micro-batch was given; give at least one.")
    for batch in batches:
        arguments.check_type("a micro-batch", batch, MicroBatch, "Make it from tokens, labels and their sharding.")
        check_shard(batch.tokens, model.grid.sequence, batch.sharding)
        arguments.check_type("mask", batch.mask, Mask, "Leave it out for a causal one.")
        batch.mask.check_lengths(batch.sharding.end)
        check_tokens(batch.tokens, model.config)
        if batch.labels.shape != batch.tokens.shape or batch.labels.dtype != torch.int64:
            raise ShapeError(
                f"labels {tuple(batch.labels.shape)} of {batch.labels.dtype} for tokens {tuple(batch.tokens.shape)} given; needed "
                "as many, of int64."
            )
        check_tokens(batch.labels[batch.labels != IGNORED], model.config, "label")
