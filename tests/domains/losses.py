"""Declare the domain of the next token's loss, with tokens and vocabulary split over a mesh."""

from bisect import bisect_right
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from random import Random

import torch
from oracle.attention_check import ascending
from oracle.collective_cases import MEMORIES, in_memory
from oracle.strategies import DTYPES
from torch import Tensor
from torch.nn import functional as F

import sp_core as sp
from domains import blocks, layers
from domains.declared import (
    Call,
    Parts,
    Values,
    leaf,
    near,
    normal,
    same,
    spans,
    values,
    whole,
)
from domains.layers import TOKENS
from domains.situations import SITUATIONS, on_group, on_mesh
from sp_core.attention import accumulation_dtype
from sp_core.nn.loss import IGNORED, check_shard, next_token_labels, next_token_loss
from sp_core.testing import device
from sp_core.testing.tolerance import bound, unit_roundoff

Scaled = tuple[Tensor, Tensor]
"""A value in float64, and its scale: the sum of the absolute terms of each element."""


def expected(logits: Tensor, labels: Tensor, count: int | None) -> tuple[Scaled, Scaled]:
    """Return loss and gradient of logits (..., V) and labels (...); `count` divides the sum."""
    x, valid = logits.double(), labels != IGNORED
    target = F.one_hot(labels.where(valid, 0), x.shape[-1]).double()
    weight = valid.double() / (valid.sum() if count is None else count)
    shifted = x - x.amax(-1, keepdim=True)
    total, picked = shifted.exp().sum(-1), (shifted * target).sum(-1)
    p, w = x.softmax(-1), weight.unsqueeze(-1)
    loss = (total.log() - picked) * weight
    loss_scale = (1 + total.log() + picked.abs()) * weight
    # below it neither a p nor a gradient has relative precision
    tiny = torch.finfo(logits.dtype).tiny
    grad_scale = (p + target + tiny / unit_roundoff(logits.dtype)) * w + tiny
    return (loss.sum(), loss_scale.sum()), ((p - target) * w, grad_scale)


# next_token_loss


def parts_of(chance: Random, drawn: Values, *, uneven: bool) -> tuple[int, ...]:
    """Return how many vocabulary entries each rank of the tensor axis has, at least 1."""
    size, vocab = drawn["tensor.size"], drawn["logits.vocab"] + drawn["tensor.size"]
    if not uneven:
        return tuple(len(part) for part in torch.arange(vocab).tensor_split(size))
    ends = (0, *sorted(chance.sample(range(1, vocab), size - 1)), vocab)
    return tuple(stop - start for start, stop in pairwise(ends))


def shapes(chance: Random, drawn: Values, *, dims: int, empty: bool) -> list[tuple[int, ...]]:
    """Return the shape of each data rank's labels."""
    found = [tuple(chance.randint(1, 4) for _ in range(dims)) for _ in range(drawn["data.size"])]
    if empty and len(found) > 1:
        found[chance.randrange(len(found))] = (0,) * dims
    return found


def labels_of(drawn: Values) -> list[Tensor]:
    """Return the labels of each data rank; at least one is valid."""
    generator = torch.Generator().manual_seed(drawn["seed"] + 1)
    vocab = sum(drawn["logits.parts"])
    found = [torch.randint(0, vocab, shape, generator=generator) for shape in drawn["labels.shape"]]
    hidden = [torch.rand(x.shape, generator=generator) < drawn["labels.ignored"] for x in found]
    first = next(n for n, x in enumerate(found) if x.numel())
    hidden[first].view(-1)[:1] = False
    return [x.masked_fill(hide, IGNORED) for x, hide in zip(found, hidden, strict=True)]


def logits_of(drawn: Values) -> list[Tensor]:
    """Return the logits of each data rank over the whole vocabulary."""
    vocab, dtype = sum(drawn["logits.parts"]), getattr(torch, drawn["logits.dtype"])
    found = [
        normal(drawn["seed"] + 10 + rank, (*shape, vocab), "float64") * drawn["logits.magnitude"]
        for rank, shape in enumerate(drawn["labels.shape"])
    ]
    if drawn["logits.memory"] == "expanded":
        found = [x[..., :1].expand(x.shape) for x in found]
    return [x.to(dtype) for x in found]


def axes_of(drawn: Values) -> dict[str, int]:
    """Return the sizes of three axes in any order; along the third one the tensors differ."""
    lengths = {"third": drawn["(third)"]} | {x: drawn[f"{x}.size"] for x in ("data", "tensor")}
    return dict(sorted(lengths.items(), reverse=drawn["(order)"] == "reversed"))


def losses(mesh: sp.Mesh, drawn: Values) -> Call:
    """Return the call of `next_token_loss`."""
    drawn = drawn | {"seed": drawn["seed"] + 100 * mesh["third"].rank}
    data, tensor = mesh["data"], mesh["tensor"]
    logits, head = logits_of(drawn)[data.rank], None
    mine = logits.split(drawn["logits.parts"], -1)[tensor.rank]
    if drawn["head"] == "given":
        mine, head = through_head(drawn, logits, tensor.rank)
    x = leaf(mine, drawn["logits.memory"], learns=drawn["logits.gradient"])
    labels = labels_of(drawn)[data.rank].unsqueeze(-1).repeat_interleave(2, -1)[..., 0]
    labels = labels if drawn["labels.memory"] == "every second" else labels.contiguous()
    given = {
        "x": x,
        "labels": labels.to(device()),
        "tensor": tensor,
        "data": data,
        "head": head,
        "count": drawn["count"],
        "chunk": drawn["chunk"],
    }
    return Call(next_token_loss, given, partial(judge_loss, drawn, data, tensor, x, head))


def through_head(drawn: Values, logits: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Return hidden states and this rank's head, whose product is exactly its part of the logits.

    The whole head is a permutation matrix times 2.
    """
    vocab = logits.shape[-1]
    order = torch.randperm(vocab, generator=torch.Generator().manual_seed(drawn["seed"] % 2**40))
    head = torch.zeros(vocab, vocab, dtype=logits.dtype)
    head[torch.arange(vocab), order] = 2.0
    own = head.split(drawn["logits.parts"])[rank]
    return (logits / 2) @ head / 2, own.clone().to(device()).requires_grad_(
        drawn["logits.gradient"]
    )


def judge_loss(
    drawn: Values,
    data: sp.Communicator,
    tensor: sp.Communicator,
    x: Tensor,
    head: Tensor | None,
    loss: Tensor,
) -> None:
    """Compare a loss and its gradients with those of all tokens over the whole vocabulary."""
    logits, labels = logits_of(drawn), labels_of(drawn)
    vocab = sum(drawn["logits.parts"])
    (wanted, scale), gradient = expected(
        torch.cat([t.reshape(-1, vocab) for t in logits]),
        torch.cat([t.reshape(-1) for t in labels]),
        drawn["count"],
    )
    growth = vocab + max(float(t.amax() - t.amin()) for t in logits if t.numel())
    assert loss.dtype == accumulation_dtype(x.dtype)
    assert loss.requires_grad == drawn["logits.gradient"]
    near("loss", loss, wanted, bound(scale, loss.dtype, growth))
    with torch.no_grad():
        given = {name: drawn[name] for name in ("count", "chunk")} | {"head": head}
        again = next_token_loss(
            x, labels[data.rank].to(device()), tensor=tensor, data=data, **given
        )
    same(again, loss.detach())
    if loss.requires_grad:
        first = sum(t.numel() for t in labels[: data.rank])
        rows = slice(first, first + labels[data.rank].numel())
        own = [
            t[rows].split(drawn["logits.parts"], -1)[tensor.rank] * drawn["(upstream)"]
            for t in gradient
        ]
        judge_gradients(drawn, x, head, loss, own, growth)


def judge_gradients(
    drawn: Values, x: Tensor, head: Tensor | None, loss: Tensor, own: list[Tensor], growth: float
) -> None:
    """Compare gradients with `own`, the gradient of this rank's logits and its scale.

    Products of bfloat16 take a factor below the smallest normal number as 0 (AVX512-BF16).
    """
    upstream = torch.tensor(drawn["(upstream)"], dtype=loss.dtype, device=loss.device)
    grads = torch.autograd.grad(loss, [x] if head is None else [x, head], upstream)
    (exact, scale), wanted = own, [[*own, torch.zeros_like(own[1])]]
    if head is not None:
        states = x.detach().cpu().double().reshape(-1, x.shape[-1])
        weight = head.detach().cpu().double()
        lost = (scale > 0).double() * torch.finfo(x.dtype).smallest_normal
        wanted = [
            [exact @ weight, scale @ weight, lost @ weight],
            [exact.T @ states, scale.T @ states.abs(), lost.T @ states.abs()],
        ]
    for grad, (value, size, zeroed) in zip(grads, wanted, strict=True):
        allowed = bound(size.reshape(grad.shape), x.dtype, growth + len(exact))
        allowed += zeroed.reshape(grad.shape)
        near("gradient of the loss", grad, value.reshape(grad.shape), allowed)


# next_token_labels


def labelled(tokens: Tensor, positions: Sequence[int], documents: Sequence[int] | None) -> Tensor:
    """Return each token's label: the token at the next position of its document."""
    labels = torch.full_like(tokens, IGNORED)
    place = {position: n for n, position in enumerate(positions)}
    for position, n in place.items():
        together = documents is None or bisect_right(documents, position) == bisect_right(
            documents, position + 1
        )
        if position + 1 in place and together:
            labels[:, n] = tokens[:, place[position + 1]]
    return labels


def labels(name: str, group: sp.Communicator, drawn: Values) -> Call:
    """Return the call of `next_token_labels` or `check_shard`."""
    sharding, shape = layers.sharding_of(drawn, group.size), (drawn["x.batch"], drawn["x.seq_len"])
    tokens = whole(drawn["seed"], shape, high=2**40)
    tokens = tokens[:, :1].expand(shape) if drawn["tokens.memory"] == "expanded" else tokens
    mine = in_memory(sharding.shard(tokens.to(device()), group.rank, 1), drawn["tokens.memory"])
    given = {"tokens": mine, "comm": group, "sharding": sharding}
    if name == "check_shard":
        return Call(check_shard, given, partial(same, wanted=None))
    mask = None if drawn["mask"] == "none" else sp.Mask(**blocks.mask_of(drawn))
    wanted = labelled(tokens, ascending(sharding), None if mask is None else mask.documents)
    part = sharding.shard(wanted, group.rank, 1)
    return Call(next_token_labels, {**given, "mask": mask}, partial(same, wanted=part))


LABELS: dict[str, Parts] = {
    name: TOKENS[name] for name in ("x.seq_len", "x.batch", "sharding.layout", "sharding.start")
} | {"tokens.memory": values(*MEMORIES)}
LOSS: dict[str, Parts] = {
    "data.size": spans((2, 2), (1, 1), (3, 4)),
    "tensor.size": spans((1, 1), (2, 2), (3, 4)),
    "(third)": {
        "1": lambda c, v: 1,
        "2": lambda c, v: 2 if v["data.size"] * v["tensor.size"] <= 4 else 1,
    },
    "(order)": values("sorted", "reversed"),
    "logits.vocab": spans((4, 16), (0, 0), (100, 300)),
    "logits.parts": {
        "even": partial(parts_of, uneven=False),
        "uneven": partial(parts_of, uneven=True),
    },
    "logits.dtype": values(*DTYPES),
    "logits.memory": values(*MEMORIES),
    "logits.magnitude": values(1.0, 0.0, 30.0, 1000.0),
    "logits.gradient": values(True, False),
    "labels.shape": {
        "2 dims": partial(shapes, dims=2, empty=False),
        "1 dim": partial(shapes, dims=1, empty=False),
        "3 dims": partial(shapes, dims=3, empty=False),
        "none on a rank": partial(shapes, dims=2, empty=True),
        "a number": lambda c, v: [()] * v["data.size"],
    },
    "labels.memory": values("contiguous", "every second"),
    "labels.ignored": values(0.3, 0.0, 1.0),
    "count": {"of these labels": lambda c, v: None} | spans((1, 1), (50, 10**6)),
    "head": values("none", "given"),
    "chunk": spans((1024, 1024), (1, 1), (2, 5), (2**60, 2**62)) | values(None),
    "(upstream)": values(1.0, 0.5),
}
SUBJECTS = [
    on_mesh(
        "loss.next_token_loss",
        LOSS | SITUATIONS,
        axes_of,
        losses,
        allowed=("count=far out", "chunk=far out", "chunk=None"),
        outside={"x": "logits, or with a head hidden states"},
        together=({"logits.dtype": "bfloat16"}, {"logits.dtype": "float16"}),
    ),
    on_group(
        "loss.next_token_labels",
        LABELS | {"mask": values("given", "none")} | blocks.MASK,
        partial(labels, "next_token_labels"),
    ),
    on_group("loss.check_shard", LABELS, partial(labels, "check_shard"), alone=True),
]
