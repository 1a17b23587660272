"""Tensors as the flat contiguous vectors that a transport moves, and back."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

Refresh = Callable[[], object] | None
"""How to bring an input into a flat vector again; None where the vector is the memory of the input."""


def flat(x: Tensor) -> Tensor:
    """The elements in logical order, as a contiguous vector outside autograd; a view where the tensor is contiguous."""
    return x.detach().contiguous().view(-1)


def flattened(x: Tensor) -> tuple[Tensor, Refresh]:
    """`flat`, and how to bring the tensor there again where that is a copy."""
    vector = flat(x)
    shared = vector.data_ptr() == x.data_ptr()
    return vector, None if shared else partial(vector.view(x.shape).copy_, x.detach())


def packed(parts: Sequence[Tensor]) -> tuple[Tensor, Refresh]:
    """The elements of some tensors one after the other, and how to bring them there again."""
    lengths = [part.numel() for part in parts]
    vector = parts[0].new_empty(sum(lengths))
    places = vector.split(lengths)

    def refresh() -> None:
        for place, part in zip(places, parts, strict=True):
            place.view(part.shape).copy_(part)

    refresh()
    return vector, refresh


def unmark(marked: Tensor, out: Tensor) -> None:
    """Copy numbers that travelled with marks beside them; NaN where a mark is set."""
    out.copy_(marked[0]).masked_fill_(marked[1] != 0, torch.nan)


def overlaps(x: Tensor) -> bool:
    """Return whether elements of a tensor may share memory."""
    reach = 0
    for stride, length in sorted(zip(x.stride(), x.shape, strict=True)) if x.numel() else ():
        if length > 1 and stride <= reach:
            return True
        reach += stride * (length - 1)
    return False


def back(rows: Tensor, dim: int) -> Tensor:
    """The rows along `dim`; the tensor itself, not a view of it, where they are there already."""
    return rows.movedim(0, dim) if dim else rows


def elements(sizes: tuple[int, ...], rows: Tensor) -> tuple[int, ...]:
    """Elements in so many rows."""
    width = math.prod(rows.shape[1:])
    return tuple(size * width for size in sizes)
