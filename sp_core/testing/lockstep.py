"""The protocol that keeps ranks together, whatever carries its messages.

Before each blocking call all ranks of a communicator exchange one small record: the call that this
rank is about to make, or that it is done, and how. If all call the same, they go on. If all are
done, the example is over, and every rank knows every outcome. Otherwise the ranks inside a call
raise instead of blocking for ever, leave the body, and are done. The protocol has no timer, so the
outcome depends on the example alone, and Hypothesis can shrink it.
"""

from __future__ import annotations

import enum
import hashlib
import pickle
import struct
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from sp_core import progress
from sp_core.launch.places import here
from sp_core.testing.outcome import DONE, QUIET, Kind, Mismatched, Outcome, Woken

T = TypeVar("T")
Steps = Generator[None, None, T]
"""Work that yields while it has to wait for other ranks."""
Ticket = Callable[[], list[Any] | None]
"""An exchange under way: returns what every rank gave, in rank order, or None as long as some rank has given nothing."""

_MODULUS = 2**128
_RECORD = struct.Struct("<q16s16s16s")
UNCOUNTED = "not counted"
"""A message's kind if the received data is unknown. Then nothing can be said about the messages of that communicator."""


class Record(NamedTuple):
    """What one rank puts into a round. Its size is fixed, so that the exchange costs one small message."""

    kind: Kind
    digest: int = 0
    sends: int = 0
    receives: int = 0


class Carrier(ABC):
    """Carry records and values between the ranks of one communicator."""

    rank: int
    size: int

    def post(self, record: Record) -> Ticket:
        """Begin an exchange of records."""
        return self.share(record)

    @abstractmethod
    def share(self, value: object) -> Ticket:
        """Begin an exchange of values of any size."""

    @abstractmethod
    def drive(self, steps: Steps[T], what: str, *, ending: bool = False) -> T:
        """Run steps to their end and sleep in between. `ending`: this rank waits only for others to end."""

    def gather(self, value: object) -> list[Any]:
        """Return the value of every rank."""
        return self.drive(until(self.share(value)), "an exchange of values")


class BytesCarrier(Carrier):
    """Carry records and values as bytes."""

    @abstractmethod
    def begin(self, mine: bytes) -> Ticket:
        """Begin an exchange of bytes, as many on every rank."""

    def post(self, record: Record) -> Ticket:
        """Begin an exchange of records."""
        return begun(self._post(record))

    def _post(self, record: Record) -> Steps[list[Any]]:
        kind, *numbers = record
        parts = yield from until(
            self.begin(_RECORD.pack(kind, *(number.to_bytes(16, "little") for number in numbers)))
        )
        kinds_and_numbers = map(_RECORD.unpack, parts)
        return [
            Record(Kind(kind), *(int.from_bytes(raw, "little") for raw in numbers))
            for kind, *numbers in kinds_and_numbers
        ]

    def share(self, value: object) -> Ticket:
        """Begin an exchange of picklable values."""
        return begun(self._share(pickle.dumps(value)))

    def _share(self, mine: bytes) -> Steps[list[Any]]:
        sizes = yield from until(self.begin(len(mine).to_bytes(8, "little")))
        longest = max(int.from_bytes(size, "little") for size in sizes)
        parts = yield from until(self.begin(mine.ljust(longest, b"\0")))
        return [pickle.loads(part) for part in parts]


def until(ticket: Ticket) -> Steps[list[Any]]:
    """Wait for an exchange."""
    while (got := ticket()) is None:
        yield
    return got


def begun(steps: Steps[T]) -> Callable[[], T | None]:
    """Take the first step. Return a function that takes the next one, and returns the result at the end, None before."""
    result: list[T] = []

    def ask() -> T | None:
        if not result:
            try:
                next(steps)
            except StopIteration as end:
                result.append(end.value)
        return result[0] if result else None

    ask()
    return ask


class Message(NamedTuple):
    """One message between two ranks.

    Attributes:
        source: rank that sends it.
        dest: rank that receives it.
        turn: its place among those of one call between the same two ranks, or its tag.
        nbytes: its length.
        kind: type of its elements, "" if unknown. Bytes are received as elements of any kind.
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
    """A call that a rank is about to make.

    `equal` must be equal on all ranks. The messages that the ranks together send must be those that
    they together receive.
    """

    op: str
    equal: tuple[object, ...] = ()
    sends: Sequence[Message] = ()
    receives: Sequence[Message] = ()
    text: str = ""

    def record(self) -> Record:
        """Return the call in fixed size."""
        return Record(
            Kind.CALL, _hash((self.op, *self.equal)), _sum(self.sends), _sum(self.receives)
        )


def _hash(value: object) -> int:
    return int.from_bytes(hashlib.blake2b(repr(value).encode(), digest_size=16).digest(), "little")


def _sum(messages: Iterable[Message]) -> int:
    """Hash a multiset of messages so that hashes add up over ranks: all is received as sent if and only if the sums agree."""
    return (
        sum(count * _hash(tuple(message)) for message, count in Counter(messages).items())
        % _MODULUS
    )


class Decision(enum.Enum):
    """The meaning of a round of records."""

    GO = "all ranks call the same"
    AGAIN = "a rank waits for a message, nothing can be said yet"
    OVER = "all ranks are done"
    PEER_FAILED = "a rank left the example"
    MISMATCH = "the ranks call different things"


def decide(records: Sequence[Record]) -> Decision:
    """Return the meaning of a round. Every rank gets the same records, so every rank decides the same."""
    kinds = {record.kind for record in records}
    if kinds <= DONE:
        return Decision.OVER
    if kinds & (DONE - {Kind.OK}):
        return Decision.PEER_FAILED
    if Kind.WAIT in kinds:
        return Decision.AGAIN
    agree = (
        kinds == {Kind.CALL}
        and len({record.digest for record in records}) == 1
        and _balanced(records)
    )
    return Decision.GO if agree else Decision.MISMATCH


def _balanced(records: Sequence[Record]) -> bool:
    return sum(record.sends - record.receives for record in records) % _MODULUS == 0


def _nothing() -> None:
    """Do nothing."""


class Lockstep:
    """One rank's side of the protocol on one communicator."""

    def __init__(self, carrier: Carrier, name: str) -> None:
        self.carrier = carrier
        self.name = name
        # a round that was begun and not yet read, with what to say about it; it outlives an
        # interruption, as MPI writes to it
        self._open: tuple[Ticket, tuple[Call | None, object]] | None = None
        self._sharing: Ticket | None = None
        self._then: Callable[[], Any] = _nothing
        self._promised: Callable[[], Any] = _nothing  # to all peers, and not yet done
        self.forget()

    def forget(self) -> None:
        """Forget the example, in which ranks may have made different numbers of calls."""
        self.calls = 0
        self.sent: list[Message] = []
        self.received: list[Message] = []
        self.beginning: Any = None  # a `Beginning` that not all ranks have announced yet

    def call(self, call: Call, then: Callable[[], Any] = _nothing) -> Any:
        """Do `then` as soon as every rank is about to make this call.

        A rank that is interrupted in between (a signal, no memory) does it when it finishes,
        because its peers may have begun.

        Raises:
            PeerFailed: a rank has left the example.
            CollectiveMismatch: the ranks call different things.
        """
        what, steps = self.begin(call, then)
        return self.carrier.drive(meanwhile(steps), what)

    def begin(self, call: Call, then: Callable[[], Any]) -> tuple[str, Steps[Any]]:
        """Return a description of a call, and the call in steps. Between the steps this rank can do other work."""
        what = f"{call.op}({call.text}) on {self.name} at {here()}"
        return what, self._agree(call, what, then)

    def _agree(self, call: Call, what: str, then: Callable[[], Any]) -> Steps[Any]:
        self._then, decision = then, Decision.AGAIN
        self.calls += 1
        yield from self._settle()
        while decision is Decision.AGAIN:
            self._open = (self.carrier.post(call.record()), (call, what))
            decision = yield from self._settle()
        return self._keep_promise()

    @property
    def is_open(self) -> bool:
        """Whether a round has begun that this rank has not read."""
        return self._open is not None

    def waiting(self, what: str) -> None:
        """Find out, without waiting, whether a peer has left the example while this rank waits for its message."""
        if self.beginning is not None:
            self.beginning.step()
            return
        if self._open is None:
            self._open = (self.carrier.post(Record(Kind.WAIT)), (None, what))
        next(self._settle(), None)

    def finish(self, outcome: Outcome) -> Steps[list[Outcome]]:
        """Say that this rank is done until all are. Return the outcome of every rank."""
        while self.beginning is not None:
            try:
                if not self.beginning.step():
                    yield
            except (Mismatched, Woken):  # other ranks have ended without this call
                self.beginning = None
        while self._open is not None:
            yield from self._read()
        self._keep_promise()
        end = Call("the end", sends=self.sent, receives=self.received)
        record = end.record()._replace(kind=outcome.kind, digest=0)
        while True:
            self._open = (self.carrier.post(record), (end, outcome))
            decision, records, details = yield from self._read()
            if decision is Decision.OVER:
                return _outcomes(records, details)

    def _keep_promise(self) -> Any:
        promised, self._promised = self._promised, _nothing
        return promised()

    def _settle(self) -> Steps[Decision]:
        if self._open is None:
            return Decision.GO
        decision, _, details = yield from self._read()
        if decision is Decision.PEER_FAILED:
            raise Woken(_described(details))
        if decision is Decision.MISMATCH:
            calls = [call for call, said in details if call is not None and isinstance(said, str)]
            raise Mismatched(
                f"the ranks do not call the same: {_described(details)}{_unmatched(calls)}"
            )
        return decision

    def _read(self) -> Steps[tuple[Decision, list[Record], list[Any]]]:
        assert self._open is not None
        ticket, detail = self._open
        records = yield from until(ticket)
        decision, details = decide(records), []
        quiet = (
            decision is Decision.OVER
            and {record.kind for record in records} <= QUIET
            and _balanced(records)
        )
        if not quiet and decision not in (Decision.GO, Decision.AGAIN):
            self._sharing = self._sharing or self.carrier.share(detail)
            details = yield from until(self._sharing)
        if decision is Decision.MISMATCH and _fit(details):
            decision = Decision.GO
        if decision is Decision.GO:
            self._promised, self._then = (
                self._then,
                _nothing,
            )  # not kept longer: it holds the memory that it sends
        self._open = self._sharing = None
        return decision, records, details


def meanwhile(steps: Steps[Any]) -> Steps[Any]:
    """Run steps. Between them, test the comparisons that nobody waits for any more, as MPI makes progress inside every call."""
    ask = begun(boxed(steps))
    while (done := ask()) is None:
        for question in progress.of_this_rank().kept:
            question.test()
        yield
    return done[0]


def boxed(steps: Steps[T]) -> Steps[tuple[T]]:
    """Run steps. Return the result in a tuple, which is not None."""
    return ((yield from steps),)


def _described(details: Sequence[tuple[Any, object]]) -> str:
    return "; ".join(f"rank {rank}: {said}" for rank, (_, said) in enumerate(details))


def _fit(details: Sequence[tuple[Any, object]]) -> bool:
    """Return whether calls whose records differ fit after all: the same call, and bytes are received as any kind."""
    calls = [call for call, _ in details if call is not None]
    return (
        len(calls) == len(details)
        and len({(call.op, call.equal) for call in calls}) == 1
        and not _unmatched(calls)
    )


def _unmatched(calls: Sequence[Call]) -> str:
    """Name the messages that nobody sends or nobody receives. Return "" if there are none."""
    sent = Counter(message for call in calls for message in call.sends)
    received = Counter(message for call in calls for message in call.receives)
    if any(message.kind == UNCOUNTED for message in (*sent, *received)):
        return ""
    lost, missed = sorted((sent - received).elements()), sorted((received - sent).elements())
    for message in list(lost):
        other = next(
            (m for m in missed if m[:4] == message[:4] and "" in (m.kind, message.kind)), None
        )
        if other is not None:
            lost.remove(message)
            missed.remove(other)
    lines = [
        f"\n  rank {m.source} sends {m} to rank {m.dest}, which does not expect them" for m in lost
    ]
    lines += [
        f"\n  rank {m.dest} expects {m} from rank {m.source}, which does not send them"
        for m in missed
    ]
    return "".join(lines[:8])


def _outcomes(records: Sequence[Record], details: Sequence[tuple[Call, Outcome]]) -> list[Outcome]:
    """Return how every rank ended. If each is content and a message was lost, all have ended in a mismatch."""
    outcomes = [outcome for _, outcome in details] or [Outcome(record.kind) for record in records]
    lost = (
        _unmatched([end for end, _ in details])
        if {outcome.kind for outcome in outcomes} == {Kind.OK}
        else ""
    )
    text = "at the end of the body not every message sent has been received as it was sent:" + lost
    return (
        [Outcome(Kind.MISMATCH, "CollectiveMismatch", text)] * len(outcomes) if lost else outcomes
    )
