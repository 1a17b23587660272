"""The verdict on an output, as plain numbers: rank 0 makes it, the driver prints it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Verdict:
    """How far the output of the ranks is from the single device's, and how far it may be.

    Args:
        max_abs_error: max |ranks - single device| over all tokens; None where an output is not finite.
        single_error: max |single device - float64| over the tokens computed in float64.
        ranks_error: max |ranks - float64| over the same.
        bound: what `ranks_error` may be: 2 * single_error + ROUND_OFFS * u * scale.
        single_bound: what `single_error` may be: sqrt(longest sum) * u * scale.
        scale: max |float64|.
        tokens: how many tokens were computed in float64.
        passed: whether the output counts as right.
    """

    max_abs_error: float | None
    single_error: float | None
    ranks_error: float | None
    bound: float
    single_bound: float
    scale: float
    tokens: int
    passed: bool

    def as_dict(self) -> dict[str, Any]:
        """All fields as plain values."""
        return asdict(self)

    def __str__(self) -> str:
        def shown(error: float | None) -> str:
            return "not finite" if error is None else f"{error:.2e}"

        doubt = ""
        if self.single_error is not None and self.single_error > self.single_bound:
            doubt = f". The single device itself is too far off: {self.single_bound:.2e} is what rounding explains"
        return (
            f"max |ranks - single device| = {shown(self.max_abs_error)}; against float64: ranks {shown(self.ranks_error)}, "
            f"single device {shown(self.single_error)}, allowed {self.bound:.2e}{doubt}"
        )
