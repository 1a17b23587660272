"""Find deadlocks between ranks that wait on different communicators, without a clock.

A rank that has waited for some time begins an exchange: an all-gather of one `Report` per rank of
the example. It takes part in further exchanges as long as it waits. If two exchanges in a row give
the same reports, all ranks were waiting when the first was complete. If then no awaited call or
message can come, no rank can ever go on. The time after which a rank begins an exchange decides
only when a deadlock is found.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from sp_core.testing.carriers import MpiCarrier, Steps, Ticket, begun, patiently
from sp_core.testing.outcome import FINISHED, Kind, Mismatched, Outcome, outcome_of

Ends = tuple[str, int, int, int]
"""Communicator, source, destination and tag of a message.

A negative source or tag stands for any.
"""


class Report(NamedTuple):
    """What one rank tells the other ranks while it waits.

    Attributes:
        calls: by name of each of the rank's communicators, the number of calls that it has begun
            there.
        waits_on: name of the communicator on whose call it waits; "" if it waits for messages or
            has ended.
        size: number of ranks of that communicator.
        what: describes the wait.
        awaits: (0, ends) for each message that it waits to receive; (n, ends) for each message
            sent whose receive it waits for, the n-th of its messages with these ends.
        accepts: the messages that it has begun to receive.
        sent: the messages that it has sent in this example.
        received: the messages that it has received in this example.
        every: whether it waits for all of `awaits`, not for one.
    """

    calls: dict[str, int]
    waits_on: str
    size: int
    what: str
    awaits: tuple[tuple[int, Ends], ...] = ()
    accepts: tuple[Ends, ...] = ()
    sent: tuple[Ends, ...] = ()
    received: tuple[Ends, ...] = ()
    every: bool = False

    @property
    def ended(self) -> bool:
        """Return whether the rank has left the example and will make no more calls.

        Another rank that waits for this rank's calls or messages learns of the end in that wait
        (see `Lockstep.waiting`).
        """
        return not self.waits_on and not self.awaits


def deadlocked(reports: Sequence[Report]) -> bool:
    """Return whether no rank can go on, given the reports of all ranks, which all wait.

    Return False if the source of a received message is not known.
    """
    received = Counter(ends for report in reports for ends in report.received)
    messages = list(Counter(ends for report in reports for ends in report.sent) - received)
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
            turn <= received[ends] + sum(_takes(each, ends) for each in accepted)
            if turn  # messages with the same ends are received in the order in which they were sent
            else any(_takes(ends, each) for each in messages)
            for turn, ends in report.awaits
        )

    waiting = any(report.waits_on or report.awaits for report in reports)
    counted = not any(source < 0 for report in reports for _, source, *_ in report.received)
    return waiting and counted and not any(map(may_go_on, reports))


def turn(sent: Sequence[Any], message: Any) -> int:
    """Return the number of `message` among the sent messages to its destination with its tag.

    The first such message has number 1. Return 0 if `message` is None.
    """
    same = [each for each in sent if message is not None and each[:3] == message[:3]]
    return max((number for number, each in enumerate(same, 1) if each is message), default=0)


def _takes(pattern: Ends, message: Ends) -> bool:
    """Return whether a receive with the ends `pattern` takes a message."""
    pairs = zip(pattern[1::2], message[1::2], strict=True)
    return pattern[::2] == message[::2] and all(one < 0 or one == other for one, other in pairs)


class Family:
    """The communicators of one rank in an example, without those that are freed.

    The first is the one that the body gets; all later ones are made from it.

    Args:
        carrier: exchanges values between all ranks of the example, on a communicator used for
            nothing else, for the search for deadlocks. None if ranks are threads.

    Attributes:
        stopped: whether a check has raised an error in this example, other than those that set
            `stopped` of a member's lockstep.
        held: whether the end of a test's body or of a `with` block frees the first member.
        members: these communicators, in the order in which they were made.
        pending: functions that copy the send buffer of a transfer between threads once it may be
            read, and return whether they have done so.
    """

    def __init__(self, carrier: MpiCarrier | None = None) -> None:
        self.members: list[Any] = []
        self.pending: list[Callable[[], bool]] = []
        self.stopped = self.held = False
        self._carrier = carrier
        self._ticket: Ticket[list[Report]] | None = None
        self._previous: list[Report] | None = None
        self._rounds = 0

    def look(
        self,
        comm: Any,
        what: str,
        pending: Sequence[Any] = (),
        *,
        every: bool = False,
        ending: bool = False,
    ) -> None:
        """Take part in the search for a deadlock. Raise `Mismatched` if every rank waits for ever.

        Args:
            comm: communicator on which this rank waits.
            what: describes this rank's wait.
            pending: messages that this rank waits for; none if it waits for a collective.
            every: whether this rank waits for all of `pending`, not for one.
            ending: whether this rank only waits for other ranks to end; then it does not raise.
        """
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
        report = Report(
            calls={name: member.lockstep.calls for name, member in named},
            waits_on="" if ending or pending else comm.lockstep.name,
            size=comm.size,
            what=what,
            awaits=tuple(transfer.waits() for transfer in pending),
            accepts=accepts,
            sent=sent,
            received=received,
            every=every,
        )
        if (reports := self._take_part(report, begins=True)) is None:
            return
        again, self._previous = reports == self._previous, reports
        # another rank may have found the deadlock and left; that ends this rank's wait
        is_same = again and reports[self.members[0].rank] == report
        if not ending and is_same and deadlocked(reports):
            self.stopped = True
            table = "".join(f"\n  rank {r}: {said.what}" for r, said in enumerate(reports))
            raise Mismatched(f"every rank waits and none can go on:{table}")

    def _take_part(self, report: Report | None, *, begins: bool) -> list[Report] | None:
        """Poll the exchange of reports under way. If there is none and `begins`, begin one.

        `report` is this rank's contribution to an exchange that begins; None if this rank has ended
        the example. Return the reports of all ranks when the exchange is complete, else None.
        """
        if self._ticket is None and begins and self._carrier is not None:
            self._ticket = self._carrier.share(report, list)
            self._rounds += 1
        reports = None if self._ticket is None else self._ticket()
        self._ticket = None if reports is not None else self._ticket
        return reports

    def release(self) -> None:
        """Hand over the data of started sends and collectives, so that peers can complete."""
        pending, self.pending = self.pending, []
        self.pending += [release for release in pending if not release()]

    def finish(self, outcome: Outcome) -> list[Outcome]:
        """End the example on every communicator at once, then free all but the first.

        Every rank calls this, and waits until all ranks have ended the example.

        Args:
            outcome: how this rank's body ended. It becomes a failure if the body returned and left
                a request incomplete.

        Returns:
            The outcome of every rank of the first communicator, in rank order. This rank's becomes
            a mismatch if a message was lost on any of its communicators.
        """
        first, *others = self.members
        if outcome == FINISHED:
            end = "the end of the body"
            outcome = outcome_of(lambda: [each.ensure_complete(end) for each in self.members])
        if self.stopped or any(x.lockstep.stopped or x.lockstep.raised for x in self.members):
            outcome = replace(outcome, replayable=False)
        everyone = first.lockstep.carrier.drive(self._finish(outcome), "has ended", ending=True)
        for member, outcomes in zip(self.members, everyone, strict=True):
            if not member.lockstep.uneven:
                member._complete(any(each.kind is not Kind.OK for each in outcomes))
            if outcomes[member.rank].kind is Kind.MISMATCH and outcome.kind is Kind.OK:
                everyone[0][first.rank] = outcomes[member.rank]
        for member in others:
            member._free()
        if self._carrier is not None:
            polled = MpiCarrier(first.lockstep.carrier.comm)  # takes no part in the search
            rounds, self._previous = max(polled.gather(self._rounds)), None

            def settled() -> bool:
                self._take_part(None, begins=self._rounds < rounds)
                return self._ticket is None and self._rounds >= rounds

            patiently(settled)
        # every run of an example gives its communicators the same names
        first.children = itertools.count()
        self.members, self.stopped = [first], False
        return [replace(each, reusable=not first.lockstep.uneven) for each in everyone[0]]

    def _finish(self, outcome: Outcome) -> Steps[list[list[Outcome]]]:
        """Return a generator that ends the example on all communicators, and yields while it waits.

        The result is the outcomes by communicator and rank. All communicators are polled, because a
        peer may wait on any of them.
        """
        asked = [begun(member.lockstep.finish(outcome)) for member in self.members]
        while not all(found := [ask() for ask in asked]):
            self.release()
            yield
        return [outcomes for (outcomes,) in found]
