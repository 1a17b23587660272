"""Compute a value once per process if all ranks of an example need it and none changes it.

Otherwise all ranks that are threads would compute it, one after the other. A test that runs one
problem several times, such as over several transports, would also compute it each time.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import TypeVar, cast

import torch
from torch import Tensor

T = TypeVar("T")
KEPT = 8
_found: OrderedDict[Hashable, object] = OrderedDict()
_lock = threading.RLock()


def once(key: Hashable, make: Callable[[], T]) -> T:
    """Return the result of `make`, or a recent one for an equal key. No caller may change it.

    Args:
        key: everything that the result depends on; for tensors, their `contents`.
        make: computes the result. It must not communicate, because other ranks wait for it.
    """
    with _lock:
        if key not in _found:
            _found[key] = make()
        _found.move_to_end(key)
        while len(_found) > KEPT:
            _found.popitem(last=False)
        return cast("T", _found[key])


def contents(*tensors: Tensor | None) -> Hashable:
    """Return dtypes, shapes and bytes of tensors, as a key for `once`."""
    return tuple(None if x is None else (x.dtype, tuple(x.shape), _bytes(x)) for x in tensors)


def _bytes(x: Tensor) -> bytes:
    return x.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
