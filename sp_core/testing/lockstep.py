"""The lockstep protocol: the ranks of a communicator compare each call before they make it.

Before each blocking call all ranks exchange one `Record` (a round): the call that the rank is about
to make, or that it is done, and how. If all call the same, they go on. If all are done, the example
is over, and every rank knows every outcome. Otherwise the ranks inside a call raise instead of
blocking for ever, leave the body, and are done. The protocol has no timer, so the outcome depends
on the example alone, and Hypothesis can shrink it. A rank announces a call by its record. For steps
and tickets see `carriers`.
"""

from __future__ import annotations

import enum
import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from sp_core import progress
from sp_core.launch.places import here
from sp_core.testing.carriers import Carrier, Record, Steps, Ticket, begun, boxed, until
from sp_core.testing.outcome import DONE, QUIET, Kind, Mismatched, Outcome, Woken

if TYPE_CHECKING:
    from sp_core.testing.comm import LockstepComm

UNCOUNTED = "not counted"
"""Kind of a message of unknown size. Messages of its communicator are then not compared."""
_MODULUS = 2**128


class Message(NamedTuple):
    """One message between two ranks.

    Attributes:
        source: rank that sends it.
        dest: rank that receives it.
        turn: number among the messages of one call between these two ranks, or the tag.
        nbytes: length of the message.
        kind: type of the elements, "" if unknown. Bytes are received as elements of any kind.
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

    Args:
        op: name of the call.
        equal: values that must be equal on all ranks.
        sends: messages that this rank sends. All ranks together must send what they receive.
        receives: messages that this rank receives.
        text: arguments as text, for error messages.
    """

    op: str
    equal: tuple[object, ...] = ()
    sends: Sequence[Message] = ()
    receives: Sequence[Message] = ()
    text: str = ""

    def record(self) -> Record:
        """Return the record of fixed size that the ranks compare."""
        balance = (_sum(self.sends) - _sum(self.receives)) % _MODULUS
        return Record(Kind.CALL, _hash((self.op, *self.equal)), balance)


def _hash(value: object) -> int:
    return int.from_bytes(hashlib.blake2b(repr(value).encode(), digest_size=16).digest(), "little")


def _sum(messages: Iterable[Message]) -> int:
    """Return the sum of the hashes of messages; it is equal for the same messages in any order."""
    return sum(map(_hash, map(tuple, messages)))


class Decision(enum.Enum):
    """What the records of all ranks, exchanged before a call, mean together."""

    GO = "all ranks call the same"
    AGAIN = "a rank waits for a message, nothing can be said yet"
    OVER = "all ranks are done"
    PEER_FAILED = "a rank left the example"
    MISMATCH = "the ranks call different things"


def decide(records: Sequence[Record]) -> Decision:
    """Return what the records of all ranks mean together.

    Every rank gets the same records, so every rank decides the same.
    """
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
    """Return whether the messages sent are those received, over all ranks."""
    return sum(record.balance for record in records) % _MODULUS == 0


def _nothing() -> None:
    """Do nothing."""


class Lockstep:
    """One rank's side of the protocol on one communicator.

    Args:
        carrier: exchanges values between the communicator's ranks.
        name: of the communicator in error messages.

    Attributes:
        open: ticket of the exchange of records under way, and what to tell if they differ; or None.
        calls: number of calls begun in this example.
        sent, received: messages that this rank has sent and received in this example.
        beginning: latest call that not all ranks have announced yet, or None.
    """

    def __init__(self, carrier: Carrier, name: str) -> None:
        self.carrier = carrier
        self.name = name
        # outlives an interruption of the wait, as MPI writes to its memory
        self.open: tuple[Ticket, tuple[Call | None, object]] | None = None
        self._sharing: Ticket | None = None
        self._then: Callable[[], Any] = _nothing
        self._promised: Callable[[], Any] = (
            _nothing  # the call that all ranks have agreed on, until it is made
        )
        self.forget()

    def forget(self) -> None:
        """Reset the counts of calls and messages of an example, which may differ over ranks."""
        self.calls = 0
        self.sent: list[Message] = []
        self.received: list[Message] = []
        self.beginning: Beginning | None = None

    def call(self, call: Call, then: Callable[[], Any] = _nothing) -> Any:
        """Wait until every rank is about to make this call, then return the result of `then`.

        If a signal or a lack of memory interrupts the wait, `finish` calls `then`, because peers
        may have begun the call.

        Raises:
            PeerFailed: a rank has left the example by an error.
            CollectiveMismatch: the ranks call different things.
        """
        what, steps = self.begin(call, then)
        return self.carrier.drive(meanwhile(steps), what)

    def begin(self, call: Call, then: Callable[[], Any]) -> tuple[str, Steps[Any]]:
        """Return a call's description, and a generator that awaits all ranks, then makes the call.

        While the generator yields, this rank can do other work. The ranks compare `call`; the
        generator's result is that of `then`.
        """
        what = f"{call.op}({call.text}) on {self.name} at {here()}"
        return what, self._agree(call, what, then)

    def _agree(self, call: Call, what: str, then: Callable[[], Any]) -> Steps[Any]:
        self._then, decision = then, Decision.AGAIN
        self.calls += 1
        yield from self._settle()
        while decision is Decision.AGAIN:
            self.open = (self.carrier.post(call.record()), (call, what))
            decision = yield from self._settle()
        return self._keep_promise()

    def waiting(self, what: str) -> None:
        """Raise if a peer has failed while this rank awaits what `what` describes. Do not block."""
        if self.beginning is not None:
            self.beginning.step()
            return
        if self.open is None:
            self.open = (self.carrier.post(Record(Kind.WAIT)), (None, what))
        next(self._settle(), None)

    def finish(self, outcome: Outcome) -> Steps[list[Outcome]]:
        """Return a generator: it tells other ranks that this one is done, and yields until all are.

        The generator's result is every rank's outcome, in rank order; `outcome` is this rank's.
        """
        while self.beginning is not None:
            try:
                if not self.beginning.step():
                    yield
            except (Mismatched, Woken):  # other ranks have ended without announcing this call
                self.beginning = None
        while self.open is not None:
            yield from self._read()
        self._keep_promise()
        end = Call("the end", sends=self.sent, receives=self.received)
        record = end.record()._replace(kind=outcome.kind, digest=0)
        while True:
            self.open = (self.carrier.post(record), (end, outcome))
            decision, records, details = yield from self._read()
            if decision is Decision.OVER:
                return _outcomes(records, details)

    def _keep_promise(self) -> Any:
        promised, self._promised = self._promised, _nothing
        return promised()

    def _settle(self) -> Steps[Decision]:
        if self.open is None:
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
        assert self.open is not None
        ticket, detail = self.open
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
            # `_then` holds the memory that it sends, so it is not kept longer
            self._promised, self._then = self._then, _nothing
        self.open = self._sharing = None
        return decision, records, details


def meanwhile(steps: Steps[Any]) -> Steps[Any]:
    """Return a generator that runs `steps`, and before each `yield` tests unfinished comparisons.

    `sp_core.agreement` has begun these comparisons, and nobody waits for them. MPI makes progress
    on all requests inside every call, and so must this generator.
    """
    ask = begun(boxed(steps))
    while (done := ask()) is None:
        for question in progress.of_this_rank().kept:
            question.test()
        yield
    return done[0]


def _described(details: Sequence[tuple[Any, object]]) -> str:
    """Return text with what each rank calls or how it ended, given (call, text) of each rank."""
    return "; ".join(f"rank {rank}: {said}" for rank, (_, said) in enumerate(details))


def _fit(details: Sequence[tuple[Any, object]]) -> bool:
    """Return whether calls whose records differ fit after all, given (call, text) of each rank.

    Calls fit if only element types differ: bytes are received as elements of any kind.
    """
    calls = [call for call, _ in details if call is not None]
    return (
        len(calls) == len(details)
        and len({(call.op, call.equal) for call in calls}) == 1
        and not _unmatched(calls)
    )


def _unmatched(calls: Sequence[Call]) -> str:
    """Return lines that name the messages that nobody sends or nobody receives, or ""."""
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
    """Return how every rank ended, in rank order.

    If every body returned and a message was lost, every rank has ended in a mismatch.
    """
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


class Beginning:
    """A request for a non-blocking call that is made when all ranks have announced it.

    A rank announces a call by sending a record of it to the other ranks. Until all ranks have, this
    rank can do other work.

    Args:
        comm: communicator of the call.
        call: compared over the ranks.
        make: makes the call, and returns the request of MPI.
    """

    def __init__(self, comm: LockstepComm, call: Call, make: Callable[[], Any]) -> None:
        self._comm = comm
        self._what, self._steps = comm.lockstep.begin(call, make)
        self._made: Any = None
        self._is_driven = False
        self._before: Beginning | None = comm.lockstep.beginning
        comm.lockstep.beginning = self

    def step(self) -> bool:
        """Make the call if all ranks have announced it; do not wait. Return whether it is made."""
        if self._made is None and not self._is_driven:
            self._comm.progress()
            try:
                if self._before is not None and not self._before.step():
                    return False
                self._before = None
                next(self._steps)
            except BaseException as end:
                self._end()
                if not isinstance(end, StopIteration):
                    raise
                self._made = end.value
        return self._made is not None

    def settle(self) -> Any:
        """Wait until all ranks have announced the call, make it, and return what `make` returns."""
        if self._made is None:
            if self._before is not None:
                self._before.settle()
            self._end()
            self._is_driven = True
            self._made = self._comm.lockstep.carrier.drive(meanwhile(self._steps), self._what)
        return self._made

    def _end(self) -> None:
        if self._comm.lockstep.beginning is self:
            self._comm.lockstep.beginning = None

    def Test(self) -> bool:
        """Return whether the call is complete, without waiting."""
        return self.step() and bool(self.settle().Test())

    def Wait(self) -> bool:
        """Wait until all ranks have announced the call and it is complete. Return True."""
        return bool(self.settle().Wait())


def abandon(requests: Iterable[Any]) -> None:
    """Let the example end though these requests are incomplete. Their buffers must stay alive."""
    for request in requests:
        beginning = getattr(request, "beginning", request)
        made, comm = getattr(beginning, "_made", beginning), getattr(beginning, "_comm", None)
        if comm is not None:
            ended = {id(made), id(getattr(made, "transfer", None))}
            comm._requests = [other for other in comm._requests if id(other) not in ended]
