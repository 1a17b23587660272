"""Pipeline parallelism: micro-batches pass through stages, each of which holds some layers.

A stage is the ranks with the same index along the axis "pp" of the mesh. Stages compute different
micro-batches at the same time. Only neighbouring stages exchange activations and gradients:

    stage s    x <- s - 1    y = layers_s(x)            y -> s + 1
    backward   dy <- s + 1   dx = layers_s'(x)^T dy     dx -> s - 1

To train, call `loss_and_gradients` with `MicroBatch`es, then `reduce_gradients` and
`sum_tied_gradients`. `Decoder` calls `forward`. A `Pass` describes one micro-batch in the layers.

Shapes: B sequences of a micro-batch, S tokens, E model dim, P sequence ranks, T tensor ranks.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import Self, cast

import torch
from torch import Tensor

from sp_core import arguments
from sp_core.agreement import agreeing_in_turn
from sp_core.collectives.api import broadcast
from sp_core.collectives.build import SUMMABLE
from sp_core.collectives.maps import overlaps
from sp_core.errors import DtypeError, ShapeError
from sp_core.llama.model import CAUSAL, Llama, Pass, check_model
from sp_core.mask import Mask
from sp_core.nn.loss import IGNORED, check_labels, counted
from sp_core.nn.memory import Saving
from sp_core.nn.replicated import gradient_of, learning
from sp_core.scheduling.pipeline import (
    Order,
    check_orders,
    one_forward_one_backward,
    prefill_only,
)
from sp_core.sharding import Sharding
from sp_core.transport import Handle

Ordering = Callable[[int, int], tuple[Order, ...]]
"""A function from the numbers of stages and of micro-batches to the order in which each stage
computes the forwards and backwards of the micro-batches. All stages need the same order of
forwards, and the same order of backwards."""
NAME = "pipeline"


@dataclass(frozen=True)
class MicroBatch:
    """Sequences that pass through the stages together; shapes may differ between micro-batches.

    Args:
        tokens: int64 (B, S/P), this sequence rank's; equal on all tensor ranks and stages.
        labels: int64 (B, S/P), as from `next_token_labels`; equal on all tensor ranks and stages.
        sharding: which sequence rank holds which tokens.
        mask: which query sees which key.
    """

    tokens: Tensor
    labels: Tensor
    sharding: Sharding
    mask: Mask = CAUSAL


class _Mail:
    """The messages between this stage and its neighbours in one call of this module.

    A stage receives hidden states from the stage before and sends its own to the stage after.
    Gradients of hidden states go the other way.

    All stages call the constructor, for the same micro-batches. The constructor tells the transport
    of all messages that will follow, and posts the first receive of each direction. `send` starts a
    message, and does not wait. `receive` waits for a message and posts the next receive, so that a
    message can arrive while the stage computes. Use the object in a `with` block, which ends when
    all sends are complete.

    Args:
        model: the model, whose `grid.stages` are the ranks that exchange messages.
        forward: the passes of the micro-batches in the order of their forwards on this stage.
        backward: the passes in the order of their backwards on this stage; none for inference.
    """

    def __init__(
        self, model: Llama, forward: Sequence[Pass], backward: Sequence[Pass] = ()
    ) -> None:
        self._comm = stages = model.grid.stages
        # of all parameters, as the callers have checked
        self._tag, self._dtype = stages.next_tag(), next(model.parameters()).dtype
        self._sent: list[Handle] = []  # what `__exit__` waits for
        self._coming: dict[bool, tuple[Handle, Tensor]] = {}
        shapes = [[_shape(model, one) for one in passes] for passes in (forward, backward)]
        blank = torch.empty(1, dtype=self._dtype, device=stages.device)
        before, after = stages.rank - 1, stages.rank + 1

        def left(*peers: int) -> list[list[tuple[int, torch.Size]]]:
            ways = zip(peers, shapes, strict=True)  # of hidden states, and of gradients
            return [[(peer, x) for x in own if 0 <= peer < stages.size] for peer, own in ways]

        self._unsent, self._left = left(after, before), left(before, after)
        flat = (
            [(peer, blank.expand(x.numel())) for peer, x in chain(*ways)]
            for ways in (self._unsent, self._left)
        )
        self._sent.append(stages.track(stages.transport.announce(*flat)))
        stages.counters[NAME].add()
        for way in (False, True):
            self._expect(way)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        """Wait until all sends are complete. After an error start all messages that are left.

        The neighbours may fail at other micro-batches. A receive that stayed open would take a
        later message, and `Communicator.free` would wait for it. What is sent then is NaN.
        """
        if kind is None:
            for handle in self._sent:
                self._comm.wait(handle, NAME)
            return
        quiet = suppress(Exception)  # an error here must not replace the first one
        for way in (False, True):
            for _ in [*self._left[way]]:
                with quiet:
                    self._expect(way)
        unsent = [(way, x.numel()) for way in (False, True) for _, x in self._unsent[way]]
        with quiet:
            most = max((numel for _, numel in unsent), default=0)
            blank = self._empty(torch.Size([most])).fill_(torch.nan)
            for way, numel in unsent:
                with quiet:
                    self.send(blank[:numel], backward=way)

    def _expect(self, backward: bool) -> None:
        """Post the receive of the next gradient (`backward`) or hidden state, if one is left."""
        if self._left[backward]:
            peer, shape = self._left[backward].pop(0)
            transport, x = self._comm.transport, self._empty(shape)
            posted = transport.post([], transport.bind([(peer, x.view(-1))]), self._tag)
            self._coming[backward] = self._comm.track(posted), x

    def _empty(self, shape: torch.Size) -> Tensor:
        return torch.empty(shape, dtype=self._dtype, device=self._comm.device)

    def receive(self, *, backward: bool = False) -> Tensor:
        """Wait for a message: a hidden state from the stage before, or a gradient from the next."""
        handle, x = self._coming.pop(backward)
        self._comm.wait(handle, NAME)
        self._expect(backward)
        return x

    def send(self, x: Tensor, *, backward: bool = False) -> None:
        """Start to send a hidden state to the next stage, or a gradient to the stage before."""
        comm, flat = self._comm, x.detach().contiguous().view(-1)
        count = comm.counters[NAME]
        count.messages, count.bytes_sent = count.messages + 1, count.bytes_sent + flat.nbytes
        peer, _ = self._unsent[backward].pop(0)
        bound = comm.transport.bind([(peer, flat)])
        self._sent.append(comm.track(comm.transport.post(bound, [], self._tag)))


@torch.no_grad()
def forward(model: Llama, passes: Sequence[Pass]) -> list[Tensor]:
    """Compute the layers of all stages for some micro-batches, without gradients.

    All ranks of a replica (`grid.model`) call this, for the same micro-batches.

    Args:
        model: a model with any number of stages.
        passes: for each micro-batch its tokens (B, S), S on this rank, and how they attend.

    Returns:
        For each pass the result of this stage's layers: hidden states (B, S, E), with TP-SP
        (B, S/T, E). On the last stage the final norm is applied, too.

    Communication:
        For each micro-batch one message, of the shape of the result, from each stage to the next.
        Also the messages of the layers.
    """
    with _Mail(model, passes) as mail:
        return [_compute(model, mail, one)[1] for one in passes]


def loss_and_gradients(
    model: Llama,
    batches: Sequence[MicroBatch],
    *,
    ordering: Ordering = one_forward_one_backward,
    recompute: bool = False,
    offload: bool = False,
    chunk: int | None = None,
) -> Tensor:
    """Compute the mean loss over all valid tokens of all micro-batches, and add its gradients.

    Every rank of the mesh calls this, and adds its summands of the gradients to `.grad`. Then
    call `reduce_gradients` and `sum_tied_gradients`, which sum gradients over ranks. A token
    is valid if its label is not `IGNORED`. Under `torch.no_grad()`, on every rank, there is no
    backward and no message back: the loss of a validation.

    Args:
        model: a model with any number of stages.
        batches: the micro-batches, at least one; the same number on every rank. Replicas (ranks
            along the axis "dp") may have different micro-batches.
        ordering: the order of forwards and backwards on each stage, such as `gpipe`. A different
            order adds up the same gradients in a different order.
        recompute, offload, chunk: as in `sp_core.llama.train.backward`.

    Returns:
        The mean on every rank, a float64 scalar without gradient.

    Communication:
        One agreement (32-byte all-reduce) over the stages, over the tensor ranks, over the ranks
        that hold the same weights, over the ranks of a replica and over all ranks. One all-reduce
        of the number of valid tokens. For each micro-batch one message of (B, S/P, E), with TP-SP
        (B, S/P/T, E), from each stage to the next, and one back. The messages of the layers and of
        `next_token_loss`; `recompute`, `offload` and `chunk` add the messages that `backward`
        names. In the end one broadcast of the loss over the stages.

    Raises:
        ShapeError, DtypeError, ValueError, TypeError: no micro-batch, no valid label, tokens,
            labels or a mask that do not fit, a wrong result of `ordering`, or `chunk` below 1. On
            every rank of the mesh.
        CollectiveMismatch: ranks with different micro-batches, orders, frozen weights or autocast,
            or of which only some have gradients off. On every rank. A wrong `model` is an error of
            this rank.
    """
    check_model(model)
    grid, saving = model.grid, Saving(recompute=recompute, offload=offload, chunk=chunk)
    order = _agree(model, batches, ordering, saving)[grid.stages.rank]
    # here every stage raises an error; next_token_loss would raise it on the last stage only
    count = counted(torch.stack([(x.labels != IGNORED).sum() for x in batches]), grid.data)
    passes = [model.one_pass(one.tokens, one.sharding, one.mask, saving) for one in batches]
    ways = ([passes[slot.batch] for slot in order if slot.direction == way] for way in "FB")
    total = torch.zeros((), dtype=torch.float64, device=grid.everyone.device)
    held: dict[int, tuple[Tensor, Tensor]] = {}

    def go_on(number: int) -> None:
        x, y = _compute(model, mail, passes[number])
        if model.is_last:
            y = model.loss(y, batches[number].labels, passes[number].lengths, count)
            total.add_(y.detach())
        if torch.is_grad_enabled():
            held[number] = x, y

    def go_back(number: int) -> None:
        x, y = held.pop(number)
        gradient = None if model.is_last else mail.receive(backward=True)
        if y.requires_grad:  # not if all weights of the first stage are frozen
            y.backward(gradient)
        if not model.is_first:
            mail.send(cast("Tensor", x.grad), backward=True)

    with _Mail(model, *ways) as mail:
        for slot in order:
            (go_on if slot.direction == "F" else go_back)(slot.batch)
    return broadcast(total, comm=grid.stages, root=grid.stages.size - 1)


def _compute(model: Llama, mail: _Mail, one: Pass) -> tuple[Tensor, Tensor]:
    """Receive hidden states, compute this stage's layers, and send the result to the next stage.

    Returns:
        Input and result. On the first stage the input is the tokens of the pass.
    """
    x = one.tokens if model.is_first else mail.receive().requires_grad_(torch.is_grad_enabled())
    y = model.hidden(x, one)
    if not model.is_last:
        mail.send(y)
    return x, y


@torch.no_grad()
def sum_tied_gradients(model: Llama) -> None:
    """Add up the gradients of a weight that is the embedding and, if tied, also the head.

    The first stage holds the embedding and the last stage a copy as the head. Afterwards the two
    copies have the same `.grad`, the sum of their gradients. Every rank calls this once before each
    step, after `reduce_gradients`, which may round the two differently. Frozen copies get no
    gradient.

    Communication:
        None if there is one stage or the head is not tied. Else one agreement over the stages: a
        32-byte all-reduce, and an all-gather of 64 bytes a rank if the stages' dtypes differ, or if
        the copies are frozen and other stages lie between them. Then, if the copies are trainable,
        the first and the last stage send each other one message, as large as this rank's part of
        the embedding.

    Raises:
        ValueError: on every stage, if only one copy has requires_grad.
        DtypeError: on every stage, if the gradients of the copies have different dtypes.
    """
    stages = model.grid.stages
    if not model.config.tie_word_embeddings or stages.size == 1:
        return
    weight = model.embed_tokens.weight if model.is_first or model.is_last else None
    mine = gradient_of(weight) if weight is not None and weight.requires_grad else None
    like = mine if weight is not None else next(model.parameters(), None)  # equal: sends less
    learns = stages.agree_on(
        lambda: "sum_tied_gradients", lambda: 0 if like is None else 1 + SUMMABLE.index(like.dtype)
    )
    if 0 in (learns[0], learns[-1]) and learns[0] != learns[-1]:
        raise ValueError(
            "the tied embedding has requires_grad=True on one of the two stages that hold it, the "
            "first and the last. Set it alike on both."
        )
    if learns[0] != learns[-1]:
        raise DtypeError(
            f"the tied embedding has a gradient of {SUMMABLE[learns[0] - 1]} on the first stage, "
            f"of {SUMMABLE[learns[-1] - 1]} on the last. Set `grad_dtype` alike on both."
        )
    if weight is None or mine is None:
        stages.wait(stages.exchange([], [], "tied"), "tied")
        return
    sent = mine.clone(memory_format=torch.contiguous_format)
    other, theirs = 0 if model.is_last else stages.size - 1, torch.empty_like(sent)
    flat = [(other, sent.view(-1))], [(other, theirs.view(-1))]
    stages.wait(stages.exchange(*flat, "tied"), "tied")
    weight.grad = (sent if overlaps(mine) else mine).add_(theirs)


def _shape(model: Llama, one: Pass) -> torch.Size:
    """Return the shape (B, tokens, E) of this rank's hidden states between two stages."""
    batch, length = one.tokens.shape
    own = length if one.lengths is None else one.lengths[model.grid.tensor.rank]
    return torch.Size((batch, own, model.config.hidden_size))


def _agree(
    model: Llama, batches: Sequence[MicroBatch], ordering: Ordering, saving: Saving
) -> tuple[Order, ...]:
    """Check the arguments of `loss_and_gradients`, and that the ranks agree on them.

    Tokens and labels have to be equal over stages and over tensor ranks. Shapes, shardings and
    masks have to be equal in a replica, the number of micro-batches and their order everywhere. All
    ranks of a stage have to train the same weights.

    Returns:
        For each stage the order of its forwards and backwards; of forwards if gradients are off.
    """
    grid, orders = model.grid, list[tuple[Order, ...]]()

    def call() -> str:
        what = f"{len(batches)} micro-batches, {model.precision}, in {orders[0]}, {saving}"
        return f"loss_and_gradients({what}, gradients={torch.is_grad_enabled()})"

    @cache
    def same_tokens() -> str:
        return f"{call()} of {[(x.tokens.tolist(), x.labels.tolist()) for x in batches]}"

    def same_shapes() -> str:
        return f"{call()} of {[(len(x.tokens), x.sharding.fingerprint, x.mask) for x in batches]}"

    def check() -> None:
        _check(model, batches, ordering)
        saving.check()
        chosen = ordering if torch.is_grad_enabled() else prefill_only
        orders.append(chosen(grid.stages.size, len(batches)))
        if torch.is_grad_enabled():
            check_orders(orders[0], grid.stages.size, len(batches))

    with agreeing_in_turn() as agree_on:
        agree_on(grid.stages, same_tokens, check)
        for comm, text in (
            (grid.tensor, lambda: f"{same_tokens()}, {learning(model)}"),
            (grid.data, lambda: f"{call()}, {learning(model)}"),  # stages hold other weights
            (grid.model, same_shapes),
            (grid.everyone, call),
        ):
            agree_on(comm, text)
    return next(iter(orders))


def _check(model: Llama, batches: Sequence[MicroBatch], ordering: Ordering) -> None:
    """Raise an error, on this rank, if an argument of `loss_and_gradients` is wrong."""
    model.check_parts()
    arguments.check(batches=batches, ordering=ordering)
    if not batches:
        raise ShapeError("no micro-batch was given; give at least one.")
    for batch in batches:
        remedy = "Make it from tokens, labels and their sharding."
        arguments.check_type("a micro-batch", batch, MicroBatch, remedy)
        model.check(batch.tokens, batch.sharding, batch.mask)
        arguments.check_tensor(batch.labels, model.grid.sequence, "labels")
        if batch.labels.shape != batch.tokens.shape or batch.labels.dtype != torch.int64:
            raise ShapeError(
                f"labels {tuple(batch.labels.shape)} of {batch.labels.dtype} for tokens "
                f"{tuple(batch.tokens.shape)} given; needed as many, of int64."
            )
        check_labels(batch.labels, model.config.vocab_size)
