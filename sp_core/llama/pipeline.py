"""Micro-batches through the stages of a model.

Each stage computes its own layers, several micro-batches at the same time.

    stage s    x <- s - 1    y = layers_s(x)            y -> s + 1
    backward   dy <- s + 1   dx = layers_s'(x)^T dy     dx -> s - 1

Shapes: B sequences of a micro-batch, S tokens, E model dim, V vocabulary, P sequence ranks, T
tensor ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from sp_core import arguments
from sp_core.agreement import agreeing_in_turn
from sp_core.collectives.api import all_reduce, broadcast
from sp_core.errors import ShapeError
from sp_core.llama.model import CAUSAL, Llama, Pass, check_model, check_tokens
from sp_core.mask import Mask
from sp_core.nn.loss import IGNORED
from sp_core.scheduling.pipeline import Order, one_forward_one_backward
from sp_core.sharding import Sharding
from sp_core.transport import Handle

Ordering = Callable[[int, int], tuple[Order, ...]]
"""A schedule by number of stages and of micro-batches."""
NAME = "pipeline"


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


class _Mail:
    """The messages of one step between neighbouring stages.

    Hidden states to the next stage, their gradients to the one before.

    All messages of a step are announced when it begins. Each stage posts its own as soon as they
    are ready, so no stage waits for one that does not have its input. The receive of the next
    message is always posted before the stage computes.

    Args:
        model: every stage makes this at the same point, for the same micro-batches.
        forward: the passes in the order in which their hidden states are sent.
        backward: likewise for their gradients.
    """

    def __init__(
        self, model: Llama, forward: Sequence[Pass], backward: Sequence[Pass] = ()
    ) -> None:
        self._comm = stages = model.grid.stages
        stages.ensure_open()
        self._tag, self._dtype = stages.next_tag(), model.dtype
        self._sent: list[Handle] = []
        self._coming: dict[bool, tuple[Handle, Tensor]] = {}
        there, back = ([_shape(model, one) for one in passes] for passes in (forward, backward))
        blank = torch.empty(1, dtype=model.dtype, device=stages.device)
        before, after = stages.rank - 1, stages.rank + 1

        def listed(peer: int, shapes: list[torch.Size]) -> list[tuple[int, Tensor]]:
            return (
                [(peer, blank.expand(shape.numel())) for shape in shapes]
                if 0 <= peer < stages.size
                else []
            )

        stages.transport.announce(
            [*listed(after, there), *listed(before, back)],
            [*listed(before, there), *listed(after, back)],
        )
        stages.counters[NAME].add()
        self._left = (there if before >= 0 else [], back if after < stages.size else [])
        for way in (False, True):
            self._expect(way)

    def _expect(self, backward: bool) -> None:
        """Post the receive of the next message that goes this way."""
        if self._left[backward]:
            x = torch.empty(
                self._left[backward].pop(0), dtype=self._dtype, device=self._comm.device
            )
            bound = self._comm.transport.bind(
                [(self._comm.rank + (1 if backward else -1), x.view(-1))]
            )
            self._coming[backward] = (
                self._comm.track(self._comm.transport.post([], bound, self._tag)),
                x,
            )

    def receive(self, *, backward: bool = False) -> Tensor:
        """Return the next hidden state of the stage before, or gradient of the one after."""
        handle, x = self._coming.pop(backward)
        self._comm.wait(handle, NAME)
        self._expect(backward)
        return x

    def send(self, x: Tensor, *, backward: bool = False) -> None:
        """Send a hidden state to the stage after this one, or a gradient to the one before it.

        Do not wait.
        """
        comm, flat = self._comm, x.detach().contiguous().view(-1)
        count = comm.counters[NAME]
        count.messages, count.bytes_sent = count.messages + 1, count.bytes_sent + flat.nbytes
        bound = comm.transport.bind([(comm.rank + (-1 if backward else 1), flat)])
        self._sent.append(comm.track(comm.transport.post(bound, [], self._tag)))

    def finish(self) -> None:
        """Wait until all messages have left."""
        for handle in self._sent:
            self._comm.wait(handle, NAME)


@torch.no_grad()
def forward(model: Llama, passes: Sequence[Pass]) -> list[Tensor]:
    """Return the hidden states (B, S, E) of each micro-batch.

    After the last norm on the last stage, else after the own layers.

    Communication:
        For each micro-batch one message of (B, S, E) from each stage to the next.
    """
    mail = _Mail(model, passes)
    results = [_compute(model, mail, one)[1] for one in passes]
    mail.finish()
    return results


def loss_and_gradients(
    model: Llama, batches: Sequence[MicroBatch], *, ordering: Ordering = one_forward_one_backward
) -> Tensor:
    """Compute the mean loss over all valid tokens of all micro-batches, and add its gradients.

    Then `sum_tied_gradients`, and `reduce_gradients` as for any model.

    Args:
        model: with any number of stages.
        batches: at least one; as many on every rank. Replicas may have others.
        ordering: a schedule with backwards, such as `gpipe`; the gradients are the same sums in
            another order.

    Returns:
        The mean on every rank, a scalar without gradient.

    Communication:
        For each micro-batch one message of (B, S/P, E), or (B, S/P/T, E), from each stage to the
        next, and one back; one broadcast of a number. Over the other ranks that of the layers and
        of `next_token_loss`.

    Raises:
        ShapeError, DtypeError, ValueError: no micro-batch, no valid label, or tokens, labels or a
            mask that do not fit. On every rank of the mesh.
    """
    check_model(model)
    grid = model.grid
    order = _agree(model, batches, ordering)[grid.stages.rank]
    valid = torch.stack([(batch.labels != IGNORED).sum() for batch in batches]).sum()
    count = int(all_reduce(valid, comm=grid.data))
    if count == 0:  # on every stage: the loss, which would say so, is computed on the last one only
        raise ValueError(
            f"no label of any micro-batch is valid (all are {IGNORED}); the mean of nothing is "
            f"not defined."
        )
    passes = [model.one_pass(batch.tokens, batch.sharding, batch.mask) for batch in batches]
    mail = _Mail(
        model, *([passes[slot.batch] for slot in order if slot.direction == way] for way in "FB")
    )
    total = torch.zeros((), dtype=torch.float64, device=grid.everyone.device)
    held: dict[int, tuple[Tensor, Tensor]] = {}

    def go_on(number: int) -> None:
        x, y = _compute(model, mail, passes[number])
        if model.is_last:
            y = model.loss(y, batches[number].labels, passes[number].lengths, count)
            total.add_(y.detach())
        held[number] = x, y

    def go_back(number: int) -> None:
        x, y = held.pop(number)
        y.backward(None if model.is_last else mail.receive(backward=True))
        if not model.is_first:
            mail.send(torch.zeros_like(x) if x.grad is None else x.grad, backward=True)

    for slot in order:
        (go_on if slot.direction == "F" else go_back)(slot.batch)
    mail.finish()
    return broadcast(total, comm=grid.stages, root=grid.stages.size - 1)


def _compute(model: Llama, mail: _Mail, one: Pass) -> tuple[Tensor, Tensor]:
    """Receive a micro-batch, compute the layers of this stage, and send the result on.

    Return input and result.
    """
    x = one.tokens if model.is_first else mail.receive().requires_grad_(torch.is_grad_enabled())
    y = model.hidden(x, one)
    if not model.is_last:
        mail.send(y)
    return x, y


@torch.no_grad()
def sum_tied_gradients(model: Llama) -> None:
    """Add the gradients of a tied embedding and head on the first and on the last stage.

    Every rank calls this, once before each step of the optimizer, before or after
    `reduce_gradients`.

    Communication:
        One message of the embedding each way between the first and the last stage, if the head is
        tied and they differ.
    """
    stages = model.grid.stages
    if not model.config.tie_word_embeddings or stages.size == 1:
        return
    if not (model.is_first or model.is_last):
        stages.wait(stages.exchange([], [], "tied"), "tied")
        return
    weight = model.embed_tokens.weight
    weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
    other, theirs = 0 if model.is_last else stages.size - 1, torch.empty_like(weight)
    exchange = stages.exchange(
        [(other, weight.grad.clone().view(-1))], [(other, theirs.view(-1))], "tied"
    )
    stages.wait(exchange, "tied")
    weight.grad += theirs


def _shape(model: Llama, one: Pass) -> torch.Size:
    """Return the shape of the hidden states that a rank of a stage sends."""
    batch, length = one.tokens.shape
    own = length if one.lengths is None else one.lengths[model.grid.tensor.rank]
    return torch.Size((batch, own, model.config.hidden_size))


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
        return (
            f"{call()} of {[(batch.tokens.tolist(), batch.labels.tolist()) for batch in batches]}"
        )

    def same_shapes() -> str:
        return (
            f"{call()} of "
            f"{[(len(batch.tokens), batch.sharding.fingerprint, batch.mask) for batch in batches]}"
        )

    def check() -> None:
        _check(model, batches, ordering)
        orders.append(ordering(grid.stages.size, len(batches)))

    with agreeing_in_turn() as agree_on:
        agree_on(grid.stages, same_tokens, check)
        for comm, text in (
            (grid.tensor, same_tokens),
            (grid.model, same_shapes),
            (grid.everyone, call),
        ):
            agree_on(comm, text)
    return orders[0]


def _check(model: Llama, batches: Sequence[MicroBatch], ordering: Ordering) -> None:
    arguments.check(batches=batches, ordering=ordering)
    if not batches:
        raise ShapeError("no micro-batch was given; give at least one.")
    for batch in batches:
        arguments.check_type(
            "a micro-batch", batch, MicroBatch, "Make it from tokens, labels and their sharding."
        )
        model.check(batch.tokens, batch.sharding, batch.mask)
        if batch.labels.shape != batch.tokens.shape or batch.labels.dtype != torch.int64:
            raise ShapeError(
                f"labels {tuple(batch.labels.shape)} of {batch.labels.dtype} for tokens "
                f"{tuple(batch.tokens.shape)} given; needed "
                "as many, of int64."
            )
        check_tokens(batch.labels[batch.labels != IGNORED], model.config, "label")
