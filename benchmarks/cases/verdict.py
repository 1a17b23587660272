"""The verdict on an output, as plain numbers: rank 0 makes it, the driver prints it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Verdict:
    """How far the output of the ranks is from the single device's, and how far it may be.

    Args:
        max_abs_error: max |ranks - single device| over all tokens; None if an output is not finite.
        single_error: max |single device - float64| over the tokens computed in float64.
        ranks_error: max |ranks - float64| over the same.
        bound: of `ranks_error`: 2 * single_error + ROUND_OFFS * u * scale.
        single_bound: of `single_error`: sqrt(longest sum) * u * scale.
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

    def __str__(self) -> str:
        errors = (self.max_abs_error, self.ranks_error, self.single_error)
        between, ranks, single = ("not finite" if error is None else f"{error:.2e}" for error in errors)
        text = f"max |ranks - single device| = {between}; against float64: ranks {ranks}, single device {single}"
        text += f", allowed {self.bound:.2e}"
        if self.single_error is not None and self.single_error > self.single_bound:
            text += f". The single device itself is too far off: {self.single_bound:.2e} is what rounding explains"
        return text
