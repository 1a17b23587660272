"""From the records of launches to ratios, their intervals, and what the required lines say. Pure arithmetic.

A launch gives one number per contestant, the median over its samples, and so one ratio per pair of contestants. A ratio is told
as the median over the launches with the exact interval of that median, from the k-th smallest launch to the k-th largest: it misses
the true median as often as that many throws of a coin give fewer than k heads, or fewer than k tails.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.peers.setting import BALANCED, LAYOUTS, REFERENCE_SEQ

Record = dict[str, Any]
LAUNCHES = 12  # a verdict needs at least as many
MISS = 0.05  # probability that an interval may miss the true median
PEERS = ("torch ring/all-gather", "torch ring/all-to-all", "deepspeed ulysses")
SOLO, DUO = "sdpa/1 thread", "sdpa/2 threads"


@dataclass(frozen=True)
class Ratio:
    """A median over launches.

    Args:
        median: of the launches' ratios.
        low, high: ends of the interval.
        coverage: probability that it holds the true median.
        launches: how many there are.
    """

    median: float
    low: float
    high: float
    coverage: float
    launches: int

    def __str__(self) -> str:
        return f"{self.median:.3f} [{self.low:.3f}, {self.high:.3f}]"


@dataclass(frozen=True)
class Line:
    """One required line: `ratio` must be at most, or at least, or more than `bound`. Without a ratio it was not measured."""

    text: str
    seq: int
    bound: float
    relation: str
    ratio: Ratio | None

    @property
    def mark(self) -> str:
        """pass or short by the median, "open" where the interval crosses the bound; no verdict with fewer than LAUNCHES."""
        if self.ratio is None:
            return "not measured"
        if self.ratio.launches < LAUNCHES:
            return f"not judged: {self.ratio.launches} of {LAUNCHES} launches"
        holds = [self._holds(x) for x in (self.ratio.median, self.ratio.low, self.ratio.high)]
        return ("pass" if holds[0] else "short") + ("" if len(set(holds)) == 1 else ", open")

    def _holds(self, value: float) -> bool:
        return {"<=": value <= self.bound, ">=": value >= self.bound, ">": value > self.bound}[self.relation]


def summarized(values: Sequence[float]) -> Ratio:
    """The median and its exact interval; with fewer than 6 values none reaches 95 %, and the widest one is given."""
    ordered, n = sorted(values), len(values)
    k = max((k for k in range(1, n // 2 + 1) if _miss(n, k) <= MISS), default=1)
    return Ratio(statistics.median(ordered), ordered[k - 1], ordered[n - k], max(0.0, 1 - _miss(n, k)), n)


def _miss(n: int, k: int) -> float:
    """Probability that the true median lies outside the k-th smallest and largest of n values."""
    tail: float = sum(math.comb(n, i) for i in range(k)) / 2**n
    return 2 * tail


def medians(launches: Sequence[Record], seq: int, name: str) -> list[float | None]:
    """Seconds of a contestant in each launch; None where it was not timed."""
    found = (launch.get("seqs", {}).get(str(seq), {}).get(name, {}) for launch in launches)
    return [heat.get("median_s") for heat in found]


def ratio(launches: Sequence[Record], seq: int, above: str | None, below: str | None) -> Ratio | None:
    """Time of one contestant over that of another, over all launches that timed both."""
    if above is None or below is None:
        return None
    pairs = zip(medians(launches, seq, above), medians(launches, seq, below), strict=True)
    values = [a / b for a, b in pairs if a is not None and b is not None]
    return summarized(values) if values else None


def best(launches: Sequence[Record], seq: int) -> str | None:
    """Our quickest way with check="off" over all launches: one for all of them, not the luckiest of each."""
    found = {}
    for name in (f"{scheme}/{layout}/off" for scheme, layouts in LAYOUTS.items() for layout in layouts):
        times = [x for x in medians(launches, seq, name) if x is not None]
        if times:
            found[name] = statistics.median(times)
    return min(found, key=lambda name: found[name], default=None)


def lines(launches: Sequence[Record], seqs: Sequence[int], extras: Sequence[int]) -> list[Line]:
    """Everything that is required; what is not for a particular length is judged at 4096, else at the longest that was measured."""
    place = REFERENCE_SEQ if REFERENCE_SEQ in extras else max(extras)
    return [*_against_threads(launches, place), *_against_peers(launches, seqs), *_among_ours(launches, place)]


def _against_threads(launches: Sequence[Record], seq: int) -> Iterator[Line]:
    winner = best(launches, seq)
    agreed = winner and winner.replace("/off", "/agree")
    for name in (winner, agreed):
        yield Line(f"{name} / two threads", seq, 1.05, "<=", ratio(launches, seq, name, DUO))


def _against_peers(launches: Sequence[Record], seqs: Sequence[int]) -> Iterator[Line]:
    for seq in seqs:
        winner = best(launches, seq)
        for peer in PEERS:
            yield Line(f"{peer} / {winner}", seq, 1.0, ">", ratio(launches, seq, peer, winner))


def _among_ours(launches: Sequence[Record], seq: int) -> Iterator[Line]:
    zigzag = ratio(launches, seq, "ring/contiguous/off", "ring/zigzag/off")
    yield Line("ring, contiguous / zigzag", seq, 1.3, ">=", zigzag)
    for scheme, layout in BALANCED.items():
        name = f"{scheme}/{layout}/off"
        yield Line(f"{scheme}, causal / full mask", seq, 0.6, "<=", ratio(launches, seq, name, f"{name}/full"))
    for scheme in BALANCED:
        yield Line(f"{scheme}, one rank / one thread", seq, 1.03, "<=", ratio(launches, seq, f"{scheme}/one rank", SOLO))
