"""Compute next-token labels and cross-entropy, for sequences and vocabularies split over ranks.

    label of the token at position t = the token at position t + 1, on whichever rank it is
    loss = sum over the valid tokens of all ranks (log sum exp(logits) - logit of the label) /
    number of valid tokens

`next_token_labels` makes the labels, `next_token_loss` computes the loss. A token is valid if its
label is not `IGNORED`.
Shapes: B batch, S sequence, E model dim, V vocabulary, P ranks that share a sequence, T ranks that
split the vocabulary.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from zlib import crc32

import torch
from torch import Tensor
from torch.nn import functional as F

from sp_core import arguments
from sp_core.agreement import agreeing_in_turn
from sp_core.attention import accumulation_dtype
from sp_core.collectives.api import all_reduce, shift
from sp_core.collectives.differentiable import reduce_from_group
from sp_core.communicator import Communicator
from sp_core.compiling import EagerFunction
from sp_core.errors import DtypeError, ShapeError
from sp_core.mask import Mask
from sp_core.nn.memory import tiled
from sp_core.nn.replicated import autocast_dtype
from sp_core.schemes.reach import next_owner_distances
from sp_core.segments import within
from sp_core.sharding import Sharding, check_sharding

IGNORED = -100
"""The label of a token without a next token. The loss leaves such tokens out."""


@torch.no_grad()
def next_token_labels(
    tokens: Tensor, *, comm: Communicator, sharding: Sharding, mask: Mask | None = None
) -> Tensor:
    """Return the label of each of this rank's tokens: the token at the next global position.

    Every rank calls this.

    Args:
        tokens: int64 (B, S/P), this rank's tokens in the order of the sharding.
        comm: the ranks that share the sequence.
        sharding: which rank holds which tokens.
        mask: a mask of which only `documents` is used; None if there is a single document. The
            last boundary must be `sharding.end`.

    Returns:
        int64 (B, S/P), `IGNORED` where no rank holds the next position or a document ends.

    Communication:
        One agreement (32-byte all-reduce), and one in each `shift`. There are at most two `shift`
        if the sharding is contiguous, zigzag or striped; otherwise one for each distance, in ranks,
        between the owners of a position and of the next one. A rank sends only the labels that
        another rank needs, 8 bytes each: for each row of the batch one label per range of the
        sharding, all if it is striped.

    Raises:
        ShapeError, DtypeError: the tokens are not int64, or the tokens or documents do not fit the
            sharding; on every rank.
        TypeError: a sharding or mask of another type; on every rank.
        CollectiveMismatch: the ranks' shardings or masks differ; on every rank.
    """
    arguments.check_communicator(comm)

    def call() -> str:
        check_shard(tokens, comm, sharding)
        if mask is not None:
            arguments.check_type("mask", mask, Mask, "Pass Mask(documents=...), or None.")
            Mask(documents=mask.documents).check_lengths(sharding.end)
        return f"next_token_labels({sharding.fingerprint}, {mask}) on {comm.name}"

    comm.agree_on(call)
    labels, own = torch.full_like(tokens, IGNORED), sharding.positions(comm.rank)
    for distance in (0, *next_owner_distances(sharding)):
        before, after = ((comm.rank + sign * distance) % comm.size for sign in (-1, 1))
        sent = tokens[:, _owned(own - 1, sharding, before).to(tokens.device)]
        met = sent if distance == 0 else shift(sent, comm=comm, offset=-distance, dim=1)
        labels[:, _owned(own + 1, sharding, after).to(tokens.device)] = met
    if mask is not None and mask.documents is not None:
        ends = torch.isin(own + 1, torch.tensor(mask.documents, device="cpu"))
        labels[:, ends.to(tokens.device)] = IGNORED
    return labels


def _owned(positions: Tensor, sharding: Sharding, rank: int) -> Tensor:
    """Return where in `positions` the tokens of `rank` are: indices, in order of position."""
    places = torch.isin(positions, sharding.positions(rank)).nonzero().squeeze(1)
    return places[positions[places].argsort()]


def check_shard(tokens: Tensor, comm: Communicator, sharding: Sharding) -> None:
    """Raise an error, on this rank, unless tokens are int64 (B, S/P) as the sharding says.

    S/P is the number of tokens that the sharding gives to this rank of `comm`.

    Raises:
        ShapeError, DtypeError, DeviceError, TypeError: what was given and what is needed.
    """
    arguments.check_tensor(tokens, comm)
    check_sharding(sharding, comm, "tokens")
    if tokens.dtype != torch.int64:
        raise DtypeError(
            f"tokens have dtype {tokens.dtype}, needed int64. Convert them with tokens.long()."
        )
    if tokens.dim() != 2 or tokens.shape[1] != sharding.local_len(comm.rank):
        raise ShapeError(
            f"tokens have shape {tuple(tokens.shape)} on rank {comm.rank} of {comm.name}, and the "
            f"sharding has shards of {sharding.lengths}; needed (batch, own shard)."
        )


def next_token_loss(
    x: Tensor,
    labels: Tensor,
    *,
    tensor: Communicator,
    data: Communicator,
    count: int | None = None,
    head: Tensor | None = None,
    chunk: int | None = 1024,
) -> Tensor:
    """Compute the mean cross-entropy over the valid tokens of all ranks.

    The vocabulary is split over the ranks of `tensor`, and no rank gathers the logits. Every rank
    returns the same loss. Call backward on every rank, then `reduce_gradients`, which sums the
    ranks' parts. The sums are the gradients of this loss: do not divide them by the ranks' number.

    Do not scale this loss with `torch.amp.GradScaler` on several tensor ranks. Each rank's scaler
    sees infinities of its own parts only, so scales and weights drift apart. Use bfloat16.

    Args:
        x: logits (..., V/T) of this rank's part of the vocabulary; the parts are consecutive, in
            rank order, and may differ in size. With `head` hidden states (..., E), equal on the
            ranks of `tensor`. Make these by `all_gather` or `copy_to_group` over `tensor`: each
            rank gets only a summand of their gradient, and the backward of these functions sums.
        labels: int64 (...), indices in the whole vocabulary, or `IGNORED`; equal on the ranks of
            `tensor`.
        tensor: the T ranks that split the vocabulary and have the same tokens; if none do,
            `mesh[()]`, this rank alone.
        data: the ranks that have different tokens.
        count: the divisor of the sum over tokens, equal on every rank, at least 1; None for the
            number of valid labels of all ranks. For several micro-batches pass the number of valid
            labels in all of them on all ranks: their losses then add up to the mean.
        head: (V/T, E), the weight that makes this rank's logits x @ head.T; None for logits.
        chunk: with `head`, the number of tokens whose logits exist at a time, at least 1; None for
            all. Backward computes the logits of each chunk again if there are several. It adds the
            chunks' gradients of `head` in float32 or wider: for a half type, this needs two tensors
            (V/T, E) in float32 for a time.

    Returns:
        The mean on every rank: a scalar, float64 for float64 inputs, else float32.

    Communication:
        One agreement (32-byte all-reduce) over `tensor` and one over `data`; the forward makes no
        other, also with `check="agree"`. Over `tensor` two all-reduces for each chunk, one of a
        number and one of two numbers per token. Over `data` an all-reduce of the loss, and one of
        the count if `count` is None. If `tensor` has several ranks, each sums the loss over its own
        `data`, by recursive doubling: the order of its additions does not depend on nodes. If there
        are several chunks, the backward repeats the all-reduces over `tensor`.

    Raises:
        ShapeError, DtypeError: tensors that do not fit.
        ValueError: a label outside the vocabulary, no valid label on any rank, `count` or `chunk`
            below 1, or one of x and head was made in `torch.inference_mode()` and the other
            requires a gradient.
        TypeError: `count` or `chunk` is no whole number.
        CollectiveMismatch: the labels or the number of tokens differ between ranks of `tensor`, or
            the dtypes, autocast, count, chunk or requires_grad between any ranks.

    All of these errors are raised on every rank of both groups.
    """
    arguments.check_communicator(tensor, "tensor")
    arguments.check_communicator(data, "data")
    sizes: Sequence[int] = ()

    def call() -> str:
        graph = torch.is_grad_enabled()
        learns = graph and x.requires_grad, graph and head is not None and head.requires_grad
        kind = f"{x.dtype}, requires_grad={learns}, autocast={autocast_dtype(x.device)}"
        return f"next_token_loss({kind}, count={count}, chunk={chunk})"

    def same() -> str:
        return (
            f"{call()}, x {tuple(x.shape) if head is not None else 'with logits'}, labels "
            f"{tuple(labels.shape)} of CRC {crc32(labels.cpu().numpy().tobytes())} on {tensor.name}"
        )

    with agreeing_in_turn() as agree_on:
        sizes = agree_on(tensor, same, lambda: _check_loss(x, labels, tensor, count, head, chunk))
        agree_on(data, lambda: f"{call()} on {data.name}", lambda: check_labels(labels, sum(sizes)))
    size = max(labels.numel(), 1) if head is None or chunk is None else int(chunk)
    compute = partial(_cross_entropy, head=head, wide=_wide(head), tensor=tensor, sizes=sizes)
    with tensor.agreed(), data.agreed():
        valid = labels != IGNORED
        count = counted(valid, data) if count is None else int(count)
        parts = x.reshape(-1, x.shape[-1]).split(size), labels.flatten().split(size)
        losses = tiled(compute, *parts, dim=0, reads=() if head is None else (head,))
        losses = losses.view_as(labels)
        mine = torch.where(valid, losses, 0.0).sum() / count
        algorithm = "recursive_doubling" if tensor.size > 1 else "auto"
        return reduce_from_group(mine, comm=data, algorithm=algorithm)


def counted(valid: Tensor, data: Communicator) -> int:
    """Return the number of valid labels of all ranks. `valid` marks or counts those of this rank.

    Raises:
        ValueError: there is none; on every rank.
    """
    count = int(all_reduce(valid.sum(), comm=data))
    if count == 0:
        raise ValueError(f"no label of any rank is valid (all are {IGNORED}), so there is no mean.")
    return count


class _AsFrom(EagerFunction):
    """Return `value` as if it had been computed from `source`, which gets the result's gradient.

    Autograd casts the gradients of all results to the dtype of `source` before it adds them.
    """

    @staticmethod
    def forward(ctx: Any, source: Tensor, value: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


_as_from: Callable[[Tensor, Tensor], Tensor] = _AsFrom.apply


def _wide(head: Tensor | None) -> Tensor | None:
    """Return a tensor in float32 or wider that collects the gradients of `head`.

    It has the shape of `head`, and one element of memory. Its own elements are not used.
    """
    if head is None:
        return None
    return _as_from(head, head.new_zeros((), dtype=accumulation_dtype(head.dtype)).expand_as(head))


def _cross_entropy(
    x: Tensor,
    labels: Tensor,
    head: Tensor | None,
    wide: Tensor | None,
    tensor: Communicator,
    sizes: Sequence[int],
) -> Tensor:
    """Return log sum exp(logits) - logit of the label for each token, over a split vocabulary.

    The ranks of `tensor` call two all-reduces; `sizes` has the V/T of each rank, and `wide` gets
    the gradient of `head`. Other arguments are as in `next_token_loss`. The result is shaped like
    labels, and undefined for `IGNORED`.
    """
    logits = x if head is None or wide is None else F.linear(x, _as_from(wide, head.detach()))
    logits = logits.to(accumulation_dtype(logits.dtype))
    greatest = all_reduce(logits.detach().amax(-1), comm=tensor, op="max")
    shifted = logits - greatest.unsqueeze(-1)
    start = sum(sizes[: tensor.rank])
    places, here = within(labels, range(start, start + sizes[tensor.rank]))
    picked = shifted.gather(-1, places.unsqueeze(-1)).squeeze(-1)
    sums = torch.stack((shifted.exp().sum(-1), torch.where(here, picked, 0.0)))
    total, target = reduce_from_group(sums, comm=tensor).unbind()
    return total.log() - target


def check_labels(labels: Tensor, vocabulary: int) -> None:
    """Raise ValueError if a label is neither in 0 .. vocabulary - 1 nor `IGNORED`."""
    wrong = labels[(labels != IGNORED) & ((labels < 0) | (labels >= vocabulary))]
    if wrong.numel():
        raise ValueError(
            f"label {int(wrong[0])} was given; the vocabulary has 0..{vocabulary - 1}, and "
            f"{IGNORED} means none."
        )


def _check_loss(
    x: Tensor,
    labels: Tensor,
    comm: Communicator,
    count: int | None,
    head: Tensor | None,
    chunk: int | None,
) -> int:
    """Check the arguments of `next_token_loss`, and return V/T, this rank's part of the vocabulary.

    Raises:
        ShapeError, DtypeError, DeviceError, ValueError: on this rank.
    """
    arguments.check_positive(count=count, chunk=chunk)
    floats = [x] if head is None else [x, head]
    for given in (labels, *floats):
        arguments.check_tensor(given, comm)
    arguments.check_kept(*floats)
    shape = tuple(x.shape[-1:]) * 2 if head is None else tuple(head.shape)
    if x.shape[:-1] != labels.shape or len(shape) != 2 or shape[1:] != x.shape[-1:] or 0 in shape:
        raise ShapeError(
            f"x and head of shapes {[tuple(each.shape) for each in floats]} and labels "
            f"{tuple(labels.shape)} given; needed x (..., V/T > 0), or x (..., E > 0) and a head "
            f"(V/T > 0, E), and labels (...)."
        )
    if labels.dtype != torch.int64 or not x.is_floating_point() or floats[-1].dtype != x.dtype:
        raise DtypeError(
            f"x and head of {[each.dtype for each in floats]} and labels of {labels.dtype} given; "
            f"needed one floating dtype and int64."
        )
    return shape[0]
