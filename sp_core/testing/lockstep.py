"""The protocol that keeps ranks together, free of what carries it.

Before each blocking call all ranks of a communicator exchange one small record: what I am about to call, or that I am done,
and how. All call the same: everybody goes on. All done: the example is over, and everybody knows every outcome. Anything else:
the ranks inside a call raise instead of blocking for ever, leave the body, and are done. There is no timer in this, so the
outcome is a function of the example alone, and Hypothesis can shrink it.
"""

from __future__ import annotations

import enum
import hashlib
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

from sp_core import progress
from sp_core.launch.places import here
from sp_core.testing.outcome import DONE, QUIET, Kind, Mismatched, Outcome, Woken

T = TypeVar("T")
Steps = Generator[None, None, T]
"""Work that yields while it has to wait for other ranks."""

_MODULUS = 2**128
UNCOUNTED = "not counted"
"""In the place of a message's kind: what has come is not known, so nothing can be said about the messages of that communicator."""


class Record(NamedTuple):
    """What one rank puts into a round: fixed size, so that the exchange costs one small message."""

    kind: Kind
    digest: int = 0
    sends: int = 0
    receives: int = 0


class Ticket(Protocol):
    """An exchange under way."""

    def poll(self) -> list[Any] | None:
        """What every rank gave, in rank order, or None as long as some rank has not given anything."""
        ...


class Request(Protocol):
    """What a non-blocking call returns."""

    def Test(self) -> bool:
        """Make progress; True once the transfer is complete."""
        ...

    def Wait(self) -> bool:
        """Wait until the transfer is complete."""
        ...


class Carrier(Protocol):
    """Carries records and values between the ranks of one communicator."""

    rank: int
    size: int

    def post(self, record: Record) -> Ticket:
        """Begin an exchange of records."""
        ...

    def share(self, value: object) -> Ticket:
        """Begin an exchange of values of any size."""
        ...

    def drive(self, steps: Steps[T], what: str, *, ending: bool = False) -> T:
        """Run steps to their end and wait patiently in between; `ending` where this rank waits only for others to end."""
        ...


class Message(NamedTuple):
    """One message between two ranks.

    Attributes:
        source: rank that sends it.
        dest: rank that receives it.
        turn: counts those of one call between the same two, because MPI keeps their order; the tag of a message of its own.
        nbytes: its length.
        kind: its elements, nothing where that is not known; bytes are received as elements of any kind.
    """

    source: int
    dest: int
    turn: int
    nbytes: int
    kind: str = ""

    def __str__(self) -> str:
        return f"{self.nbytes} bytes" + (f" of {self.kind}" if self.kind else "")


@dataclass(frozen=True)
class Call:
    """What a rank is about to call.

    `equal` must be equal on all ranks; the messages that the ranks together send must be those that they together receive.
    """

    op: str
    equal: tuple[object, ...] = ()
    sends: Sequence[Message] = ()
    receives: Sequence[Message] = ()
    text: str = ""

    def record(self) -> Record:
        """The call in fixed size."""
        return Record(Kind.CALL, _hash((self.op, *self.equal)), _sum(self.sends), _sum(self.receives))


def _hash(value: object) -> int:
    return int.from_bytes(hashlib.blake2b(repr(value).encode(), digest_size=16).digest(), "little")


def _sum(messages: Iterable[Message]) -> int:
    """A hash of a multiset that adds up over ranks: what is sent equals what is received iff the sums are equal."""
    return sum(count * _hash(tuple(message)) for message, count in Counter(messages).items()) % _MODULUS


class Decision(enum.Enum):
    """What a round of records means."""

    GO = "all ranks call the same"
    AGAIN = "a rank waits for a message, nothing can be said yet"
    OVER = "all ranks are done"
    PEER_FAILED = "a rank left the example"
    MISMATCH = "the ranks call different things"


def decide(records: Sequence[Record]) -> Decision:
    """What a round means. Every rank gets the same records, so every rank decides the same."""
    kinds = {record.kind for record in records}
    if kinds <= DONE:
        return Decision.OVER
    if kinds & (DONE - {Kind.OK}):
        return Decision.PEER_FAILED
    if Kind.WAIT in kinds:
        return Decision.AGAIN
    return Decision.GO if kinds == {Kind.CALL} and _agree(records) else Decision.MISMATCH


def _agree(records: Sequence[Record]) -> bool:
    return len({record.digest for record in records}) == 1 and _balanced(records)


def _balanced(records: Sequence[Record]) -> bool:
    return (sum(r.sends for r in records) - sum(r.receives for r in records)) % _MODULUS == 0


def needs_details(decision: Decision, records: Sequence[Record]) -> bool:
    """Whether the ranks must tell each other more than fits into a record."""
    if decision is Decision.OVER:
        return any(record.kind not in QUIET for record in records) or not _balanced(records)
    return decision in (Decision.PEER_FAILED, Decision.MISMATCH)


def until(ticket: Ticket) -> Steps[list[Any]]:
    """Wait for an exchange."""
    while (got := ticket.poll()) is None:
        yield
    return got


def _nothing() -> None:
    """A promise that has been kept."""


class Lockstep:
    """One rank's side of the protocol on one communicator."""

    def __init__(self, carrier: Carrier, name: str) -> None:
        self.carrier = carrier
        self.name = name
        self.calls = 0  # that this rank has come to
        self.sent: list[Message] = []  # since the example began
        self.received: list[Message] = []
        # a round begun and not yet read, with what to say about it; it outlives an interruption, as MPI writes to its memory
        self._open: tuple[Ticket, object] | None = None
        self._sharing: Ticket | None = None
        self._then: Callable[[], Any] = _nothing
        self._promised: Callable[[], Any] = _nothing  # to all peers, and not yet done
        self.beginning: Any = None  # a `Beginning` that not all ranks have announced yet

    def call(self, call: Call, then: Callable[[], Any] = lambda: None) -> Any:
        """Do what is announced as soon as every rank is about to do it; raise `PeerFailed` or `CollectiveMismatch` when one is not.

        A rank that is interrupted in between (a signal, no memory) does it when it finishes: its peers may have begun.
        """
        what = self.told(call)
        return self.carrier.drive(meanwhile(self.begin(call, what, then)), what)

    def told(self, call: Call) -> str:
        """What to say about a call that this rank is about to make."""
        return f"{call.op}({call.text}) on {self.name} at {here()}"

    def begin(self, call: Call, what: str, then: Callable[[], Any]) -> Steps[Any]:
        """`call` in steps, between which this rank can do other work; nothing else is called here before the last one."""
        self._then, decision = then, Decision.AGAIN
        self.calls += 1
        yield from self._settle()
        while decision is Decision.AGAIN:
            self._open = (self.carrier.post(call.record()), (call, what))
            decision = yield from self._settle()
        return self._keep_word()

    def forget(self) -> None:
        """Forget the example, in which ranks may have made different numbers of calls."""
        self.calls, self.beginning, self.sent, self.received = 0, None, [], []

    @property
    def is_open(self) -> bool:
        """Whether a round has begun that this rank has not read."""
        return self._open is not None

    def waiting(self, what: str) -> None:
        """Look, without waiting, whether a peer has left the example while this rank waits for its message."""
        if self.beginning is not None:
            self.beginning.step()
            return
        if self._open is None:
            self._open = (self.carrier.post(Record(Kind.WAIT)), what)
        next(self._settle(), None)

    def finish(self, outcome: Outcome) -> Steps[list[Outcome]]:
        """Say that this rank is done until all are.

        Returns:
            The outcome of every rank.
        """
        while self.beginning is not None:
            try:
                if not self.beginning.step():
                    yield
            except (Mismatched, Woken):  # other ranks have ended without this call
                self.beginning = None
        while self._open is not None:
            yield from self._read()
        self._keep_word()
        end = Call("the end", sends=self.sent, receives=self.received)
        record = end.record()._replace(kind=outcome.kind, digest=0)
        while True:
            self._open = (self.carrier.post(record), (end, outcome))
            decision, records, details = yield from self._read()
            if decision is Decision.OVER:
                return _outcomes(records, details)

    def _keep_word(self) -> Any:
        promised, self._promised = self._promised, _nothing
        return promised()

    def _settle(self) -> Steps[Decision]:
        if self._open is None:
            return Decision.GO
        decision, _, details = yield from self._read()
        if decision is Decision.PEER_FAILED:
            raise Woken(_describe(details))
        if decision is Decision.MISMATCH:
            raise Mismatched(_explain(details))
        return decision

    def _read(self) -> Steps[tuple[Decision, list[Record], list[Any]]]:
        assert self._open is not None
        ticket, detail = self._open
        records = yield from until(ticket)
        decision = decide(records)
        details: list[Any] = []
        if needs_details(decision, records):
            self._sharing = self._sharing or self.carrier.share(detail)
            details = yield from until(self._sharing)
        if decision is Decision.MISMATCH and _fit(details):
            decision = Decision.GO
        if decision is Decision.GO:
            self._promised, self._then = self._then, _nothing  # not kept longer: it holds the memory that it sends
        self._open = self._sharing = None
        return decision, records, details


def meanwhile(steps: Steps[Any]) -> Steps[Any]:
    """Run steps. Between them, test the comparisons that nobody waits for any more, as MPI makes progress inside every call."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value
        for question in progress.of_this_rank().kept:
            question.test()
        yield


def _text(detail: object) -> str:
    return str(detail[1]) if isinstance(detail, tuple) else str(detail)


def _describe(details: Sequence[object]) -> str:
    return "; ".join(f"rank {rank}: {_text(detail)}" for rank, detail in enumerate(details))


def _explain(details: Sequence[Any]) -> str:
    """Who calls what, and which messages nobody sends or nobody receives."""
    calls = [detail[0] for detail in details if isinstance(detail, tuple) and isinstance(detail[1], str)]
    return "the ranks do not call the same: " + _describe(details) + _unmatched(calls)


def _fit(details: Sequence[Any]) -> bool:
    """Whether calls whose records differ fit after all: the same call, and the messages too, as bytes are of any kind."""
    calls = [detail[0] for detail in details if isinstance(detail, tuple)]
    return len(calls) == len(details) and len({(call.op, call.equal) for call in calls}) == 1 and not _unmatched(calls)


def _unmatched(calls: Sequence[Call]) -> str:
    """Which messages nobody sends or nobody receives; nothing if there are none."""
    sent = Counter(message for call in calls for message in call.sends)
    received = Counter(message for call in calls for message in call.receives)
    if any(message.kind == UNCOUNTED for message in (*sent, *received)):
        return ""
    lost, missed = sorted((sent - received).elements()), sorted((received - sent).elements())
    for message in list(lost):
        other = next((m for m in missed if m[:4] == message[:4] and "" in (m.kind, message.kind)), None)
        if other is not None:
            lost.remove(message)
            missed.remove(other)
    lines = [f"\n  rank {m.source} sends {m} to rank {m.dest}, which does not expect them" for m in lost]
    lines += [f"\n  rank {m.dest} expects {m} from rank {m.source}, which does not send them" for m in missed]
    return "".join(lines[:8])


def _outcomes(records: Sequence[Record], details: Sequence[Any]) -> list[Outcome]:
    """How every rank ended; all in a mismatch where each is content and a message was lost."""
    outcomes = [outcome for _, outcome in details] or [Outcome(record.kind) for record in records]
    lost = _unmatched([end for end, _ in details]) if {outcome.kind for outcome in outcomes} == {Kind.OK} else ""
    text = "at the end of the body not every message sent has been received as it was sent:" + lost
    return [Outcome(Kind.MISMATCH, "CollectiveMismatch", text)] * len(outcomes) if lost else outcomes


def finish_all(locksteps: Sequence[Lockstep], outcome: Outcome, release: Callable[[], object]) -> list[list[Outcome]]:
    """Finish on several communicators at once, since a peer may be blocked on any of them.

    Args:
        locksteps: this rank's, one for each communicator.
        outcome: of this rank.
        release: lets the other ranks complete what this one has started, as the end of MPI does.

    Returns:
        For each of them the outcome of every rank.
    """
    jobs = [lockstep.finish(outcome) for lockstep in locksteps]
    return locksteps[0].carrier.drive(_together(jobs, release), "has ended", ending=True)


def _together(jobs: Sequence[Steps[list[Outcome]]], release: Callable[[], object]) -> Steps[list[list[Outcome]]]:
    results: dict[int, list[Outcome]] = {}
    while len(results) < len(jobs):
        for index, job in enumerate(jobs):
            if index not in results:
                try:
                    next(job)
                except StopIteration as stop:
                    results[index] = stop.value
        release()
        yield
    return [results[index] for index in range(len(jobs))]
