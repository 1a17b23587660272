"""What follows from the samples of a launch, and what must be reached."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

STAGED = "pipelined"
"""What the table of the project calls staged: page-locked, in chunks. The transport of that name is the plain form."""

MILLISECONDS, SHARE, TIMES = 1.0, 0.7, 5.0
"""Staged at P = 2 at most; of the link's rate at P = 4 at least; how much quicker device memory is than staging."""


@dataclass(frozen=True)
class Row:
    """One way to gather on so many ranks.

    Attributes:
        milliseconds: median.
        share: of the time that the link between host and device needs at least, the shared part of it; 1 is the link's rate.
        quicker: how many times as quick as the staged form, the median over rounds; None for that itself and without it.
        mark: "reached", "not reached", or empty where nothing was promised.
    """

    ranks: int
    name: str
    milliseconds: float
    share: float | None
    quicker: float | None
    mark: str


def rows(launch: dict[str, Any], *, on_gpu: bool) -> Iterator[Row]:
    """The rows of a launch."""
    samples, ranks = launch["samples"], launch["ranks"]
    least = link_seconds(launch)
    for name, found in samples.items():
        seconds = statistics.median(found)
        share = least / seconds if name in ("naive", "staged", STAGED) else None
        quicker = _quicker(samples.get(STAGED), found) if name != STAGED else None
        yield Row(ranks, name, seconds * 1e3, share, quicker, _mark(ranks, name, seconds, share, quicker) if on_gpu else "")


def link_seconds(launch: dict[str, Any]) -> float:
    """What the link needs for all ranks that share it: each sends its piece down, and takes the pieces of the others up."""
    beside, ranks = launch["beside"], launch["ranks"]
    down, up = (statistics.median(beside[f"{way}, one rank"]) for way in ("down", "up"))  # of the whole vector
    return float(max(down, up * (ranks - 1)))


def slicing(launch: dict[str, Any]) -> float:
    """How much longer a computation takes if all ranks make it, over so many times what one rank needs: 1 is fair sharing."""
    beside = launch["beside"]
    together, alone = (statistics.median(beside[f"computation, {who}"]) for who in ("all ranks", "one rank"))
    return float(together / alone / launch["ranks"])


def _quicker(staged: list[float] | None, found: list[float]) -> float | None:
    if staged is None:
        return None
    return statistics.median(one / other for one, other in zip(staged, found, strict=True))


def _mark(ranks: int, name: str, seconds: float, share: float | None, quicker: float | None) -> str:
    reached = {
        (2, STAGED): seconds * 1e3 <= MILLISECONDS,
        (4, STAGED): share is not None and share >= SHARE,
        (ranks, "ipc"): quicker is not None and quicker >= TIMES,
    }.get((ranks, name))
    return "" if reached is None else "reached" if reached else "not reached"
