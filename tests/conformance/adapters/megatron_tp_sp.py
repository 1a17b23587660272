"""megatron-core's ColumnParallelLinear and RowParallelLinear with `sequence_parallel=True`.

Called as its quick start says: `initialize_model_parallel`, then layers with a config. As in its
MLP, `gather_output=False` and `input_is_parallel=True`. After backward its `finalize_model_grads`
sums the gradients of parameters that the layers have marked `sequence_parallel`; this one step is
called here.

Its buffers live on `torch.cuda.current_device()`, so it refuses on a CPU. With variant
"CPU stand-in" that function returns the CPU.
"""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_current_device = torch.cuda.current_device


def prepare(comm: Any, variant: str) -> None:
    """Make its process groups, with all ranks along tensor parallelism."""
    torch.cuda.current_device = (lambda: torch.device("cpu")) if variant else _current_device
    state = importlib.import_module("megatron.core.parallel_state")
    state.destroy_model_parallel()
    state.initialize_model_parallel(tensor_model_parallel_size=dist.get_world_size())


class Pair(torch.nn.Module):
    """Both layers, with this rank's part of the parameters."""

    def __init__(self, whole: dict[str, Tensor], **rest: Any) -> None:
        super().__init__()
        library = importlib.import_module("megatron.core.tensor_parallel")
        config = importlib.import_module("megatron.core").ModelParallelConfig(
            tensor_model_parallel_size=dist.get_world_size(),
            sequence_parallel=True,
            use_cpu_initialization=True,
            params_dtype=whole["up.weight"].dtype,
        )
        (inner, hidden), bias = whole["up.weight"].shape, "up.bias" in whole
        options = {"config": config, "init_method": torch.nn.init.zeros_}
        options |= {"bias": bias, "skip_bias_add": False}
        self.up = library.ColumnParallelLinear(hidden, inner, gather_output=False, **options)
        self.down = library.RowParallelLinear(inner, hidden, input_is_parallel=True, **options)
        for name, parameter in self.named_parameters():
            dim = {"up.weight": 0, "up.bias": 0, "down.weight": 1}.get(name)
            parts = [whole[name]] if dim is None else whole[name].chunk(dist.get_world_size(), dim)
            parameter.data.copy_(parts[dist.get_rank() % len(parts)])

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, S/P, E) to (B, S/P, E); the library has the sequence first."""
        inner, _ = self.up(x.transpose(0, 1).contiguous())
        return self.down(inner)[0].transpose(0, 1)

    def finish(self) -> None:
        """Sum the gradients that each rank has for its own tokens only."""
        self.ddp_config = SimpleNamespace(use_megatron_fsdp=False)
        training = importlib.import_module("megatron.core.distributed.finalize_model_grads")
        config = SimpleNamespace(sequence_parallel=True, qk_layernorm=False)
        training._allreduce_non_tensor_model_parallel_grads([self], config)
