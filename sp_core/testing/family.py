"""The communicators of one rank that live during an example. Another rank may be blocked on any of them."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from sp_core.testing.lockstep import Steps, begun
from sp_core.testing.outcome import Kind, Outcome
from sp_core.testing.stuck import Detector, Ends, Report

if TYPE_CHECKING:
    from sp_core.testing.comm import LockstepComm


class Family:
    """The live communicators of one rank, from the first one of an example to those made out of it."""

    def __init__(self) -> None:
        self.members: list[LockstepComm] = []
        self.detector: Detector | None = None

    @property
    def rounds(self) -> int:
        """How often this rank has taken part in finding out whether all wait."""
        return 0 if self.detector is None else self.detector.rounds

    def report(self, waits_on: str, size: int, what: str, awaits: tuple[tuple[bool, Ends], ...], every: bool) -> Report:
        """Return what this rank says while it waits."""
        named = [(member.lockstep.name, member) for member in self.members]
        calls = tuple((name, member.lockstep.calls) for name, member in named)
        accepts = tuple((name, *transfer.takes) for name, member in named for transfer in member._requests if transfer.takes)
        sent = tuple((name, *message[:3]) for name, member in named for message in member.lockstep.sent)
        received = tuple((name, *message[:3]) for name, member in named for message in member.lockstep.received)
        return Report(calls, waits_on, size, what, awaits, accepts, sent, received, not waits_on and not awaits, every)

    def release(self) -> None:
        """Let the other ranks complete what this one has started."""
        for member in self.members:
            member._release()

    def finish(self, outcome: Outcome) -> list[Outcome]:
        """End the example on every live communicator at once, then free all but the first.

        Returns:
            The outcome of every rank of the first communicator; a mismatch if a message was lost on any of this rank's.
        """
        first, *others = self.members
        everyone = first.lockstep.carrier.drive(self._finish(outcome), "has ended", ending=True)
        for member, outcomes in zip(self.members, everyone, strict=True):
            member._complete(any(each.kind is not Kind.OK for each in outcomes))
            if outcomes[member.rank].kind is Kind.MISMATCH and outcome.kind is Kind.OK:
                everyone[0][first.rank] = outcomes[member.rank]
        for member in others:
            member._free()
        first.children = itertools.count()  # so that an example names its communicators alike every time
        self.members = [first]
        return everyone[0]

    def _finish(self, outcome: Outcome) -> Steps[list[list[Outcome]]]:
        """Say on each communicator that this rank is done, until all are, as a peer may be blocked on any of them."""
        asked = [begun(member.lockstep.finish(outcome)) for member in self.members]
        found = [ask() for ask in asked]
        while None in found:
            self.release()
            yield
            found = [ask() for ask in asked]
        return [outcomes for outcomes in found if outcomes is not None]
