"""Compute once in a process what every rank of an example needs and none changes.

Ranks that are threads would each compute it, one after the other; and a test that tries one problem
in many ways, for each of them.
"""

from __future__ import annotations

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
    """What `make` gives, or has given not long ago for an equal key. Nobody may change it.

    Args:
        key: everything that the result depends on; `contents` of tensors.
        make: computes it, without communication: other ranks wait meanwhile.
    """
    with _lock:
        if key not in _found:
            _found[key] = make()
        _found.move_to_end(key)
        while len(_found) > KEPT:
            _found.popitem(last=False)
        return cast("T", _found[key])


def contents(*tensors: Tensor | None) -> Hashable:
    """What is in some tensors, bit for bit."""
    return tuple(None if x is None else (x.dtype, tuple(x.shape), _bytes(x)) for x in tensors)


def _bytes(x: Tensor) -> bytes:
    return x.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
