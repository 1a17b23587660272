"""torch's ring, `_templated_ring_attention`, with the flash kernel that torch has for the CPU.

Called as `_scaled_dot_product_ring_flash_attention` and its backward call it in torch 2.13, with
the CPU's kernel for CUDA's. The zigzag layout is its load balancing, which is on by default;
contiguous is without ("Load balancing requires `is_causal=True`").
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

SEQ_DIM = 2


def prepare(comm: Any, variant: str) -> None:
    """The default process group is all that it needs."""


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    layout: str,
    causal: bool,
    softmax_scale: float | None,
    **rest: Any,
) -> Tensor:
    """(B, S/P, H, D) as torch's (B, H, S/P, D), through an autograd function as torch's own dispatcher builds one."""
    options = {"is_causal": causal, "dropout_p": 0.0, "scale": softmax_scale}
    heads_first = (x.transpose(1, 2) for x in (q, k, v))
    return _Ring.apply(*heads_first, layout == "zigzag", options).transpose(1, 2)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, balance: bool, options: dict[str, Any]
    ) -> Tensor:
        ring = importlib.import_module(
            "torch.distributed.tensor.experimental._context_parallel._attention"
        )
        ring._cp_options.enable_load_balance = balance
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, lse = ring._templated_ring_attention(
            dist.group.WORLD, SEQ_DIM, kernel, q, k, v, **options
        )
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.options, ctx.balance = options, balance
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        ring = importlib.import_module(
            "torch.distributed.tensor.experimental._context_parallel._attention"
        )
        ring._cp_options.enable_load_balance = ctx.balance
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
        q, k, v, out, lse = ctx.saved_tensors
        found = ring._templated_ring_attention_backward(
            dist.group.WORLD, SEQ_DIM, kernel, grad, "grad_out", q, k, v, out, lse, **ctx.options
        )
        return (*found[:3], None, None)
