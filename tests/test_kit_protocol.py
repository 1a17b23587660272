"""The protocol without a carrier: what a round means, and what outcomes amount to."""

from __future__ import annotations

import subprocess
import sys
from random import Random

import pytest
from hypothesis import given, strategies as st

from sp_core.testing.lockstep import Call, Record, decide
from sp_core.testing.outcome import (
    DONE,
    Kind,
    Mismatched,
    Outcome,
    Woken,
    capture,
    failure,
)
from sp_core.testing.signatures import exchange
from sp_core.testing.stuck import Ends, Report, deadlocked

pytestmark = pytest.mark.mpi_skip  # one process is enough

CALL = Record(Kind.CALL, Call("Barrier"))
ANY = st.sampled_from([CALL, *(Record(kind) for kind in Kind if kind is not Kind.CALL)])


@given(st.lists(ANY, min_size=1, max_size=5), st.randoms())
def test_a_round_means_the_same_in_any_order_of_ranks(
    records: list[Record], random: Random
) -> None:
    found = decide(records)
    assert (found is Kind.CALL) == all(record == CALL for record in records)
    assert (found is Kind.OK) == all(record.kind in DONE for record in records)
    random.shuffle(records)
    assert decide(records) is found


@pytest.mark.parametrize(
    ("records", "decision"),
    [
        ((CALL, Record(Kind.CALL, Call("Dup"))), Kind.MISMATCH),
        ((CALL, Record(Kind.OK)), Kind.MISMATCH),
        ((CALL, Record(Kind.FAIL)), Kind.WOKEN),
        ((Record(Kind.WAIT), Record(Kind.FAIL)), Kind.WOKEN),
        ((Record(Kind.WAIT), CALL, Record(Kind.OK)), Kind.WAIT),
    ],
)
def test_ranks_that_do_not_call_the_same(records: tuple[Record, ...], decision: Kind) -> None:
    assert decide(records) is decision


Sizes = list[tuple[int, int]]


def announced(rank: int, size: int, sends: Sizes, recvs: Sizes) -> Record:
    """What a rank tells the others before it exchanges messages."""
    return Record(Kind.CALL, exchange(rank, size, sends, recvs))


MATRICES = st.integers(1, 5).flatmap(
    lambda p: st.lists(st.lists(st.integers(0, 3), min_size=p, max_size=p), min_size=p, max_size=p)
)


@given(MATRICES, st.data())
def test_messages_agree_iff_what_is_sent_is_received(
    sizes: list[list[int]], data: st.DataObject
) -> None:
    p = len(sizes)

    def records(expected: list[list[int]]) -> list[Record]:
        return [
            announced(r, p, list(enumerate(sizes[r])), [(s, expected[s][r]) for s in range(p)])
            for r in range(p)
        ]

    assert decide(records(sizes)) is Kind.CALL
    source, dest = data.draw(st.integers(0, p - 1)), data.draw(st.integers(0, p - 1))
    wrong = [list(row) for row in sizes]
    wrong[source][dest] += 1
    assert decide(records(wrong)) is Kind.MISMATCH


def outcome(kind: Kind) -> Outcome:
    return Outcome(kind, "ValueError", "text", "x.py", 1) if kind is not Kind.OK else Outcome(kind)


@given(
    st.lists(
        st.sampled_from([kind for kind in Kind if kind in DONE]),
        min_size=1,
        max_size=4,
    )
)
def test_a_rank_that_fails_is_never_overlooked(kinds: list[Kind]) -> None:
    found = failure([outcome(kind) for kind in kinds])
    if {Kind.FAIL, Kind.MISMATCH} & set(kinds):
        assert found is not None
    if (
        set(kinds) == {Kind.OK}
        or set(kinds) == {Kind.SKIP}
        or (set(kinds) <= {Kind.OK, Kind.REJECT, Kind.WOKEN} and Kind.REJECT in kinds)
    ):
        assert found is None
    if set(kinds) == {Kind.OK, Kind.SKIP}:
        assert "disagree about skipping" in str(found)


def raised(*errors: BaseException) -> BaseException:
    """The last error, raised while the ones before were handled."""
    previous: BaseException | None = None
    for error in errors:
        error.__context__ = previous
        previous = error
    assert previous is not None
    return previous


@pytest.mark.parametrize(
    ("chain", "kind", "name"),
    [
        ([ValueError("own")], Kind.FAIL, "ValueError"),
        ([Woken("peer")], Kind.WOKEN, "PeerFailed"),
        ([Mismatched("all")], Kind.MISMATCH, "CollectiveMismatch"),
        ([ValueError("own"), Woken("while freeing")], Kind.FAIL, "ValueError"),
        ([Woken("peer"), ValueError("while freeing")], Kind.WOKEN, "PeerFailed"),
        (
            [Woken("peer"), RuntimeError("wrapped"), Woken("while freeing")],
            Kind.WOKEN,
            "PeerFailed",
        ),
        ([KeyError("cause"), ValueError("own")], Kind.FAIL, "ValueError"),
    ],
)
def test_the_first_cause_counts(chain: list[BaseException], kind: Kind, name: str) -> None:
    found = capture(raised(*chain))
    assert (found.kind, found.type) == (kind, name)


def test_a_deadlock_needs_every_exchange_to_lack_a_rank() -> None:
    def report(on: str, a: int, b: int) -> Report:
        return Report({"a": a, "b": b}, on, 2, "")

    assert deadlocked([report("a", 1, 0), report("b", 0, 1)])
    assert not deadlocked([report("a", 1, 0), report("a", 1, 0)])
    assert not deadlocked([report("", 1, 1), report("", 1, 1)])
    assert not deadlocked(
        [report("b", 1, 1), report("", 1, 0)]
    )  # the other has ended, which this one will find out
    elsewhere = Report({"c": 1}, "", 0, "")
    assert deadlocked(
        [report("b", 1, 1), report("a", 2, 0), elsewhere]
    )  # a third one that is not part of it has ended


def test_a_deadlock_of_messages_needs_that_none_is_under_way() -> None:
    def report(
        awaits: tuple[int, Ends], sent: tuple[Ends, ...] = (), received: tuple[Ends, ...] = ()
    ) -> Report:
        accepts = () if awaits[0] else (awaits[1],)
        return Report({}, "", 2, "", (awaits,), accepts, sent, received)

    message, other = ("c", 0, 1, 5), ("c", 0, 1, 6)
    idle = Report({}, "", 2, "")
    for pattern in (message, ("c", -1, 1, 5), ("c", 0, 1, -1)):
        assert deadlocked([idle, report((False, pattern))])
        assert not deadlocked([report((True, message), (message,)), report((False, pattern))])
        assert (
            deadlocked(
                [report((True, message), (message,)), report((False, pattern), (), (message,))]
            )
            is False
        )
    assert deadlocked([report((True, other), (other,)), report((False, message))])
    assert deadlocked([report((True, message), (message,)), idle])
    assert not deadlocked(
        [report((True, message), (message,)), idle._replace(received=(message,))]
    )  # the sender will be told
    for turn, ends in ((1, False), (2, True)):  # one receive takes the first of two messages
        sender = report((turn, message), (message, message))
        assert deadlocked([sender, idle._replace(accepts=(message,))]) is ends
        assert not deadlocked([sender, idle._replace(accepts=(message, ("c", 0, 1, -1)))])
        received = idle._replace(received=(message,))
        assert deadlocked([sender, received]) is ends
        assert not deadlocked([sender, received._replace(accepts=(message,))])


ALWAYS = ("", ".plugin", ".launch")
WITH_TESTS = (".engine", ".checked", ".threads", ".carriers", ".agreed", ".adjoint")


@pytest.mark.parametrize(
    ("modules", "heavy"), [(ALWAYS, ("mpi4py", "hypothesis")), (WITH_TESTS, ("mpi4py.MPI",))]
)
def test_importing_the_kit_does_not_start_mpi(
    modules: tuple[str, ...], heavy: tuple[str, ...]
) -> None:
    imports = "; ".join(f"import sp_core.testing{module}" for module in modules)
    code = f"import sys; {imports}; print([m for m in {heavy!r} if m in sys.modules])"
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout.strip()
        == "[]"
    )
