"""One launch, one engine: rank 0 of the world chooses examples, the other ranks follow it, and all know how each one ended."""

from __future__ import annotations

import traceback
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from sp_core.launch import watch
from sp_core.testing import remarks, session
from sp_core.testing.checked import CheckedComm
from sp_core.testing.lockstep import Record, until
from sp_core.testing.mpi import MpiCarrier
from sp_core.testing.outcome import FINISHED, Catch, Kind, Outcome, RankFailure, capture, failure, failure_class, first_line
from sp_core.testing.plan import Example, Plan, Result, Spec
from sp_core.testing.remarks import Remarks
from sp_core.testing.report import announce, rerun
from sp_core.testing.run import run_body

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

MAX_COMMUNICATORS = 64
MAX_RAW_EXAMPLES = 50
ABORTED = 70  # exit code of a launch that the kit itself gives up
Lead = Callable[[Spec, Plan, Callable[[Example], Result]], None]


@dataclass(frozen=True)
class _Run:
    """An order of rank 0: run the body with this example."""

    example: Example
    raw: bool = False


@dataclass(frozen=True)
class _Stop:
    """An order of rank 0: the test is over, and this is how it ended."""

    error: tuple[str, str, int] | None = None
    text: str = ""
    skipped: bool = False


class _Pool:
    """Communicators by their world ranks, so that one is not made anew for each example. All ranks call `get` together."""

    def __init__(self) -> None:
        self._made: OrderedDict[tuple[tuple[int, ...], bool], Any] = OrderedDict()

    def get(self, control: MpiCarrier, ranks: tuple[int, ...], raw: bool) -> Any:
        """The communicator of these ranks, or None on a rank that is not one of them."""
        key = (ranks, raw)
        if key not in self._made:
            self._make_room()
            self._made[key] = self._make(control, ranks, raw)
        self._made.move_to_end(key)
        return self._made[key]

    def drop(self, ranks: tuple[int, ...], raw: bool) -> None:
        """Do not use a communicator again: messages may be left in it."""
        self._made.pop((ranks, raw), None)

    def _make(self, control: MpiCarrier, ranks: tuple[int, ...], raw: bool) -> Any:
        from mpi4py import MPI

        member = control.rank in ranks
        made = control.comm.Split(0 if member else MPI.UNDEFINED, ranks.index(control.rank) if member else 0)
        if not member:
            return None
        return made if raw else CheckedComm(made)

    def _make_room(self) -> None:
        # every rank sees the same sequence of orders, so all drop the same one
        if len(self._made) >= MAX_COMMUNICATORS:
            _, comm = self._made.popitem(last=False)
            if isinstance(comm, CheckedComm):
                comm._free()
            elif comm is not None:
                comm.Free()


_pool = _Pool()


def lead_ranks(spec: Spec, plan: Plan, lead: Lead) -> None:
    """Rank 0's side of a test: run the plan, then replay its examples raw; tell the others how it ended."""
    __tracebackhide__ = True
    control = _control()
    stop = _Stop(("Interrupted", "", 0), "rank 0 left the test")
    try:
        lead(spec, plan, lambda example: _order(control, spec, _Run(example)))
        _replay_raw(control, spec, plan)
        stop = _Stop()
    except BaseException as error:
        stop = _verdict(error)
        raise
    finally:
        watch.in_flight("")
        control.broadcast(stop)


def follow(spec: Spec) -> None:
    """The other ranks' side: do what rank 0 says until it says stop, then end as it did."""
    __tracebackhide__ = True
    control = _control()
    with _or_abort(control):
        while isinstance(order := control.broadcast(), _Run):
            _take_part(control, spec, order)
    if order.skipped:
        import pytest

        pytest.skip(order.text)
    if order.error is not None:
        raise failure_class(*order.error)(f"{order.text} (rank 0 has the whole report)")


def _control() -> MpiCarrier:
    assert session.current.control is not None
    return session.current.control


def _verdict(error: BaseException) -> _Stop:
    outcome = capture(error)
    if outcome.kind is Kind.SKIP:
        return _Stop(text=outcome.message, skipped=True)
    key = getattr(error, "key", (outcome.type, outcome.file, outcome.line))
    return _Stop(key, first_line(outcome.message))


@contextmanager
def _or_abort(control: MpiCarrier) -> Iterator[None]:
    """Outside a body every error is the kit's own. A rank that left now would let the others wait for it, so the launch ends."""
    try:
        yield
    except BaseException:
        watch.tell(f"the testing kit itself has failed on rank {control.rank}:\n{traceback.format_exc()}")
        control.comm.Abort(ABORTED)
        raise


def _order(control: MpiCarrier, spec: Spec, order: _Run) -> Result:
    with _or_abort(control):
        return _ordered(control, spec, order)


def _ordered(control: MpiCarrier, spec: Spec, order: _Run) -> Result:
    watch.in_flight(("raw replay of " if order.raw else "") + announce(order.example, spec))
    control.broadcast(order)
    return _take_part(control, spec, order)


def _take_part(control: MpiCarrier, spec: Spec, order: _Run) -> Result:
    """This rank's part of an example, then the outcomes of all."""
    sink = Remarks()
    before = remarks.enter(sink)
    try:
        with watch.limit(watch.example_seconds()):
            mine = _outcome(control, spec, order)
            everyone = _gather(control, order, mine, sink)
    finally:
        remarks.enter(before)
    watch.note(f"waits for the next example of {spec.function.__name__}")
    outcomes = [everyone[rank][0] for rank in order.example.ranks]
    if order.raw and any(outcome.kind is not Kind.OK for outcome in outcomes):
        _pool.drop(order.example.ranks, raw=True)
    return Result(outcomes, remarks.merged([remark for _, remark in everyone]))


def _outcome(control: MpiCarrier, spec: Spec, order: _Run) -> Outcome:
    comm = _pool.get(control, order.example.ranks, order.raw)
    if comm is None:
        return FINISHED
    watch.note(f"in the body of {spec.function.__name__}")
    if order.raw:
        return _bare(spec, comm, order.example)
    _, outcome = run_body(comm.family, lambda: spec.body(comm, **spec.fixtures, **order.example.values))
    watch.note(f"after the body: {outcome}")
    return cast("Outcome", comm.family.finish(outcome)[comm.rank])


def _bare(spec: Spec, comm: Intracomm, example: Example) -> Outcome:
    with Catch() as caught:
        spec.body(comm, **spec.fixtures, **example.values)
    return caught.outcome


def _gather(control: MpiCarrier, order: _Run, outcome: Outcome, sink: Remarks) -> list[tuple[Outcome, Remarks]]:
    """Every world rank's outcome and remarks; one small message where there is nothing to tell."""
    checked = None if order.raw else _pool.get(control, order.example.ranks, raw=False)
    rounds = 0 if checked is None else checked.family.rounds
    records = control.drive(until(control.post(Record(outcome.kind, digest=bool(sink), sends=rounds))), "gather")
    if checked is not None:
        checked.settle(max(record.sends for record in records))
    if all(record.kind is Kind.OK and not record.digest for record in records):
        return [(FINISHED, Remarks())] * control.size
    return control.gather((outcome, sink))


def _replay_raw(control: MpiCarrier, spec: Spec, plan: Plan) -> None:
    """Run passed examples again without the protocol, because its exchanges can hide a race."""
    __tracebackhide__ = True
    if not session.current.raw_replay:
        return
    distinct = list({str(example): example for example in plan.passed}.values())
    step = max(len(distinct) / MAX_RAW_EXAMPLES, 1.0)
    for example in (distinct[int(index * step)] for index in range(min(len(distinct), MAX_RAW_EXAMPLES))):
        session.current.tally.raw += 1
        result = _order(control, spec, _Run(example, raw=True))
        remarks.session.merge(Remarks(ratios=result.remarks.ratios))
        problem = failure(result.outcomes, example.ranks)
        if problem is not None:
            raise _raw_failure(problem, spec, example) from None


def _raw_failure(problem: RankFailure, spec: Spec, example: Example) -> RankFailure:
    head = "raw replay: this example passes with checked communicators and fails without, so its ranks race\n"
    return type(problem)(f"{head}{problem}\nexample: {spec.function.__name__}({example})\n{rerun(spec)}")
