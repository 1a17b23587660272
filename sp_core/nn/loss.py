"""The loss of the next token, over tokens and a vocabulary that are split over ranks.

    label of the token at position t = the token at position t + 1, whoever owns it
    loss = sum over the valid tokens of all ranks (log sum exp(logits) - logit of the label) /
    number of them

Shapes: B batch, S sequence, V vocabulary, P ranks that share a sequence.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn import functional as F

from sp_core import arguments
from sp_core.agreement import agreeing_in_turn
from sp_core.arguments import check_tensor
from sp_core.attention import accumulation_dtype
from sp_core.collectives.api import all_reduce, shift
from sp_core.collectives.differentiable import reduce_from_group
from sp_core.communicator import Communicator
from sp_core.errors import DtypeError, ShapeError
from sp_core.mask import Mask
from sp_core.nn.layers import recomputed
from sp_core.schemes.reach import next_owner_distances
from sp_core.sharding import Sharding, check_sharding

IGNORED = -100
"""The label of a token that does not count."""


@torch.no_grad()
def next_token_labels(
    tokens: Tensor, *, comm: Communicator, sharding: Sharding, mask: Mask | None = None
) -> Tensor:
    """Return the label of each of this rank's tokens.

    The token at the next global position, which may be on another rank.

    Args:
        tokens: int64 (B, S/P), this rank's tokens.
        comm: the ranks that share the sequence.
        sharding: who owns which tokens.
        mask: its documents end where the next token belongs to another one.

    Returns:
        int64 (B, S/P); `IGNORED` where the next position is not there or in another document.

    Communication:
        One `shift` for each distance between the owners of a position and of the next one: at most
        two for the usual layouts. Only tokens that are another rank's labels are sent, 8 bytes
        each: per row one for each segment, or all tokens if the layout is striped.

    Raises:
        ShapeError, DtypeError: tokens that the sharding does not fit, or that are not int64. On
            every rank.
    """
    arguments.check_communicator(comm)

    def call() -> str:
        if mask is not None:
            arguments.check_type("mask", mask, Mask, "Pass Mask(documents=...), or None.")
        check_shard(tokens, comm, sharding)
        return f"next_token_labels({sharding.fingerprint}, {mask}) on {comm.name}"

    comm.agree_on(call)
    labels, own = torch.full_like(tokens, IGNORED), sharding.positions(comm.rank)
    for distance in (0, *next_owner_distances(sharding)):
        before, after = ((comm.rank + sign * distance) % comm.size for sign in (-1, 1))
        sent = tokens[:, _owned(own - 1, sharding, before).to(tokens.device)]
        met = sent if distance == 0 else shift(sent, comm=comm, offset=-distance, dim=1)
        labels[:, _owned(own + 1, sharding, after).to(tokens.device)] = met
    if mask is not None and mask.documents is not None:
        ends = torch.isin(own + 1, torch.tensor(mask.documents[1:]))
        labels[:, ends.to(tokens.device)] = IGNORED
    return labels


def _owned(positions: Tensor, sharding: Sharding, rank: int) -> Tensor:
    """Return the places of the positions that `rank` owns, in ascending order of position."""
    places = torch.isin(positions, sharding.positions(rank)).nonzero().squeeze(1)
    return places[positions[places].argsort()]


def check_shard(tokens: Tensor, comm: Communicator, sharding: Sharding) -> None:
    """Refuse tokens that are not this rank's shard (B, S/P) of int64."""
    check_tensor(tokens, comm)
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
    chunk: int = 1024,
) -> Tensor:
    """Compute the mean cross-entropy over the valid tokens of all ranks.

    It counts once: call backward on every rank, then `reduce_gradients`. The logits are never
    gathered. With `head` only the logits of one chunk of tokens exist at a time; backward computes
    them again.

    Args:
        x: logits (..., V/T), this rank's part of the vocabulary for its tokens; or, with `head`,
            hidden states (..., E), whose gradient is this rank's part of a sum over `tensor`. An
            `all_gather` or `copy_to_group` before this call completes it.
        labels: int64 (...), numbers in the whole vocabulary, or `IGNORED`.
        tensor: the T ranks that split the vocabulary and have the same tokens.
        data: the ranks that have other tokens.
        count: of valid tokens by which the sum is divided, the same on every rank; that of these
            labels if not given. Losses of micro-batches with the count of all of them add up to the
            mean.
        head: (V/T, E), the weight that makes this rank's logits x @ head.T; None for logits.
        chunk: how many tokens' logits exist at a time, with `head`.

    Returns:
        The mean on every rank, a scalar in float32 or wider.

    Communication:
        Over `tensor` two all-reduces for each chunk, of one number per token and of two; over
        `data` two of one number. Backward those over `tensor` again if there are several chunks.

    Raises:
        ShapeError, DtypeError: tensors that do not fit.
        ValueError: a label outside the vocabulary, no valid label on any rank, or `chunk` below 1.

    All of these on every rank of both groups.
    """
    arguments.check_communicator(tensor, "tensor")
    arguments.check_communicator(data, "data")
    sizes: Sequence[int] = ()

    def call() -> str:
        learns = x.requires_grad, head is not None and head.requires_grad
        return f"next_token_loss({x.dtype}, requires_grad={learns}, {count=}, {chunk=})"

    def same() -> str:
        return (
            f"{call()}, x {tuple(x.shape) if head is not None else 'with logits'}, labels "
            f"{tuple(labels.shape)} with sum {int(labels.sum())} on {tensor.name}"
        )

    with agreeing_in_turn() as agree_on:
        sizes = agree_on(tensor, same, lambda: _check_loss(x, labels, tensor, count, head, chunk))
        agree_on(
            data, lambda: f"{call()} on {data.name}", lambda: _check_labels(labels, sum(sizes))
        )
    valid = labels != IGNORED
    count = int(all_reduce(valid.sum(), comm=data)) if count is None else count
    if count == 0:
        raise ValueError(
            f"none of the labels of all ranks is valid (all are {IGNORED}); the mean of nothing "
            f"is not defined."
        )
    losses = _losses(x, labels, tensor, sizes, head, chunk)
    return reduce_from_group(torch.where(valid, losses, 0.0).sum() / count, comm=data)


def _losses(
    x: Tensor,
    labels: Tensor,
    tensor: Communicator,
    sizes: Sequence[int],
    head: Tensor | None,
    chunk: int,
) -> Tensor:
    """Return the loss of each token from its logits, or from its hidden state and the head."""

    def losses(x: Tensor, labels: Tensor) -> Tensor:
        logits = x if head is None else F.linear(x, head)
        logits = logits.to(accumulation_dtype(logits.dtype))
        return _cross_entropy(logits, labels, tensor, sizes)

    if head is None or labels.numel() <= chunk:
        return losses(x, labels)
    chunks = zip(x.flatten(0, -2).split(chunk), labels.flatten().split(chunk), strict=True)
    return torch.cat([recomputed(losses, *one) for one in chunks]).view_as(labels)


def _cross_entropy(
    logits: Tensor, labels: Tensor, tensor: Communicator, sizes: Sequence[int]
) -> Tensor:
    """Return log sum exp(logits) - logit of the label for each token, over a split vocabulary."""
    greatest = all_reduce(logits.detach().amax(-1), comm=tensor, op="max")
    shifted = logits - greatest.unsqueeze(-1)
    places = labels - list(accumulate(sizes, initial=0))[tensor.rank]
    here = (places >= 0) & (places < logits.shape[-1])
    picked = shifted.gather(-1, places.where(here, 0).unsqueeze(-1)).squeeze(-1)
    sums = torch.stack((shifted.exp().sum(-1), torch.where(here, picked, 0.0)))
    total, target = reduce_from_group(sums, comm=tensor).unbind()
    return total.log() - target


def _check_labels(labels: Tensor, vocabulary: int) -> None:
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
    chunk: int,
) -> int:
    """Refuse tensors that do not fit. Return the length of this rank's part of the vocabulary."""
    arguments.check(count=count, chunk=chunk)
    if chunk is None or chunk < 1:
        raise ValueError(f"chunk={chunk} was given; pass how many tokens, 1 or more.")
    for given in (x, labels) if head is None else (x, labels, head):
        check_tensor(given, comm)
    shape = tuple(x.shape[-1:]) if head is None else tuple(head.shape)
    if x.shape[:-1] != labels.shape or not math.prod(shape):
        raise ShapeError(
            f"x {tuple(x.shape)} and labels {tuple(labels.shape)} given; needed (..., V/T > 0) or "
            f"(..., E > 0), and (...)."
        )
    if head is not None and (head.dim() != 2 or head.shape[1] != x.shape[-1]):
        raise ShapeError(f"head {shape} given for x {tuple(x.shape)}; needed (V/T > 0, E).")
    if labels.dtype != torch.int64 or not x.is_floating_point():
        raise DtypeError(
            f"x of {x.dtype} and labels of {labels.dtype} given; needed floating ones and int64."
        )
    if head is not None and head.dtype != x.dtype:
        raise DtypeError(f"head of {head.dtype} given for x of {x.dtype}; needed the same.")
    return shape[0]
