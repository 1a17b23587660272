"""The communicators of one rank that live during an example: a peer may be blocked on any of them."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from sp_core.testing.lockstep import finish_all
from sp_core.testing.outcome import Outcome
from sp_core.testing.stuck import Detector

if TYPE_CHECKING:
    from sp_core.testing.comm import LockstepComm


class Family:
    """The live communicators of one rank, from the first one of an example to those made out of it."""

    def __init__(self) -> None:
        self.members: list[LockstepComm] = []
        self.detector: Detector | None = None

    def finish(self, outcome: Outcome) -> list[Outcome]:
        """End the example on every live communicator, then free all but the first.

        Returns:
            The outcome of every rank of the first communicator.
        """
        for member in self.members:
            member._release()
        outcomes = finish_all([member.lockstep for member in self.members], outcome)
        for member in self.members:
            member._complete()
        for member in self.members[1:]:
            member._free()
        self.members[0].children = itertools.count()  # so that an example names its communicators alike every time
        del self.members[1:]
        return outcomes
