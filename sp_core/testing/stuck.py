"""Find ranks that wait for each other on different communicators, without a clock.

A rank that has waited for some time tells the others where, and takes part in such rounds as long
as it waits. When every rank has said the same twice, all of them were waiting at the moment the
first round was complete. If then no exchange has all its ranks, none can ever go on. The time after
which a rank speaks up decides only when this is found.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from sp_core.testing.carriers import Steps, Ticket, begun
from sp_core.testing.outcome import Kind, Outcome

if TYPE_CHECKING:
    from sp_core.testing.comm import LockstepComm

Ends = tuple[str, int, int, int]
"""Communicator, source, destination and tag of a message.

-1 in the place of source or tag stands for any.
"""


class Report(NamedTuple):
    """What one rank says.

    Attributes:
        calls: by communicator that it is a member of, how many calls this rank has come to.
        waits_on: the communicator on whose call it waits; nothing if it has ended, or waits for a
            message.
        size: of that communicator.
        what: describes the wait.
        awaits: the messages that it waits for, and (True) those of its own whose receive it waits
            for.
        accepts: the messages that it has begun to receive.
        sent: its messages so far.
        received: those that have come to it.
        every: it waits for all of those, not for one.
    """

    calls: dict[str, int]
    waits_on: str
    size: int
    what: str
    awaits: tuple[tuple[bool, Ends], ...] = ()
    accepts: tuple[Ends, ...] = ()
    sent: tuple[Ends, ...] = ()
    received: tuple[Ends, ...] = ()
    every: bool = False

    @property
    def ended(self) -> bool:
        """Return whether the rank has left the example and will make no more calls.

        A rank that waits for it learns this in that wait.
        """
        return not self.waits_on and not self.awaits


def deadlocked(reports: Sequence[Report]) -> bool:
    """Return whether none of these ranks, all of them waiting, can go on."""
    under_way = Counter(ends for report in reports for ends in report.sent)
    under_way.subtract(ends for report in reports for ends in report.received)
    messages = list(+under_way)
    accepted = [ends for report in reports for ends in report.accepts]

    def may_go_on(report: Report) -> bool:
        if report.waits_on:
            comm, turn = report.waits_on, report.calls[report.waits_on]
            met = (
                comm in other.calls and (other.ended or other.calls[comm] >= turn)
                for other in reports
            )
            return sum(met) >= report.size
        return not report.ended and (all if report.every else any)(
            (ends not in messages or any(_takes(each, ends) for each in accepted))
            if sends
            else any(_takes(ends, each) for each in messages)
            for sends, ends in report.awaits
        )

    waiting = any(report.waits_on or report.awaits for report in reports)
    counted = not any(source < 0 for report in reports for _, source, *_ in report.received)
    return waiting and counted and not any(map(may_go_on, reports))


def _takes(pattern: Ends, message: Ends) -> bool:
    """Return whether a receive takes a message."""
    return pattern[::2] == message[::2] and all(
        pattern[place] in (message[place], -1) for place in (1, 3)
    )


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
        """Take part while this rank waits.

        Return where every rank waits if none can go on, else "".
        """
        reports = self._take_part(report, True)
        if reports is None:
            return ""
        again, self._previous = reports == self._previous, reports
        # another rank may have found it first and left: then this one has been woken, and can go on
        if not again or reports[self._rank] != report or not deadlocked(reports):
            return ""
        return "every rank waits and none can go on:" + "".join(
            f"\n  rank {r}: {said.what}" for r, said in enumerate(reports)
        )

    def settle(self, rounds: int) -> bool:
        """Begin exchanges of reports until this rank has begun `rounds` of them.

        Return whether it has, and the last exchange is complete.
        """
        self._previous = None
        self._take_part(None, self.rounds < rounds)
        return self._ticket is None and self.rounds >= rounds

    def _take_part(self, report: Report | None, begins: bool) -> list[Report] | None:
        if self._ticket is None and begins:
            self._ticket = self._share(report)
            self.rounds += 1
        reports = None if self._ticket is None else self._ticket()
        self._ticket = None if reports is not None else self._ticket
        return reports


class Family:
    """The live communicators of one rank: the first one of an example, and those made of it.

    `detector`: for ranks that are processes.
    """

    detector: Detector

    def __init__(self) -> None:
        self.members: list[LockstepComm] = []

    def report(
        self,
        waits_on: str,
        size: int,
        what: str,
        awaits: tuple[tuple[bool, Ends], ...],
        every: bool,
    ) -> Report:
        """Return this rank's report while it waits."""
        named = [(member.lockstep.name, member) for member in self.members]
        accepts = tuple(
            (name, *transfer.takes)
            for name, member in named
            for transfer in member._requests
            if transfer.takes
        )
        sent, received = (
            tuple((name, *m[:3]) for name, member in named for m in getattr(member.lockstep, which))
            for which in ("sent", "received")
        )
        calls = {name: member.lockstep.calls for name, member in named}
        return Report(calls, waits_on, size, what, awaits, accepts, sent, received, every)

    def release(self) -> None:
        """Let the other ranks complete what this one has started."""
        for member in self.members:
            member._release()

    def finish(self, outcome: Outcome) -> list[Outcome]:
        """End the example on every live communicator at once, then free all but the first.

        Returns:
            The outcome of every rank of the first communicator; a mismatch if a message was lost on
            any of this rank's.
        """
        first, *others = self.members
        everyone = first.lockstep.carrier.drive(self._finish(outcome), "has ended", ending=True)
        for member, outcomes in zip(self.members, everyone, strict=True):
            member._complete(any(each.kind is not Kind.OK for each in outcomes))
            if outcomes[member.rank].kind is Kind.MISMATCH and outcome.kind is Kind.OK:
                everyone[0][first.rank] = outcomes[member.rank]
        for member in others:
            member._free()
        first.children = (
            itertools.count()
        )  # so that an example names its communicators alike every time
        self.members = [first]
        return everyone[0]

    def _finish(self, outcome: Outcome) -> Steps[list[list[Outcome]]]:
        """Say on each communicator that this rank is done, until all are. Any may block a peer."""
        asked = [begun(member.lockstep.finish(outcome)) for member in self.members]
        found = [ask() for ask in asked]
        while None in found:
            self.release()
            yield
            found = [ask() for ask in asked]
        return [outcomes for outcomes in found if outcomes is not None]
