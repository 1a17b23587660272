"""List changes of a linear layer inside another layer, as libraries for fine-tuning make them."""

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn


class Adapted(nn.Linear):
    """A linear layer with a low-rank term (LoRA), whose own weight is frozen."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__(base.in_features, base.out_features, dtype=base.weight.dtype)
        self.weight.requires_grad_(False)
        self.low = nn.Linear(self.in_features, 1, dtype=base.weight.dtype)
        self.high = nn.Linear(1, self.out_features, dtype=base.weight.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Add the low-rank term."""
        return super().forward(x).add(self.high(self.low(x)))


class Narrow(nn.Module):
    """A frozen linear layer of numbers of another dtype, which converts them to that of x (QLoRA).

    The numbers are a buffer, or with `low` a parameter to which a low-rank term is added.
    """

    def __init__(self, base: nn.Linear, dtype: torch.dtype, low: bool) -> None:
        super().__init__()
        size, of = (base.in_features, base.out_features), base.weight.dtype
        numbers = torch.arange(base.weight.numel()).view_as(base.weight).to(dtype)
        self.base: nn.Module = nn.Linear(*size, bias=False) if low else nn.Module()
        self.low = nn.Linear(*size, dtype=of) if low else None
        if isinstance(self.base, nn.Linear):
            self.base.weight = nn.Parameter(numbers, requires_grad=False)
        else:
            self.base.register_buffer("weight", numbers)

    def forward(self, x: Tensor) -> Tensor:
        """Multiply by the converted numbers, and add the low-rank term."""
        y = nn.functional.linear(x, cast("Tensor", self.base.weight).to(x.dtype) / 50)
        return y if self.low is None else y + self.low(x)


class Twice(nn.Module):
    """A layer with two linear layers of one weight; they may be one module under two names."""

    def __init__(self, part: nn.Linear, same: bool) -> None:
        super().__init__()
        self.first = self.second = part
        if not same:
            self.second = nn.Linear(part.in_features, part.out_features, dtype=part.weight.dtype)
            self.second.weight = part.weight

    def forward(self, x: Tensor) -> Tensor:
        """Add the two layers, each after a function of its own."""
        return cast("Tensor", self.first(x).sin() + self.second(x).tanh())


class Scaled(nn.Module):
    """A linear layer and a parameter `scale` of another dtype, which multiplies what it returns."""

    def __init__(self, part: nn.Linear, dtype: torch.dtype) -> None:
        super().__init__()
        self.part, self.scale = part, nn.Parameter(torch.ones(1).to(dtype))

    def forward(self, x: Tensor) -> Tensor:
        """Multiply by the real part of the scale."""
        scale = self.scale.real if self.scale.is_complex() else self.scale
        return cast("Tensor", self.part(x) * scale.to(x.dtype))


def patched(part: nn.Linear) -> nn.Linear:
    """Set another forward on a linear layer, as some libraries do."""
    vars(part)["forward"] = lambda x: nn.Linear.forward(part, x).cos()
    return part


def hooked(name: str, hook: Callable[..., Any], part: nn.Linear) -> nn.Linear:
    """Register a hook on a linear layer."""
    getattr(part, name)(hook)
    return part


CHANGES: dict[str, Callable[[nn.Linear], nn.Module]] = {
    "another class": Adapted,
    "one layer under two names": partial(Twice, same=True),
    "two layers of one weight": partial(Twice, same=False),
    **{
        f"{dtype} {'parameters' if low else 'buffers'}": partial(Narrow, dtype=dtype, low=low)
        for dtype in (torch.int8, torch.bfloat16)
        for low in (False, True)
    },
    "a sequence": lambda part: nn.Sequential(part, nn.Tanh()),
    "a parametrization": nn.utils.parametrizations.weight_norm,
    "another forward": patched,
    "a forward hook": partial(hooked, "register_forward_hook", lambda part, given, y: 2 * y),
    "a pre-hook": partial(hooked, "register_forward_pre_hook", lambda part, given: 2 * given[0]),
    "a backward hook": partial(
        hooked, "register_full_backward_hook", lambda part, dx, dy: (2 * dx[0],)
    ),
    "a backward pre-hook": partial(
        hooked, "register_full_backward_pre_hook", lambda part, dy: (2 * dy[0],)
    ),
}
"""Changes of a linear layer inside another layer."""

PARTS = (
    *(f"attention.{name}_proj" for name in "qkvo"),
    *(f"feed_forward.{name}" for name in ("gate", "up", "down")),
)
"""Names of the linear layers of a transformer block."""
