"""One attention problem: the same numbers on every rank, each contestant's part of them, and the result of one process.

Shapes: B batch (1), S sequence, H heads, D head dim.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.contests.peers.setting import Setting

NAMES = ("out", "dq", "dk", "dv")
LIMIT = 2e-5
"""Largest error over largest element that passes; correct float32 results differ by less than 3e-6, a mask off by one by 1e-1."""


@dataclass(frozen=True)
class Part:
    """The tokens of one contestant on one rank: q, k, v and the upstream gradient, and where they are in the sequence."""

    q: Tensor
    k: Tensor
    v: Tensor
    grad: Tensor
    positions: Tensor
    heads_first: bool


def draw(setting: Setting, seq: int) -> tuple[Tensor, ...]:
    """q, k, v and the upstream gradient of the whole sequence, float32 (1, S, H, D) each, normally distributed."""
    generator = torch.Generator().manual_seed(setting.seed * 1_000_003 + seq)
    return tuple(torch.randn(1, seq, setting.heads, setting.head_dim, generator=generator) for _ in NAMES)


def part(whole: Sequence[Tensor], positions: Tensor, *, heads_first: bool) -> Part:
    """Some tokens of the whole, contiguous as (1, S, H, D) or, `heads_first`, as (1, H, S, D)."""
    mine = [x[:, positions] for x in whole]
    q, k, v, grad = ((x.transpose(1, 2) if heads_first else x).contiguous() for x in mine)
    return Part(q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), grad, positions, heads_first)


def alone(whole: Sequence[Tensor], *, causal: bool) -> tuple[Tensor, ...]:
    """Out, dq, dk and dv of one process, (1, S, H, D) each."""
    mine = part(whole, torch.arange(whole[0].shape[1]), heads_first=True)
    out = F.scaled_dot_product_attention(mine.q, mine.k, mine.v, is_causal=causal)
    gradients = torch.autograd.grad(out, (mine.q, mine.k, mine.v), mine.grad)
    return tuple(x.detach().transpose(1, 2) for x in (out, *gradients))


def errors(results: Sequence[Tensor], mine: Part, expected: Sequence[Tensor]) -> list[float]:
    """Largest |result - expected| over largest |expected|, of out, dq, dk and dv; infinite where a result is not finite."""
    found = []
    for x, whole in zip(results, expected, strict=True):
        x = x.detach().transpose(1, 2) if mine.heads_first else x.detach()
        difference = float((x - whole[:, mine.positions]).abs().max() / whole.abs().max())
        found.append(difference if math.isfinite(difference) else math.inf)
    return found
