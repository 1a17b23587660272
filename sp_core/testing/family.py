"""The communicators of one rank that live during an example: a peer may be blocked on any of them."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from sp_core.testing.lockstep import finish_all
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
        """What this rank says while it waits."""
        named = [(member.lockstep.name, member) for member in self.members]
        calls = tuple((name, member.lockstep.calls) for name, member in named)
        accepts = tuple((name, *transfer.takes) for name, member in named for transfer in member._requests if transfer.takes)
        sent, received = (
            tuple((name, *message[:3]) for name, member in named for message in getattr(member.lockstep, side))
            for side in ("sent", "received")
        )
        return Report(calls, waits_on, size, what, awaits, accepts, sent, received, not waits_on and not awaits, every)

    def release(self) -> None:
        """Let the other ranks complete what this one has started."""
        for member in self.members:
            member._release()

    def finish(self, outcome: Outcome) -> list[Outcome]:
        """End the example on every live communicator, then free all but the first.

        Returns:
            The outcome of every rank of the first communicator; a mismatch where a message was lost on any of this rank's.
        """
        everyone = finish_all([member.lockstep for member in self.members], outcome, self.release)
        rank = self.members[0].rank
        for member, outcomes in zip(self.members, everyone, strict=True):
            member._complete(any(each.kind is not Kind.OK for each in outcomes))
            if outcomes[member.rank].kind is Kind.MISMATCH and outcome.kind is Kind.OK:
                everyone[0][rank] = outcomes[member.rank]
        for member in self.members[1:]:
            member._free()
        self.members[0].children = itertools.count()  # so that an example names its communicators alike every time
        del self.members[1:]
        return everyone[0]
