"""Measured times of messages, sums, copies and whole collectives, by size in bytes.

A message of n bytes takes alpha + beta n, a sum gamma n. On a real machine beta and gamma depend on
n, because caches end and libraries change their protocol; so each is a curve through measured
points, and alpha is what its first point says.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field

LINKS = ("node", "network")
"""Kinds of link: between ranks of one node, and between nodes."""


@dataclass(frozen=True)
class Curve:
    """Seconds as a function of bytes.

    Between two points it is a power law, below the first one constant, above the last one
    proportional to the size.

    Args:
        points: (bytes, seconds) in ascending order of bytes; positive.
    """

    points: tuple[tuple[int, float], ...]

    def __post_init__(self) -> None:
        sizes = [size for size, _ in self.points]
        if not sizes or sizes != sorted(set(sizes)) or min(sizes) < 1:
            raise ValueError(
                f"a curve through the sizes {sizes} was given; "
                "at least one is needed, in ascending order from 1."
            )
        if not all(0 < seconds < math.inf for _, seconds in self.points):
            raise ValueError(
                "a curve was given with a time that is not a positive number; measure again."
            )

    def __call__(self, nbytes: float) -> float:
        first, last = self.points[0], self.points[-1]
        if nbytes <= first[0]:
            return first[1]
        if nbytes >= last[0]:
            return last[1] * nbytes / last[0]
        place = bisect_left(self.points, nbytes, key=lambda point: point[0])
        (low, before), (high, after) = self.points[place - 1 : place + 1]
        share = math.log(nbytes / low) / math.log(high / low)
        return math.exp((1 - share) * math.log(before) + share * math.log(after))

    @property
    def per_byte(self) -> float:
        """Seconds per byte of the largest measured size."""
        return self.points[-1][1] / self.points[-1][0]


def straight(alpha: float, per_byte: float) -> Curve:
    """Make the curve alpha + per_byte * n."""
    return Curve(
        tuple((size, alpha + per_byte * size) for size in (1 << place for place in range(41)))
    )


@dataclass(frozen=True, eq=False)
class Tuning:
    """The constants of one machine.

    Args:
        fingerprint: of which machine and MPI library.
        nodes: the node of each rank that was timed together.
        links: seconds of an exchange, n bytes each way at once, by kind of link.
        add, copy: seconds for n bytes of result, in memory that is there already.
        start: seconds that a run of a plan takes beside its messages and sums.
        bind: seconds to prepare a call, and each of its steps; a plan has that behind it.
        times: seconds of a plan's run by collective and algorithm, over the bytes of the whole
            vector; "mpi" is the library.
        error: of the model without `times`, against them: median and 95th percentile of |predicted
            / measured - 1|.
        measured_at: date and time.
    """

    fingerprint: dict[str, str]
    nodes: tuple[int, ...]
    links: dict[str, Curve]
    add: Curve
    copy: Curve
    start: float = 0.0
    bind: tuple[float, float] = (0.0, 0.0)
    times: dict[str, dict[str, Curve]] = field(default_factory=dict)
    error: tuple[float, float] = (0.0, 0.0)
    measured_at: str = ""

    @property
    def alpha(self) -> float:
        """Seconds of the shortest exchange in a node; between nodes if only that was timed."""
        return self._link.points[0][1]

    @property
    def beta(self) -> float:
        """Seconds per byte of the longest exchange."""
        return self._link.per_byte

    @property
    def gamma(self) -> float:
        """Return the time to add two vectors, in seconds per byte, for the longest measured."""
        return self.add.per_byte

    @property
    def _link(self) -> Curve:
        return next(self.links[kind] for kind in LINKS if kind in self.links)


def on_grid(sizes: Iterable[int], seconds: Iterable[float]) -> Curve:
    """Make a curve through measured points."""
    return Curve(tuple(zip(sizes, seconds, strict=True)))
