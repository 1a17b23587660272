"""One attention problem put to one scheme: outputs and all gradients of every rank against the dense float64 reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sp_core.mask import plan_blocks
from sp_core.testing import reference
from sp_core.testing.reference import AttentionReference, GradientReference
from sp_core.testing.remarks import record_ratio
from sp_core.testing.strategies import AttentionProblem
from sp_core.testing.tolerance import bound, check_close

Scheme = Callable[..., Any]
Part = Callable[..., tuple[Tensor, ...]]


def check_attention(name: str, scheme: Scheme, problem: AttentionProblem, rank: int, size: int, device: torch.device) -> None:
    """Run a scheme on this rank's shards, and compare its shards of the results with the reference.

    Args:
        name: of the scheme, for messages.
        scheme: called with q, k, v of this rank and `sharding`, `kv_sharding`, `mask`, `softmax_scale`, `return_lse=True`.
        problem: what to compute.
        rank, size: of the ranks that share the sequence.
        device: where the scheme wants its tensors.

    Raises:
        AssertionError: naming the result and its worst element.
    """
    shards = Shards(problem, rank, size, device)
    out, lse = shards.run(scheme)
    expected = shards.reference()
    partials = shards.partial_results()
    dtype = problem.torch_dtype

    def compare(what: str, actual: Tensor, part: Part, want: Tensor, scale: Tensor, growth: float) -> None:
        expected, scale = part(want, scale)
        ratio = check_close(f"{name} {what}", actual.detach().cpu(), expected, bound(scale, dtype, growth, partials))
        record_ratio(f"{name} {what}", ratio)

    compare("out", out, shards.queries, expected.out, expected.out_scale, expected.growth)
    compare("lse", lse, shards.lses, expected.lse, expected.lse_scale, expected.growth)
    grads, want = shards.gradients(out, lse)
    scales = {"dq": want.dq_scale, "dk": want.dk_scale, "dv": want.dv_scale}
    for what, grad in grads.items():
        part = shards.queries if what == "dq" else shards.keys
        compare(what, grad, part, getattr(want, what), scales[what], want.growth)


class Shards:
    """A problem as one rank sees it."""

    def __init__(self, problem: AttentionProblem, rank: int, size: int, device: torch.device) -> None:
        self.problem = problem
        self.rank = rank
        self.sharding = problem.sharding(size)
        self.kv_sharding = problem.kv_sharding(size)
        self.whole = problem.tensors()
        q, k, v = self.whole
        parts = (self.queries(q)[0], self.keys(k)[0], self.keys(v)[0])
        self.local = [self._leaf(x, needs, device) for x, needs in zip(parts, problem.needs_grad, strict=True)]

    def queries(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """This rank's part of tensors (B, S, ...) over all queries."""
        return tuple(self.sharding.shard(x, self.rank, 1) for x in tensors)

    def keys(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """This rank's part of tensors (B, S, ...) over all keys."""
        return tuple(self.kv_sharding.shard(x, self.rank, 1) for x in tensors)

    def lses(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """This rank's part of tensors (B, H, S)."""
        return tuple(self.sharding.shard(x, self.rank, 2) for x in tensors)

    def run(self, scheme: Scheme) -> tuple[Tensor, Tensor]:
        """The scheme's out and lse on this rank."""
        problem = self.problem
        kv_sharding = None if self.kv_sharding == self.sharding else self.kv_sharding
        inputs = [x.transpose(1, 2).contiguous().transpose(1, 2) if problem.strided else x for x in self.local]
        out, lse = scheme(
            *inputs,
            sharding=self.sharding,
            kv_sharding=kv_sharding,
            mask=problem.mask,
            softmax_scale=problem.softmax_scale,
            return_lse=True,
        )
        return out, lse

    def reference(self) -> AttentionReference:
        """The dense result of the whole sequence."""
        return reference.attention(*self.whole, **self._definition())

    def gradients(self, out: Tensor, lse: Tensor) -> tuple[dict[str, Tensor], GradientReference]:
        """This rank's gradients by name, and the dense ones of the whole sequence."""
        problem = self.problem
        grad_out, grad_lse = problem.upstream_gradient(), problem.upstream_lse_gradient()
        want = reference.attention_grads(*self.whole, grad_out, grad_lse=grad_lse, **self._definition())
        needing = {f"d{letter}": x for letter, x in zip("qkv", self.local, strict=True) if x.requires_grad}
        if not needing:
            return {}, want
        roots, upstream = [out], [self.queries(grad_out)[0].to(out.device)]
        if grad_lse is not None:
            roots.append(lse)
            upstream.append(self.lses(grad_lse)[0].to(lse))
        grads = torch.autograd.grad(roots, list(needing.values()), upstream)
        return dict(zip(needing, grads, strict=True)), want

    def partial_results(self) -> int:
        """Upper bound of the partial results that kernels round on the way to one element, on any rank."""
        ranks = range(self.sharding.size)
        blocks = [
            plan_blocks(self.sharding.positions(i), self.kv_sharding.positions(j), self.problem.mask) for i in ranks for j in ranks
        ]
        return 1 + sum(map(len, blocks))

    def _definition(self) -> dict[str, Any]:
        mask = self.problem.mask
        return {
            "causal": mask.causal,
            "window": mask.window,
            "documents": mask.documents,
            "kv_documents": mask.kv_documents,
            "softmax_scale": self.problem.softmax_scale,
        }

    def _leaf(self, x: Tensor, needs_grad: bool, device: torch.device) -> Tensor:
        return x.clone().to(device).requires_grad_(needs_grad)
