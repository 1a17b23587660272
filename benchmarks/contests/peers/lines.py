"""From the records of launches to ratios, and to the lines that must hold.

A launch gives one number per contestant, the median over its samples, and so one ratio per pair of contestants.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from benchmarks.contests.peers.setting import BALANCED, LAYOUTS, REFERENCE_SEQ
from benchmarks.launching import Record
from benchmarks.statistics import Interval, Requirement, exact_interval

LAUNCHES = 12  # a verdict needs at least as many
PEERS = ("torch ring/all-gather", "torch ring/all-to-all", "deepspeed ulysses")
SOLO, DUO = "sdpa/1 thread", "sdpa/2 threads"


def medians(launches: Sequence[Record], seq: int, name: str) -> list[float | None]:
    """Return the seconds of a contestant in each launch; None where it was not timed."""
    found = (launch.get("seqs", {}).get(str(seq), {}).get(name, {}) for launch in launches)
    return [heat.get("median_s") for heat in found]


def typical(launches: Sequence[Record], seq: int, name: str) -> float | None:
    """Return the median over the launches that timed a contestant."""
    times = [x for x in medians(launches, seq, name) if x is not None]
    return statistics.median(times) if times else None


def ratio(launches: Sequence[Record], seq: int, above: str | None, below: str | None) -> Interval | None:
    """Return the time of one contestant over that of another, over all launches that timed both."""
    pairs = zip(medians(launches, seq, above or ""), medians(launches, seq, below or ""), strict=True)
    values = [a / b for a, b in pairs if a is not None and b is not None]
    return exact_interval(values) if values else None


def best(launches: Sequence[Record], seq: int) -> str | None:
    """Return our quickest way with check="off" over all launches: one for all of them, not the luckiest of each."""
    names = [f"{scheme}/{layout}/off" for scheme, layouts in LAYOUTS.items() for layout in layouts]
    found = {name: time for name in names if (time := typical(launches, seq, name)) is not None}
    return min(found, key=lambda name: found[name], default=None)


def lines(launches: Sequence[Record], seqs: Sequence[int], extras: Sequence[int]) -> Iterator[Requirement]:
    """Yield all requirements; those for no particular length are judged at 4096, else at the longest that was measured."""

    def line(text: str, seq: int, relation: str, bound: float, above: str | None, below: str | None) -> Requirement:
        return Requirement(f"{text}, {seq} tokens", relation, bound, ratio(launches, seq, above, below), LAUNCHES)

    place = REFERENCE_SEQ if REFERENCE_SEQ in extras else max(extras)
    winner = best(launches, place)
    for name in (winner, winner and winner.replace("/off", "/agree")):
        yield line(f"{name} / two threads", place, "<=", 1.05, name, DUO)
    for seq in seqs:
        for peer in PEERS:
            yield line(f"{peer} / {best(launches, seq)}", seq, ">", 1.0, peer, best(launches, seq))
    yield line("ring, contiguous / zigzag", place, ">=", 1.3, "ring/contiguous/off", "ring/zigzag/off")
    for scheme, layout in BALANCED.items():
        name = f"{scheme}/{layout}/off"
        yield line(f"{scheme}, causal / full mask", place, "<=", 0.6, name, f"{name}/full")
    for scheme in BALANCED:
        yield line(f"{scheme}, one rank / one thread", place, "<=", 1.03, f"{scheme}/one rank", SOLO)
