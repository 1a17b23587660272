"""The lockstep protocol: before each call, the ranks check that all make the same call.

Before each blocking call all ranks exchange one `Record`. It has the call that the rank is about to
make, or says that the rank is done and how it ended. If all make the same call, they go on. If all
are done, the example is over, and every rank knows every outcome. Otherwise the ranks inside a call
raise instead of blocking for ever, leave the body, and are done. The protocol has no timer, so the
outcome depends on the example alone, and Hypothesis can shrink it. A rank announces a call by its
record. For steps and tickets see `carriers`.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

from sp_core import progress
from sp_core.launch import watch
from sp_core.launch.watch import here
from sp_core.testing.carriers import Carrier, Steps, Ticket, begun, until
from sp_core.testing.outcome import DONE, Kind, Mismatched, Outcome, Woken

UNCOUNTED = "not counted"
"""Kind of a message of unknown size. It switches off the check of its communicator's messages."""


class Message(NamedTuple):
    """One message between two ranks.

    Attributes:
        source: rank that sends it.
        dest: rank that receives it.
        turn: the message's number among those of one collective between these two ranks; its tag if
            it is a point-to-point message.
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
        sends: messages that this rank sends. Each must be in `receives` of its destination.
        receives: messages that this rank receives. Each must be in `sends` of its source.
        text: arguments as text, for error messages.
    """

    op: str
    equal: tuple[object, ...] = ()
    sends: Sequence[Message] = ()
    receives: Sequence[Message] = ()
    text: str = ""


class Record(NamedTuple):
    """What one rank tells the other ranks before a call, or when it is done.

    Attributes:
        kind: whether the rank is about to make a call, waits for a message, or is done, and then
            how it ended.
        call: the call that the rank is about to make, with the messages that it sends or receives.
            If the rank is done, it has the messages of the whole example. None if the rank waits.
        said: text that describes the call (with its file and line) or the wait; the `Outcome` if
            the rank is done.
    """

    kind: Kind
    call: Call | None = None
    said: Any = ""


def decide(records: Sequence[Record]) -> Kind:
    """Return the decision that follows from the records of all ranks.

    Every rank gets the same records, so every rank decides the same.

    Returns:
        CALL: all ranks make the same call. WAIT: a rank waits for a message, so there is no
        decision yet. OK: all ranks are done. WOKEN: a rank has left the example by an error.
        MISMATCH: the ranks make different calls.
    """
    kinds = {record.kind for record in records}
    if kinds <= DONE:
        return Kind.OK
    if kinds & (DONE - {Kind.OK}):
        return Kind.WOKEN
    if Kind.WAIT in kinds:
        return Kind.WAIT
    calls = [record.call for record in records if record.call is not None]
    same = all(one == other for one, other in pairwise((call.op, call.equal) for call in calls))
    return Kind.CALL if kinds == {Kind.CALL} and same and not _unmatched(calls) else Kind.MISMATCH


Judged = tuple[Kind, list[Record]]
"""The records of all ranks, in rank order, and the decision that follows from them."""


def judged(records: list[Record]) -> Judged:
    """Return what the ranks do next, which `decide` finds from their records, and the records."""
    return decide(records), records


class Lockstep:
    """Run the lockstep protocol for one rank of one communicator.

    An example is one run of a test's body on all ranks.

    Args:
        carrier: exchanges records between the communicator's ranks.
        name: the communicator's name in error messages.

    Attributes:
        open: the exchange of records that has begun and not ended, or None.
        calls: number of calls begun in this example.
        sent, received: lists of the messages of this rank in this example.
        beginning: latest call that not all ranks have announced yet, or None.
        stopped: whether a check has raised an error in this example.
        raised: numbers of the calls that raised an error although all ranks made the same call.
        uneven: whether `raised` differed between ranks at the end of the example. If so, messages
            of those calls may still arrive.
    """

    def __init__(self, carrier: Carrier, name: str) -> None:
        self.carrier = carrier
        self.name = name
        # kept even if the wait is interrupted, because MPI still writes to its memory
        self.open: Ticket[Judged] | None = None
        self._then: Callable[[], Any] | None = None  # makes the call of this exchange
        self.uneven = False
        self.forget()

    def forget(self) -> None:
        """Forget the last example's calls, messages and errors; they may differ between ranks."""
        self.calls = 0
        self.sent: list[Message] = []
        self.received: list[Message] = []
        self.beginning: Beginning | None = None
        self.stopped, self.raised = False, list[int]()

    def agree(self, call: Call, what: str, then: Callable[[], Any]) -> Steps[Any]:
        """Return a generator that yields until all ranks have announced matching calls.

        It then makes the call, and returns its result. While it yields, this rank can do other
        work.

        Args:
            call: this rank's call, for comparison with those of the other ranks.
            what: the call in words, for error messages.
            then: makes the call.
        """
        self.calls += 1
        yield from self._settle()
        decision = Kind.WAIT
        while decision is Kind.WAIT:
            self.open = self.carrier.share(Record(Kind.CALL, call, what), judged)
            self._then = then
            decision, made = yield from self._settle()
        return made

    def waiting(self, what: str) -> None:
        """Raise `PeerFailed` if a peer has failed; do not block. `what` describes the wait."""
        if self.beginning is not None:
            self.beginning.step()
            return
        if self.open is None:
            self.open = self.carrier.share(Record(Kind.WAIT, None, what), judged)
        next(self._settle(), None)

    def finish(self, outcome: Outcome) -> Steps[list[Outcome]]:
        """Return a generator: it tells other ranks that this one is done, and yields until all are.

        `outcome` is this rank's. The generator's result is every rank's outcome, in rank order.
        """
        while self.beginning is not None:
            try:
                if not self.beginning.step():
                    yield
            except (Mismatched, Woken):  # other ranks have ended without announcing this call
                self.beginning = None
        while self.open is not None:
            yield from self._read()
        mine = Record(outcome.kind, self.ending("the end"), outcome)
        while True:
            self.open = self.carrier.share(mine, judged)
            decision, records, _ = yield from self._read()
            if decision is Kind.OK:
                ends: list[Any] = [record.call for record in records]
                self.uneven = len({end.equal for end in ends}) > 1
                return _outcomes(records)

    def ending(self, op: str) -> Call:
        """Return the record of a last call, which ends the example on this communicator.

        It lists all messages that this rank has sent and received, and the calls that raised. Thus
        the ranks compare what they sent with what arrived.

        Args:
            op: the name of this call.
        """
        raised = tuple(self.raised)
        text = f"after errors inside calls {raised}" if raised else ""
        return Call(op, (raised,), list(self.sent), list(self.received), text)

    def _settle(self) -> Steps[tuple[Kind, Any]]:
        if self.open is None:
            return Kind.CALL, None
        decision, records, made = yield from self._read()
        if decision not in (Kind.WOKEN, Kind.MISMATCH):
            return decision, made
        self.stopped = True
        said = "; ".join(f"rank {rank}: {record.said}" for rank, record in enumerate(records))
        if decision is Kind.WOKEN:
            raise Woken(said)
        calls = [each.call for each in records if each.call and each.kind is Kind.CALL]
        raise Mismatched(f"the ranks do not call the same: {said}{_unmatched(calls)}")

    def _read(self) -> Steps[tuple[Kind, list[Record], Any]]:
        """Read the records of all ranks, and make the call if all ranks make the same.

        The result is (decision, see `decide`; the records; the result of the call or None).
        """
        assert self.open is not None
        decision, records = yield from until(self.open)
        # drop `_then` as soon as possible: it keeps the memory alive that the call sends
        self.open, then, self._then = None, self._then, None
        if then is None or decision is not Kind.CALL:
            return decision, records, None
        self.raised.append(self.calls)
        made = then()
        self.raised.pop()
        return decision, records, made


def meanwhile(comm: Any, steps: Steps[Any]) -> Steps[Any]:
    """Return a generator that runs `steps`, and advances other operations before each `yield`.

    MPI makes progress on all requests inside every call, so this generator does too. It advances
    the transfers that `comm` has started, and agreements (`sp_core.agreement`) for which no rank
    waits. An agreement has no requests before a poll has begun it.

    Args:
        comm: the communicator of the call.
        steps: the generator of the call, whose result is returned.
    """
    ask = begun(steps)
    while not (done := ask()):
        comm.progress()
        for question in progress.of_this_rank().kept:
            if question.requests:
                question.test()
        yield
    (result,) = done
    return result


def _unmatched(calls: Sequence[Call]) -> str:
    """Return lines that name each message sent but not expected, or expected but not sent.

    Bytes are received as elements of any kind. An empty message has no kind. Return "" if all
    messages match.
    """
    sent = Counter(message for call in calls for message in call.sends)
    received = Counter(message for call in calls for message in call.receives)
    if any(message.kind == UNCOUNTED for message in (*sent, *received)):
        return ""
    lost, missed = sorted((sent - received).elements()), sorted((received - sent).elements())
    for message in list(lost):
        of_any_kind = not (message.kind and message.nbytes)
        fitting = (m for m in missed if m[:4] == message[:4])
        other = next((m for m in fitting if of_any_kind or not m.kind), None)
        if other is not None:
            lost.remove(message)
            missed.remove(other)
    unread = [f"rank {m.source} sends {m} to rank {m.dest}, which does not expect" for m in lost]
    unsent = [
        f"rank {m.dest} expects {m} from rank {m.source}, which does not send" for m in missed
    ]
    return "".join(f"\n  {line} them" for line in [*unread, *unsent][:8])


def _outcomes(records: Sequence[Record]) -> list[Outcome]:
    """Return how every rank ended, in rank order.

    If every body returned and a message was lost, every rank has ended in a mismatch.
    """
    outcomes = [record.said for record in records]
    ends: list[Any] = [record.call for record in records]
    lost = _unmatched(ends)
    if not lost or {record.kind for record in records} != {Kind.OK}:
        return outcomes
    text = "at the end of the body not every message sent has been received as it was sent:" + lost
    return [Outcome(Kind.MISMATCH, "CollectiveMismatch", text)] * len(outcomes)


class Beginning:
    """A call that is made as soon as all ranks have announced it; it is also the call's request.

    A rank announces a call by sending a record of it to the other ranks. Until all ranks have, this
    rank can do other work.

    Args:
        comm: communicator of the call, with `lockstep` and `progress`.
        call: the call, which must match on all ranks.
        make: makes the call. Returns the request of MPI, or the result of a blocking call.
    """

    def __init__(self, comm: Any, call: Call, make: Callable[[], Any]) -> None:
        self._comm = comm
        place = here()
        watch.note(f"in {call.op}({call.text}) at {place}")
        self._what = f"{call.op}({call.text}) on {comm.lockstep.name} at {place}"
        self._steps = comm.lockstep.agree(call, self._what, make)
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
                self._before = None  # it keeps the memory alive that its call has sent
                next(self._steps)
            except BaseException as end:
                self._end()
                if not isinstance(end, StopIteration):
                    raise
                self._made = end.value
        return self._made is not None

    def settle(self) -> Any:
        """Wait until all ranks have announced the call, make it, and return its request or result.

        A signal or a lack of memory may interrupt the wait with an exception. `Lockstep.finish`
        then makes the call, because other ranks may be inside it.

        Raises:
            PeerFailed: the test's body has raised an error on another rank.
            CollectiveMismatch: the ranks make different calls.
        """
        if self._made is None:
            if self._before is not None:
                self._before.settle()
            self._end()
            self._is_driven = True
            self._made = self._comm.lockstep.carrier.drive(
                meanwhile(self._comm, self._steps), self._what
            )
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
        made = getattr(getattr(request, "beginning", request), "_made", request)
        begun_there = getattr(made, "transfer", made)
        if hasattr(begun_there, "done"):
            begun_there.done = True
