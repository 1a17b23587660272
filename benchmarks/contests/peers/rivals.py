"""Other projects' attention over several ranks: torch's ring and DeepSpeed's Ulysses, over gloo.

Each is called the way its own project calls it, but without wrappers that would only cost it time (DTensor's around torch's ring).
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]

TORCH_RING = "torch.distributed.tensor.experimental._context_parallel._attention"
SEQ_DIM = 2  # of (B, H, S, D)
ROTATIONS = {"all-gather": "ALL_GATHER", "all-to-all": "ALL_TO_ALL"}


def start_gloo(folder: Path, rank: int, size: int) -> Any:
    """A process group over the loopback device; ranks find each other through a file."""
    if Path("/sys/class/net/lo").exists():
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # else gloo looks the host name up, which containers may not know
    dist.init_process_group("gloo", init_method=f"file://{folder / 'gloo'}", rank=rank, world_size=size)
    return dist.group.WORLD


def torch_ring(group: Any, rotation: str) -> Attend:
    """Torch's ring with head-tail load balancing; takes and returns (B, H, S/P, D) of chunks r and 2P-1-r.

    Args:
        group: a process group.
        rotation: "all-gather", torch's default, or "all-to-all".

    Source: torch 2.13, `_scaled_dot_product_ring_flash_attention` and its backward, with the CPU's kernel for CUDA's.
    """
    ring: Any = importlib.import_module(TORCH_RING)
    method = getattr(ring._RotateMethod, ROTATIONS[rotation])
    aten = torch.ops.aten
    options = {"is_causal": True, "dropout_p": 0.0}

    class Ring(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            ring._cp_options.enable_load_balance = True
            ring._cp_options.rotate_method = method
            op = aten._scaled_dot_product_flash_attention_for_cpu
            results: tuple[Tensor, ...] = ring._templated_ring_attention(group, SEQ_DIM, op, q, k, v, **options)
            ctx.save_for_backward(q, k, v, *results)
            return results[0]

        @staticmethod
        def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor, ...]:
            op = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
            q, k, v, out, lse = ctx.saved_tensors
            gradients = ring._templated_ring_attention_backward(
                group, SEQ_DIM, op, grad_out, "grad_out", q, k, v, out, lse, **options
            )
            return tuple(gradients[:3])

    return cast("Attend", Ring.apply)


def deepspeed_ulysses(group: Any) -> Attend:
    """DeepSpeed's DistributedAttention around torch's attention; takes and returns (B, S/P, H, D), tokens in order.

    Raises:
        ImportError: DeepSpeed, or something that it imports, is not installed.
    """
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    comm: Any = importlib.import_module("deepspeed.comm")
    layer: Any = importlib.import_module("deepspeed.sequence.layer")
    kernels: Any = importlib.import_module("deepspeed.ops")
    # Else its all-reduce through shared memory, not used here, is compiled now, which never ends after an interrupted build.
    kernels.__compatible_ops__["deepspeed_shm_comm"] = False
    comm.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False, dist_init_required=False)

    def local(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)

    module = layer.DistributedAttention(local, group, scatter_idx=2, gather_idx=1)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = module(q, k, v, 0)
        return out

    return attend
