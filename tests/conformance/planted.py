"""Faults planted in the libraries themselves: the column must notice that its library is broken.

Each replaces one function of an installed library on every rank, for one capability that the
library passes otherwise.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

Function = Callable[..., Any]


@dataclass(frozen=True)
class Fault:
    """A function of a library that does something wrong.

    Args:
        library: name of the column.
        capability: that notices it.
        what: is wrong.
        module: of the library.
        function: name in that module, with dots for a method.
        broken: makes the wrong function out of the right one.
    """

    library: str
    capability: str
    what: str
    module: str
    function: str
    broken: Callable[[Function], Function]

    def plant(self) -> None:
        """Put it in place, for the rest of this process."""
        owner, _, name = f".{self.function}".rpartition(".")
        holder = importlib.import_module(self.module)
        for part in filter(None, owner.split(".")):
            holder = getattr(holder, part)
        setattr(holder, name, self.broken(getattr(holder, name)))


def _no_mask(real: Function) -> Function:
    return lambda *args, **options: real(*args, **{**options, "is_causal": False})


def _no_exchange(real: Function) -> Function:
    return lambda group, blocks: blocks


def _half_a_gradient(real: Function) -> Function:
    def combined(self: Any, *qkv: Any) -> tuple[Any, Any, Any]:
        q, k, v = real(self, *qkv)
        return q, (k + k.detach()) / 2, v

    return combined


def _shifted(real: Function) -> Function:
    return lambda self, context: real(self, context.roll(1, 0))


def _ends_at_once(real: Function) -> Function:
    @contextmanager
    def context(self: Any, **options: Any) -> Any:
        with real(self, **options):
            pass
        yield

    return context


def _own_part(real: Function) -> Function:
    return lambda x, group: x.chunk(group.size())[group.rank()]


def _own_part_into(real: Function) -> Function:
    def scattered(out: Any, x: Any, group: Any, async_op: bool = False) -> Any:
        out.copy_(x.chunk(group.size())[group.rank()])
        return SimpleNamespace(wait=lambda: None)

    return scattered


def _nothing(real: Function) -> Function:
    return lambda *args, **options: None


RING = "torch.distributed.tensor.experimental._context_parallel._attention"
ALST = "deepspeed.runtime.sequence_parallel.ulysses_sp"
MEGATRON, MEGATRON_LAYERS = "megatron-core CPU stand-in", "megatron.core.tensor_parallel.layers"
MEGATRON_SUMS = "megatron.core.distributed.finalize_model_grads"
FAULTS = (
    Fault(
        "torch ring", "contiguous", "the mask is lost", RING, "_templated_ring_attention", _no_mask
    ),
    Fault(
        *("ALST Ulysses sdpa", "causal", "nothing is exchanged", ALST),
        *("_dim_zero_all_to_all", _no_exchange),
    ),
    Fault(
        *("ALST Ulysses flash_attention_2", "backward", "k gets half its gradient", ALST),
        *("UlyssesSPAttentionHF._combine_local_sequences", _half_a_gradient),
    ),
    Fault(
        *("ALST Ulysses flex_attention", "causal", "each token gets another's output", ALST),
        *("UlyssesSPAttentionHF._partition_global_sequence", _shifted),
    ),
    Fault(
        *("accelerate CPU stand-in", "full", "the context ends before attention", "accelerate"),
        *("Accelerator.maybe_context_parallel", _ends_at_once),
    ),
    Fault(
        *(MEGATRON, "forward", "outputs are not summed over ranks", MEGATRON_LAYERS),
        *("reduce_scatter_to_sequence_parallel_region", _own_part),
    ),
    Fault(
        *(MEGATRON, "backward", "input gradients are not summed over ranks", MEGATRON_LAYERS),
        *("dist_reduce_scatter_func", _own_part_into),
    ),
    Fault(
        *(MEGATRON, "bias", "bias gradients are not summed over ranks", MEGATRON_SUMS),
        *("_allreduce_non_tensor_model_parallel_grads", _nothing),
    ),
)
"""Every fault. Columns that refuse everything on a CPU have none."""
