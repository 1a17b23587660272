"""Ranks that wait for each other on different communicators: found by what all of them say, not by a clock.

A rank that has waited for a while tells the others where, and takes part in such rounds as long as it waits. When every rank has
said the same twice, all of them were waiting at the moment the first round was complete; if then no exchange has all its ranks,
none can go on, ever. The time after which a rank speaks up decides only when this is found, not what.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from sp_core.testing.lockstep import Ticket

AFTER_SECONDS = 0.5


class Report(NamedTuple):
    """What one rank says.

    Attributes:
        posts: by communicator, how often this rank has entered an exchange.
        waits_on: the communicator whose exchange it waits for; nothing if it has ended.
        size: of that communicator.
        what: for people.
    """

    posts: tuple[tuple[str, int], ...]
    waits_on: str
    size: int
    what: str


def deadlocked(reports: Sequence[Report]) -> bool:
    """Whether none of these ranks, all of them waiting, can go on."""
    posts = [dict(report.posts) for report in reports]
    waiting = [(report, posts[rank][report.waits_on]) for rank, report in enumerate(reports) if report.waits_on]
    arrived = [sum(p.get(report.waits_on, 0) >= turn for p in posts) for report, turn in waiting]
    return bool(waiting) and all(count < report.size for count, (report, _) in zip(arrived, waiting, strict=True))


class Detector:
    """One rank's part in finding that all wait.

    Args:
        share: begins an exchange between all ranks of the example, on a communicator of its own.
        rank: of this process among them.
    """

    def __init__(self, share: Callable[[Report | None], Ticket], rank: int) -> None:
        self._share = share
        self._rank = rank
        self._ticket: Ticket | None = None
        self._previous: list[Report] | None = None
        self.rounds = 0

    def look(self, report: Report) -> str:
        """Take part as long as this rank waits.

        Returns:
            Where every rank waits, if none can go on.
        """
        if self._ticket is None:
            self._begin(report)
        reports = self._poll()
        if reports is None:
            return ""
        again, self._previous = reports == self._previous, reports
        # another rank may have found it first and left: then this one has been woken, and can go on
        still = reports[self._rank] == report
        return _table(reports) if again and still and deadlocked(reports) else ""

    def settle(self, rounds: int) -> bool:
        """Bring this rank to the number of rounds that any rank has begun; True when none is left open."""
        self._previous = None
        if self._ticket is None and self.rounds < rounds:
            self._begin(None)
        if self._ticket is not None:
            self._poll()
        return self._ticket is None and self.rounds >= rounds

    def _begin(self, report: Report | None) -> None:
        self._ticket = self._share(report)
        self.rounds += 1

    def _poll(self) -> list[Report] | None:
        reports = None if self._ticket is None else self._ticket.poll()
        if reports is not None:
            self._ticket = None
        return reports


def _table(reports: Sequence[Report]) -> str:
    lines = "".join(f"\n  rank {rank}: {report.what}" for rank, report in enumerate(reports))
    return "every rank waits and none can go on:" + lines
