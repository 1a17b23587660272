"""Mistakes that training over ranks invites, planted into a running program: the comparison must find each of them.

The source of one function is changed and put in the place of the right one, so that the library itself has no switch for it.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType

from sp_core.llama import train
from sp_core.nn import gradients, loss


@dataclass(frozen=True)
class Fault:
    """A text in a function, and what stands there instead."""

    module: ModuleType
    function: str
    right: str
    wrong: str


FAULTS = {
    "gradients of norms are not reduced": Fault(
        gradients,
        "reduce_gradients",
        "    gradients = [parameter.grad",
        "    wanted = [pair for pair in wanted if pair[0].dim() > 1]\n    gradients = [parameter.grad",
    ),
    "a mean of the ranks' means": Fault(
        loss,
        "next_token_loss",
        "int(all_reduce(valid.sum(), comm=data))",
        "max(int(valid.sum()), 1) * data.size",
    ),
    "labels shifted inside each shard": Fault(
        loss,
        "next_token_labels",
        "return sharding.shard(labels, comm.rank, 1)",
        "return torch.cat((tokens[:, 1:], torch.full_like(tokens[:, :1], IGNORED)), 1)",
    ),
}


@contextmanager
def planted(name: str) -> Iterator[None]:
    """Train with a fault inside the block.

    Raises:
        LookupError: the library no longer reads as the fault expects.
    """
    fault = FAULTS[name]
    right = getattr(fault.module, fault.function)
    source = inspect.getsource(right)
    if source.count(fault.right) != 1 or getattr(train, fault.function) is not right:
        raise LookupError(f"{fault.function} has no {fault.right!r}, or is not what a step calls; plant the fault elsewhere.")
    names = dict(vars(fault.module))
    exec(compile(source.replace(fault.right, fault.wrong), f"<{name}>", "exec"), names)
    setattr(train, fault.function, names[fault.function])
    try:
        yield
    finally:
        setattr(train, fault.function, right)
