"""Save memory for activations: compute in parts, and compute again in the backward pass."""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from sp_core import arguments


@dataclass(frozen=True)
class Saving:
    """Choose how the layers of a model save memory for activations in training.

    Args:
        recompute, offload, chunk: as in `sp_core.llama.train.backward`.
    """

    recompute: bool = False
    offload: bool = False
    chunk: int | None = None

    def __post_init__(self) -> None:
        """Convert `chunk`, which may be a number of NumPy."""
        object.__setattr__(self, "chunk", arguments.plain(self.chunk))

    def check(self) -> None:
        """Raise TypeError or ValueError, on this rank, if a value is wrong."""
        arguments.check(recompute=self.recompute, offload=self.offload)
        arguments.check_positive(chunk=self.chunk)

    def apply(self, layer: nn.Module, x: Tensor, *given: Any) -> Tensor:
        """Return `layer(x, *given, chunk)`.

        With `recompute` or `offload` only the arguments of `layer` are saved for backward. Backward
        calls `layer` again, and draws the same random numbers. With `offload` the arguments are
        saved in host memory. A layer with buffers keeps its activations: a second call could find
        others.
        """
        given, kind = (*given, self.chunk), x.device.type
        if not (self.offload or self.recompute) or [*layer.buffers()]:
            return cast("Tensor", layer(x, *given))
        again = partial(recomputed, layer, x, *given, random=True)  # a new part may have dropout
        if not self.offload:
            return again()
        with torch.device("cpu"), save_on_cpu(kind != "cpu", kind):  # copies on the default device
            return again()


KEEP_ALL = Saving()
"""Keep all activations for the backward pass."""


def recomputed(
    function: Callable[..., Tensor],
    *given: Any,
    reads: Collection[Tensor] = (),
    random: bool = False,
) -> Tensor:
    """Return `function(*given)`, and keep only the arguments: backward calls the function again.

    `reads` are tensors that `function` uses without being given them. If an argument or one of
    these is changed in place before backward, backward raises RuntimeError. They are not
    passed as arguments, which are saved once per chunk. In a block that is itself recomputed, such
    arguments would keep the activations of all chunks alive.

    Unlike in torch's checkpoint, the second call runs to the end of `function`, so that every rank
    completes all messages.
    Only with `random` may `function` draw from the default generators of torch: the second call
    then draws the same numbers.
    """
    before = _versions(reads)

    def call(*kept: Any) -> Tensor:
        if _versions(reads) != before:
            raise RuntimeError(
                "a weight was modified by an inplace operation between a forward in chunks and its "
                "backward, which computes the chunks again. Step the optimizer after backward."
            )
        return function(*kept)

    if torch.is_grad_enabled():  # autograd saves no tensor of inference mode
        given = tuple(x.clone() if torch.is_tensor(x) and x.is_inference() else x for x in given)
    with set_checkpoint_early_stop(False):
        made = checkpoint(call, *given, use_reentrant=False, preserve_rng_state=random)
        return cast("Tensor", made)


def _versions(tensors: Collection[Tensor]) -> list[int]:
    """Return how often each tensor was changed in place; those of inference mode do not tell."""
    return [0 if x.is_inference() else x._version for x in tensors]


def tiled(
    function: Callable[..., Tensor],
    *parts: Iterable[Any],
    dim: int,
    reads: Collection[Tensor] = (),
    random: bool = False,
) -> Tensor:
    """Call `function` on each part of its arguments in turn, and concatenate the results.

    Each call keeps only its arguments: backward calls the function again (`recomputed`). If there
    is a single part, the call keeps its activations instead.

    Args:
        function: a function from one part of each argument to a tensor.
        parts: for each argument its parts, the same number for every argument.
        dim: the dim along which the results are concatenated.
        reads: the weights that `function` uses, as in `recomputed`.
        random: whether `function` may draw random numbers.
    """
    calls = list(zip(*parts, strict=True))
    if len(calls) == 1:
        return function(*calls[0])
    done = [recomputed(function, *given, reads=reads, random=random) for given in calls]
    return torch.cat(done, dim)
