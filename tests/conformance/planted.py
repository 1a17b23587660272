"""Plant faults in the libraries themselves: the verdict must then be that the library fails.

Each fault replaces one function of an installed library on every rank. It is tried with one
capability that the library passes without the fault.
"""

import pkgutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any


@dataclass(frozen=True)
class Fault:
    """A function of a library that does something wrong.

    Args:
        library: the name of the library's column.
        capability: the capability that must find the fault.
        what: a description of the fault.
        function: the replaced function's full name, with its module and class.
        broken: the wrong function. Its first argument is the right one.
    """

    library: str
    capability: str
    what: str
    function: str
    broken: Callable[..., Any]

    def plant(self) -> None:
        """Replace the function for the rest of this process."""
        owner, _, name = self.function.rpartition(".")
        holder = pkgutil.resolve_name(owner)
        real = getattr(holder, name)
        setattr(holder, name, lambda *args, **options: self.broken(real, *args, **options))


def _no_mask(real: Any, *args: Any, **options: Any) -> Any:
    return real(*args, **{**options, "is_causal": False})


def _no_exchange(real: Any, group: Any, blocks: Any) -> Any:
    return blocks


def _half_a_gradient(real: Any, self: Any, *qkv: Any) -> tuple[Any, Any, Any]:
    q, k, v = real(self, *qkv)
    return q, (k + k.detach()) / 2, v


def _shifted(real: Any, self: Any, context: Any) -> Any:
    return real(self, context.roll(1, 0))


@contextmanager
def _ends_at_once(real: Any, self: Any, **options: Any) -> Iterator[None]:
    with real(self, **options):
        pass
    yield


def _own_part(real: Any, x: Any, group: Any) -> Any:
    return x.chunk(group.size())[group.rank()]


def _own_part_into(real: Any, out: Any, x: Any, group: Any, async_op: bool = False) -> Any:
    out.copy_(x.chunk(group.size())[group.rank()])
    return SimpleNamespace(wait=lambda: None)


def _nothing(real: Any, *args: Any, **options: Any) -> None:
    """Do nothing, in place of the library's function `real`."""


RING = "torch.distributed.tensor.experimental._context_parallel._attention"
ALST = "deepspeed.runtime.sequence_parallel.ulysses_sp"
MEGATRON, MEGATRON_LAYERS = "megatron-core CPU stand-in", "megatron.core.tensor_parallel.layers"
FAULTS = (
    Fault(
        *("torch ring", "contiguous", "the mask is lost"),
        *(f"{RING}._templated_ring_attention", _no_mask),
    ),
    Fault(
        *("ALST Ulysses sdpa", "causal", "nothing is exchanged"),
        *(f"{ALST}._dim_zero_all_to_all", _no_exchange),
    ),
    Fault(
        *("ALST Ulysses flash_attention_2", "backward", "k gets half its gradient"),
        *(f"{ALST}.UlyssesSPAttentionHF._combine_local_sequences", _half_a_gradient),
    ),
    Fault(
        *("ALST Ulysses flex_attention", "causal", "each token gets another's output"),
        *(f"{ALST}.UlyssesSPAttentionHF._partition_global_sequence", _shifted),
    ),
    Fault(
        *("accelerate CPU stand-in", "full", "the context ends before attention"),
        *("accelerate.Accelerator.maybe_context_parallel", _ends_at_once),
    ),
    Fault(
        *(MEGATRON, "forward", "outputs are not summed over ranks"),
        *(f"{MEGATRON_LAYERS}.reduce_scatter_to_sequence_parallel_region", _own_part),
    ),
    Fault(
        *(MEGATRON, "backward", "input gradients are not summed over ranks"),
        *(f"{MEGATRON_LAYERS}.dist_reduce_scatter_func", _own_part_into),
    ),
    Fault(
        *(MEGATRON, "bias", "bias gradients are not summed over ranks"),
        "megatron.core.distributed.finalize_model_grads._allreduce_non_tensor_model_parallel_grads",
        _nothing,
    ),
)
"""All faults. Columns that refuse everything on a CPU have none."""
