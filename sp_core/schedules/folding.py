"""Any number of ranks as a power of two: of the first 2 * extra ranks, each odd one takes the even one before it along."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fold:
    """Places 0 to core - 1 of the ranks that take part in the exchange, in the order of their ranks.

    For 7 ranks the core is 4 and three ranks are taken along:

        rank    0 -> 1    2 -> 3    4 -> 5    6
        place        0         1         2    3
    """

    size: int

    @property
    def core(self) -> int:
        """The largest power of two that is not more than the number of ranks."""
        return 1 << (self.size.bit_length() - 1)

    @property
    def extra(self) -> int:
        """How many ranks are taken along."""
        return self.size - self.core

    def place(self, rank: int) -> int | None:
        """The place of a rank; None for one that is taken along."""
        if rank >= 2 * self.extra:
            return rank - self.extra
        return rank // 2 if rank % 2 else None

    def rank(self, place: int) -> int:
        """The rank at a place."""
        return 2 * place + 1 if place < self.extra else place + self.extra

    def carries(self, rank: int) -> bool:
        """Whether this rank takes the one before it along."""
        return rank < 2 * self.extra and rank % 2 == 1

    def ranks(self, first: int, stop: int) -> range:
        """The ranks that places `first` to `stop - 1` stand for."""
        return range(self._begin(first), self._begin(stop))

    def _begin(self, place: int) -> int:
        return 2 * place if place < self.extra else place + self.extra
