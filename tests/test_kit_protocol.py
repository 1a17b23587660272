"""Test the protocol without sending: decisions from the ranks' records, outcomes and deadlocks."""

from __future__ import annotations

import itertools
import subprocess
import sys
from random import Random

import pytest
from hypothesis import given, strategies as st

from sp_core.testing import session
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
from sp_core.testing.requests import say
from sp_core.testing.stuck import Ends, Report, _takes, deadlocked, turn

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


@given(st.lists(st.sampled_from(sorted(DONE, key=str)), min_size=1, max_size=4))
def test_a_rank_that_fails_is_never_overlooked(kinds: list[Kind]) -> None:
    found = failure([Outcome(kind, "" if kind is Kind.OK else "ValueError") for kind in kinds])
    passes = set(kinds) <= {Kind.OK, Kind.REJECT, Kind.WOKEN} and Kind.REJECT in kinds
    if {Kind.FAIL, Kind.MISMATCH} & set(kinds):
        assert found is not None
    if passes or set(kinds) in ({Kind.OK}, {Kind.SKIP}):
        assert found is None
    assert set(kinds) != {Kind.OK, Kind.SKIP} or "disagree about skipping" in str(found)


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
    for cause, error in itertools.pairwise(chain):
        error.__context__ = cause  # the error was raised while its cause was handled
    found = capture(chain[-1])
    assert (found.kind, found.type) == (kind, name)


MINE, OTHER = ("c", 0, 1, 5), ("c", 0, 1, 6)
"""Two messages: communicator "c", from rank 0, to rank 1, with tags 5 and 6."""
NO_CALLS = Report({}, "", 2, "")


def calls(on: str, a: int, b: int) -> Report:
    """Return the report of a rank with `a` and `b` calls on communicators, waiting on `on`."""
    return Report({"a": a, "b": b}, on, 2, "")


def waits(
    turn: int, ends: Ends, sent: tuple[Ends, ...] = (), received: tuple[Ends, ...] = ()
) -> Report:
    """Return the report of a rank that waits: to receive if `turn` is 0, else for a send."""
    return Report({}, "", 2, "", ((turn, ends),), () if turn else (ends,), sent, received)


SENDS, RECEIVES = waits(1, MINE, sent=(MINE,)), waits(0, MINE)
LATER = [waits(turn, MINE, sent=(MINE, MINE)) for turn in (1, 2)]
ANY_TAG = NO_CALLS._replace(accepts=(MINE, ("c", 0, 1, -1)))
TAKEN = NO_CALLS._replace(received=(MINE,))
TWO = Report({}, "", 2, "", ((0, MINE), (0, OTHER)), (MINE, OTHER))
THREE = [calls(on, a, b)._replace(size=3) for on, a, b in (("a", 1, 0), ("a", 1, 0), ("b", 0, 1))]


@pytest.mark.parametrize(
    ("reports", "expected"),
    [
        ([calls("a", 1, 0), calls("b", 0, 1)], True),
        ([calls("a", 1, 0), calls("a", 1, 0)], False),
        ([calls("", 1, 1), calls("", 1, 1)], False),
        ([calls("b", 1, 1), calls("", 1, 0)], False),  # rank 0 will notice that rank 1 ended
        ([calls("b", 1, 1), calls("a", 2, 0), Report({"c": 1}, "", 0, "")], True),
        *[([NO_CALLS, waits(0, ends)], True) for ends in (MINE, ("c", -1, 1, 5), ("c", 0, 1, -1))],
        *[([SENDS, waits(0, ends)], False) for ends in (MINE, ("c", -1, 1, 5), ("c", 0, 1, -1))],
        ([SENDS, waits(0, MINE, received=(MINE,))], False),
        ([waits(1, OTHER, sent=(OTHER,)), RECEIVES], True),
        ([SENDS, NO_CALLS], True),
        ([SENDS, TAKEN], False),  # the sender will learn that it was received
        # one receive takes the first of two messages
        *[([LATER[i], NO_CALLS._replace(accepts=(MINE,))], bool(i)) for i in (0, 1)],
        *[([LATER[i], TAKEN], bool(i)) for i in (0, 1)],
        *[([LATER[i], ANY_TAG], False) for i in (0, 1)],
        *[([NO_CALLS._replace(sent=(MINE,)), TWO._replace(every=x)], x) for x in (False, True)],
        ([NO_CALLS._replace(sent=(MINE, OTHER)), TWO._replace(every=True)], False),
        ([NO_CALLS, TWO], True),
        ([NO_CALLS, NO_CALLS], False),
        ([NO_CALLS, waits(0, MINE, received=(("c", -1, 1, 5),))], False),  # its source is unknown
        ([NO_CALLS, waits(0, MINE, received=(("c", 0, 1, -1),))], True),
        (THREE, True),
        ([*THREE[:2], THREE[2]._replace(waits_on="a", calls={"a": 1})], False),
        ([*THREE[:2], NO_CALLS._replace(calls={"a": 0})], False),
        ([*THREE[:2], NO_CALLS], True),  # the third rank does not have this communicator
        *[([LATER[i], TAKEN._replace(accepts=(MINE,))], False) for i in (0, 1)],
    ],
)
def test_a_deadlock_needs_that_no_awaited_call_or_message_can_come(
    reports: list[Report], expected: bool
) -> None:
    assert deadlocked(reports) is expected


def test_a_receive_takes_what_it_names() -> None:
    """-1 stands for any source or tag."""
    messages = [*itertools.product("cd", (0, 1), (0, 1), (5, 6))]
    for comm, source, dest, tag in itertools.product("cd", (-1, 0, 1), (0, 1), (-1, 5, 6)):
        sources, tags = ((0, 1) if source < 0 else (source,)), ((5, 6) if tag < 0 else (tag,))
        due = [*itertools.product(comm, sources, (dest,), tags)]
        assert [x for x in messages if _takes((comm, source, dest, tag), x)] == due


def test_a_message_is_known_by_its_number_among_those_with_its_ends() -> None:
    sent = [list(ends) for ends in itertools.product((1, 2, 1), (5, 6, 5), (0,), "ab")]
    for place, message in enumerate(sent):
        assert turn(sent, message) == 1 + sum(x[:3] == message[:3] for x in sent[:place])
    assert turn(sent, None) == turn([], None) == 0


def test_what_is_not_checked_is_told_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(session.current, "notes", {})
    say("Isendrecv")
    say("Isendrecv")
    text = "not checked between ranks: Isendrecv, because MPICH does not report"
    assert capsys.readouterr().err.count(text) == 1
    assert [note.startswith(text) for note in session.current.notes] == [True]


def test_importing_the_kit_does_not_start_mpi() -> None:
    """A program in whose environment the kit is installed must not start MPI for it."""
    always, with_tests = ("", ".plugin", ".launch"), (".engine", ".checked", ".agreed")
    lines = ["import sys"]
    for modules, heavy in ((always, ("mpi4py", "hypothesis")), (with_tests, ("mpi4py.MPI",))):
        lines += [f"import sp_core.testing{module}" for module in modules]
        lines += [f"assert not {set(heavy)} & sys.modules.keys()"]
    subprocess.run([sys.executable, "-c", "\n".join(lines)], check=True)
