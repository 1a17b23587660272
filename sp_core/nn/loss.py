"""The loss of the next token, over tokens and a vocabulary that are split over ranks.

    label of the token at position t = the token at position t + 1, whoever owns it
    loss = sum over the valid tokens of all ranks (log sum exp(logits) - logit of the label) /
    number of them

Shapes: B batch, S sequence, V vocabulary, P ranks that share a sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from sp_core import arguments
from sp_core.agreement import agreeing_in_turn
from sp_core.arguments import check_tensor
from sp_core.attention import accumulation_dtype
from sp_core.collectives.api import all_gather, all_reduce
from sp_core.collectives.differentiable import reduce_from_group
from sp_core.communicator import Communicator
from sp_core.errors import DtypeError, ShapeError
from sp_core.mask import Mask
from sp_core.sharding import Sharding

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
        One all-gather of the tokens: 8 (P-1) B S/P bytes sent per rank.

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
    whole = sharding.restore(all_gather(tokens, comm=comm, dim=1, sizes=sharding.lengths), 1)
    positions = torch.cat([sharding.positions(rank) for rank in range(sharding.size)]).sort().values
    follows = positions[1:] == positions[:-1] + 1
    if mask is not None and mask.documents is not None:
        ends = torch.tensor(mask.documents[1:])
        follows &= ~torch.isin(positions[1:], ends)
    labels = torch.full_like(whole, IGNORED)
    labels[:, :-1] = whole[:, 1:].masked_fill(~follows.to(whole.device), IGNORED)
    return sharding.shard(labels, comm.rank, 1)


def check_shard(tokens: Tensor, comm: Communicator, sharding: Sharding) -> None:
    """Refuse tokens that are not this rank's shard (B, S/P) of int64."""
    check_tensor(tokens, comm)
    arguments.check_type(
        "sharding", sharding, Sharding, "Make one, such as Sharding.contiguous(seq_len, size)."
    )
    if tokens.dtype != torch.int64:
        raise DtypeError(
            f"tokens have dtype {tokens.dtype}, needed int64. Convert them with tokens.long()."
        )
    if (
        sharding.size != comm.size
        or tokens.dim() != 2
        or tokens.shape[1] != sharding.local_len(comm.rank)
    ):
        raise ShapeError(
            f"tokens have shape {tuple(tokens.shape)} on rank {comm.rank} of {comm.name}, and the "
            f"sharding is for {sharding.size} "
            f"ranks with shards of {sharding.lengths}; needed (batch, own shard)."
        )


def next_token_loss(
    logits: Tensor,
    labels: Tensor,
    *,
    tensor: Communicator,
    data: Communicator,
    count: int | None = None,
) -> Tensor:
    """Compute the mean cross-entropy over the valid tokens of all ranks.

    It counts once: call backward on every rank, then `reduce_gradients`. The logits are never
    gathered.

    Args:
        logits: (..., V/T), this rank's part of the vocabulary for its tokens.
        labels: int64 (...), numbers in the whole vocabulary, or `IGNORED`.
        tensor: the T ranks that split the vocabulary and have the same tokens.
        data: the ranks that have other tokens.
        count: of valid tokens by which the sum is divided, the same on every rank; that of these
            labels if not given. Losses of micro-batches with the count of all of them add up to the
            mean.

    Returns:
        The mean on every rank, a scalar in float32 or wider.

    Communication:
        Over `tensor` two all-reduces, of one number per token and of two; over `data` two of one
        number. None backward.

    Raises:
        ShapeError, DtypeError: logits and labels that do not fit.
        ValueError: a label outside the vocabulary, or no valid label on any rank.

    All of these on every rank of both groups.
    """
    arguments.check_communicator(tensor, "tensor")
    arguments.check_communicator(data, "data")
    sizes: Sequence[int] = ()

    def call() -> str:
        return f"next_token_loss({logits.dtype}, requires_grad={logits.requires_grad}, {count=})"

    def same() -> str:
        return (
            f"{call()}, labels {tuple(labels.shape)} with sum {int(labels.sum())} on {tensor.name}"
        )

    with agreeing_in_turn() as agree_on:
        sizes = agree_on(tensor, same, lambda: _check_loss(logits, labels, tensor, count))
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
    losses = _cross_entropy(logits.to(accumulation_dtype(logits.dtype)), labels, tensor, sizes)
    return reduce_from_group(torch.where(valid, losses, 0.0).sum() / count, comm=data)


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


def _check_loss(logits: Tensor, labels: Tensor, comm: Communicator, count: int | None) -> int:
    """Refuse logits and labels that do not fit.

    Return the length of this rank's part of the vocabulary.
    """
    arguments.check(count=count)
    for x in (logits, labels):
        check_tensor(x, comm)
    if logits.shape[:-1] != labels.shape or not logits.shape[-1]:
        raise ShapeError(
            f"logits {tuple(logits.shape)} and labels {tuple(labels.shape)} given; needed (..., "
            f"V/T > 0) and (...)."
        )
    if labels.dtype != torch.int64 or not logits.is_floating_point():
        raise DtypeError(
            f"logits of {logits.dtype} and labels of {labels.dtype} given; needed floating ones "
            f"and int64."
        )
    return logits.shape[-1]
