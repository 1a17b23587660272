"""Tensors for calls, and how results are compared with what is expected."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from oracle.collective_cases import in_memory
from torch import Tensor

from sp_core.testing import record_ratio
from sp_core.testing.tolerance import check_close


def normal(seed: int, shape: Sequence[int], dtype: str) -> Tensor:
    """Return random numbers."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(tuple(shape), generator=generator, dtype=torch.float64)
    return drawn.to(getattr(torch, dtype))


def whole(
    seed: int, shape: Sequence[int], dtype: str = "int64", low: int = 0, high: int = 3
) -> Tensor:
    """Return small whole numbers, which every dtype adds exactly."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(low, high + 1, tuple(shape), generator=generator)
    return drawn.to(getattr(torch, dtype))


def leaf(x: Tensor, memory: str, *, learns: bool = True) -> Tensor:
    """Return a leaf that lies in memory as named."""
    return in_memory(x, memory).detach().requires_grad_(learns)


def same(found: Any, wanted: Any) -> None:
    """Compare two results bit for bit."""
    if isinstance(wanted, Tensor) or (wanted and isinstance(wanted, tuple)):
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    else:
        assert found == wanted


def near(name: str, found: Tensor, wanted: Tensor, allowed: Tensor, what: str = "") -> None:
    """Compare a result with the reference, and record under its name how far it is off."""
    ratio = check_close(what or name, found.detach().cpu(), wanted, allowed)
    record_ratio(name, ratio)
