"""The operations of a sequence: a part that grows with its tokens, and attention, which grows with their pairs."""

from __future__ import annotations

from dataclasses import dataclass

from sp_core.errors import ShapeError
from sp_core.sharding import Sharding


@dataclass(frozen=True)
class Work:
    """Floating-point operations of one causal sequence: per_token * S + per_pair * S (S + 1) / 2.

    Args:
        per_token: operations for each token, whatever it sees.
        per_pair: operations for each pair of a token and one that it sees, itself included.

    Raises:
        ShapeError: a negative number, or two zeros, with which nothing costs anything.
    """

    per_token: int
    per_pair: int

    def __post_init__(self) -> None:
        if min(self.per_token, self.per_pair) < 0 or self.per_token + self.per_pair == 0:
            raise ShapeError(
                f"per_token={self.per_token} and per_pair={self.per_pair} were given; pass numbers >= 0, one above 0."
            )

    def of(self, length: int) -> int:
        """Return the operations of a whole sequence."""
        return self.between(0, length)

    def between(self, start: int, stop: int) -> int:
        """Return the operations of tokens start to stop - 1 of a sequence."""
        pairs = (stop * (stop + 1) - start * (start + 1)) // 2
        return self.per_token * (stop - start) + self.per_pair * pairs

    def shares(self, length: int, size: int) -> tuple[int, ...]:
        """Return the operations of each of `size` ranks that share a sequence by `Sharding.zigzag`."""
        segments = Sharding.zigzag(length, size).segments
        return tuple(sum(self.between(s.start, s.stop) for s in owned) for owned in segments)
