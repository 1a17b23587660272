"""Attention to keys and values that a scheme brings to this rank in blocks, forward and backward.

The forward merges what the blocks give. The backward sees the blocks again, and hands the gradient
of each block to the sums of the scheme. Shapes: B batch, S sequence, H heads, K key/value heads, D
head dim, P ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sp_core.attention import (
    accumulation_dtype,
    add_sinks,
    attend,
    merge_into,
    sinks_gradient,
)
from sp_core.attention.once import Saved, differentiable_once, exact
from sp_core.schemes.heads import Group, head_groups
from sp_core.schemes.problem import Problem

Block = tuple[Tensor, Tensor]
"""Keys and values of one rank, or their gradients."""


class Visit(NamedTuple):
    """A block at this rank.

    Args:
        step: number of the visit.
        positions: of its keys.
        groups: query heads, and the key/value heads of `held` that they read.
        held: k and v (B, S_block, K, D); None if no query of this rank sees any of them.
    """

    step: int
    positions: Tensor
    groups: Sequence[Group]
    held: Block | None


Upstream = tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]
"""grad_out, q and out, (B, H, S/P, D) each, lse and its gradient."""


class Scheme(NamedTuple):
    """How blocks come to a rank, and their gradients back.

    Args:
        name: of the public function.
        visits: yields the visits of (k, v, problem, groups of heads), as many on every rank.
        gradients: returns dq (B, H, S/P, D), dk and dv (B, S/P, K, D) of (upstream, k, v, problem,
            groups of heads, whether dk and dv are wanted).
    """

    name: str
    visits: Callable[[Tensor, Tensor, Problem, Sequence[Group]], Iterator[Visit]]
    gradients: Callable[
        [Upstream, Tensor, Tensor, Problem, Sequence[Group], bool], tuple[Tensor, Tensor, Tensor]
    ]


def run(q: Tensor, k: Tensor, v: Tensor, problem: Problem, scheme: Scheme) -> tuple[Tensor, Tensor]:
    """Run a scheme on arguments that the ranks have compared."""
    apply: Any = _Blockwise.apply
    out, lse = apply(q, k, v, problem.logits.sinks, problem, scheme)
    return out, lse


class _Blockwise(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        problem: Problem,
        scheme: Scheme,
    ) -> tuple[Tensor, Tensor]:
        ctx.problem, ctx.scheme, ctx.agree = problem, scheme, problem.comm.numbered()
        ctx.set_materialize_grads(False)
        with exact(q):
            out, lse = _attend(q.transpose(1, 2), k, v, problem, scheme)
            add_sinks(out.transpose(1, 2), lse, sinks)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse, sinks)
        return out, lse

    @staticmethod
    @differentiable_once
    def backward(
        ctx: Any, saved: Saved, grad_out: Tensor | None, grad_lse: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        ctx.agree(f"the backward of {ctx.scheme.name}")
        q, k, v, out, lse, sinks = saved
        grad_out = torch.zeros_like(out) if grad_out is None else grad_out
        upstream = (grad_out.transpose(1, 2), q.transpose(1, 2), out.transpose(1, 2), lse, grad_lse)
        groups = head_groups(q.shape[2], k.shape[2], ctx.problem.comm)
        with_kv = any(ctx.needs_input_grad[1:3])
        dq, dk, dv = ctx.scheme.gradients(upstream, k, v, ctx.problem, groups, with_kv)
        do, _, o, *_ = upstream
        dsinks = None if sinks is None else sinks_gradient(do, o, lse, grad_lse, sinks)
        return dq.transpose(1, 2).to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dsinks, None, None


def _attend(
    q: Tensor, k: Tensor, v: Tensor, problem: Problem, scheme: Scheme
) -> tuple[Tensor, Tensor]:
    """Run the forward: q (B, H, S/P, D) to out (B, S/P, H, D) and lse (B, H, S/P), wide."""
    dtype, poll = accumulation_dtype(q.dtype), problem.comm.poll
    results: dict[int, tuple[Tensor, Tensor]] = {}
    for visit in scheme.visits(k, v, problem, head_groups(q.shape[1], k.shape[2], problem.comm)):
        i, j = (slice(0),) * 2 if visit.held is None else problem.part(visit.positions)
        for heads, kv in visit.groups if visit.held is not None else ():
            assert visit.held is not None
            among = problem.against(visit.positions, heads, (i, j))
            given = (q[:, heads, i], *heads_first(visit.held, kv, j))
            part = attend(*given, **among, out_dtype=dtype, between=poll)
            if heads.start not in results and part[1].shape[2] == q.shape[2]:
                results[heads.start] = part
            else:
                out, lse = results.setdefault(heads.start, _nothing(q[:, heads], dtype))
                merge_into(out[:, :, i], lse[:, :, i], *part)
            del given, part
            poll()
        del visit
    outs, lses = zip(*(results or {0: _nothing(q, dtype)}).values(), strict=True)
    return joined([out.transpose(1, 2) for out in outs], 2), joined(lses, 1)


def _nothing(q: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return out and lse of queries (B, H, S, D) that see no key."""
    lse = q.new_full(q.shape[:3], -torch.inf, dtype=dtype)
    return torch.zeros_like(q, dtype=dtype), lse


def joined(parts: Sequence[Tensor], dim: int) -> Tensor:
    """Join groups of heads. A single one is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim)


def heads_first(block: Block, heads: slice, tokens: slice = slice(None)) -> Block:
    """Return some heads of k and v as (B, K, S_block, D), from a block (B, S_block, K, D)."""
    k, v = (x[:, tokens, heads].transpose(1, 2) for x in block)
    return k, v
