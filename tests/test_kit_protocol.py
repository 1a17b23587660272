"""Test the protocol without sending: decisions from the ranks' records, outcomes and deadlocks."""

import itertools
import re
import unittest
from collections import Counter
from contextlib import nullcontext
from functools import partial
from random import Random

import pytest
from hypothesis import given, strategies as st
from hypothesis.errors import UnsatisfiedAssumption
from test_kit_watch import OWNERS, through

from sp_core.errors import PeerFailed
from sp_core.testing import session
from sp_core.testing.checked import method_for
from sp_core.testing.lockstep import UNCOUNTED, Call, Message, Record, _unmatched, decide
from sp_core.testing.outcome import (
    DONE,
    FINISHED,
    Kind,
    Mismatched,
    Outcome,
    Woken,
    capture,
    failure,
    outcome_of,
    raise_for_peers,
    table,
)
from sp_core.testing.stuck import Ends, Report, _takes, deadlocked, turn
from sp_core.testing.unchecked import say

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
        ((CALL, Record(Kind.REJECT)), Kind.WOKEN),
        ((Record(Kind.WAIT), Record(Kind.FAIL)), Kind.WOKEN),
        ((Record(Kind.WAIT), CALL, Record(Kind.OK)), Kind.WAIT),
        (tuple(map(Record, DONE)), Kind.OK),
    ],
)
def test_ranks_that_do_not_call_the_same(records: tuple[Record, ...], decision: Kind) -> None:
    assert decide(records) is decision


SOME = st.lists(
    st.builds(
        Message,
        *(st.integers(0, 1) for _ in range(4)),
        st.sampled_from(["", "float64", "int64"]),
    ),
    max_size=12,
)


@given(SOME, SOME, st.booleans())
def test_messages_match_by_ends_length_and_type_and_bytes_match_every_type(
    sent: list[Message], received: list[Message], counted: bool
) -> None:
    more = Counter(sent), Counter(received)
    left = 0
    for ends in itertools.product([0, 1], repeat=4):
        (lost, *losts), (missed, *misseds) = (
            [(one - other)[Message._make([*ends, kind])] for kind in ("", "float64", "int64")]
            for one, other in (more, more[::-1])
        )
        left += abs(sum(losts) - missed) + abs(sum(misseds) - lost)
    odd = [] if counted else [Message(0, 1, 0, 0, UNCOUNTED)]
    calls = Call("Barrier", (), sent + odd), Call("Barrier", (), [], received)
    assert _unmatched(calls).count("\n") == min(left, 8) * counted
    expected = Kind.MISMATCH if left and counted else Kind.CALL
    assert decide([Record(Kind.CALL, call) for call in calls]) is expected


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
        ([ValueError("own"), Woken("while freeing")], Kind.WOKEN, "ValueError"),
        ([Woken("peer"), ValueError("while freeing")], Kind.WOKEN, "PeerFailed"),
        (
            [Woken("peer"), RuntimeError("wrapped"), Woken("while freeing")],
            Kind.WOKEN,
            "PeerFailed",
        ),
        ([KeyError("cause"), ValueError("own")], Kind.FAIL, "ValueError"),
        ([ValueError("own"), Woken("1"), OSError("2"), Woken("3")], Kind.WOKEN, "ValueError"),
        ([Mismatched("all"), OSError("1"), Woken("2")], Kind.MISMATCH, "CollectiveMismatch"),
        ([Woken("peer"), Mismatched("all"), Mismatched("all")], Kind.WOKEN, "PeerFailed"),
        ([ExceptionGroup("both", [ValueError("own"), Woken("1")])], Kind.FAIL, "ExceptionGroup"),
        ([ExceptionGroup("two", [Woken("1"), Woken("2")])], Kind.WOKEN, "PeerFailed"),
    ],
)
def test_the_first_cause_counts(chain: list[BaseException], kind: Kind, name: str) -> None:
    for cause, error in itertools.pairwise(chain):
        error.__context__ = cause  # the error was raised while its cause was handled
    found = capture(chain[-1])
    assert (found.kind, found.type) == (kind, name)


@pytest.mark.parametrize(
    ("inner_first", "place"),
    [
        ("foreign library kit test", "library"),
        ("kit test library", "test"),
        ("foreign kit", "foreign"),
        ("kit", "kit"),
    ],
)
def test_an_error_is_placed_at_its_innermost_line_in_library_or_test(
    inner_first: str, place: str
) -> None:
    """If it has none, its innermost line counts. Frames of the kit are shown only if alone."""
    names = inner_first.split()
    files = {name: OWNERS[name][0] for name in names}
    with pytest.raises(ValueError, match="invalid literal") as caught:
        through([files[name] for name in names], partial(int, "x"))
    frames = caught.tb
    while frames.tb_frame.f_code.co_filename != files[names[-1]]:
        assert frames.tb_next is not None
        frames = frames.tb_next
    found = capture(caught.value.with_traceback(frames))
    assert (found.kind, found.type, found.file, found.line) == (
        *(Kind.FAIL, "ValueError"),
        *(files[place], 1),
    )
    later, cause = LookupError("later"), LookupError("cause")
    later.__context__, cause.__cause__ = caught.value, caught.value
    for text in (found.traceback, capture(later).traceback, capture(cause).traceback):
        shown = {name for name in names if f'File "{files[name]}"' in text}
        assert shown == ({*names} - {"kit"} or {"kit"})


PLACE = ("/a/b/c.py", 7, "the traceback\n\n")
WRONG, SECOND = (Outcome(Kind.FAIL, name, "\n why \nx", *PLACE) for name in ("KeyError", "OSError"))
DIFFER = Outcome(Kind.MISMATCH, "CollectiveMismatch", "they differ", *PLACE)
PEER = Outcome(Kind.WOKEN, "PeerFailed", "another", *PLACE)
SKIPS, REJECTS = Outcome(Kind.SKIP, "Skipped", "no"), Outcome(Kind.REJECT)


@pytest.mark.parametrize(
    ("outcomes", "lead", "name"),
    [
        ([FINISHED, PEER, WRONG, DIFFER, SECOND], 2, "KeyError at b/c.py:7"),
        ([REJECTS, SECOND], 1, "OSError at b/c.py:7"),
        ([PEER, DIFFER, DIFFER], 1, "CollectiveMismatch"),
        ([PEER, FINISHED], 0, "PeerFailed at b/c.py:7"),
        ([FINISHED, SKIPS, PEER], None, "SkipMismatch"),
    ],
)
@pytest.mark.parametrize("is_world", [True, False])
def test_a_failure_tells_what_every_rank_did(
    outcomes: list[Outcome], lead: int | None, name: str, *, is_world: bool
) -> None:
    """The text begins with the lowest rank that failed by itself."""
    size = len(outcomes)
    ranks = (*range(size),) if is_world else (*range(size, 0, -1),)
    where = "" if is_world else f" (world ranks {ranks})"
    lines = [f"  rank {rank}: {outcome}" for rank, outcome in enumerate(outcomes)]
    expected = ["begin: the ranks disagree about skipping" + where + ":", *lines]
    if lead is not None:
        one = outcomes[lead]
        head = f"begin: {one.type} on rank {lead} of {size}{where}: {one.message}"
        ends = [f"traceback of rank {lead}:", "the traceback"]
        expected = [*head.split("\n"), "what each rank did:", *lines, *ends]
    for found in (failure(outcomes, ranks, "begin: "), failure(outcomes, [*ranks], "begin: ")):
        assert str(found).split("\n") == expected
        assert type(found).__name__ == f"RankFailure[{name}]"
        assert vars(type(found))["key"][1:] == (PLACE[:2] if " at " in name else ("", 0))
    assert type(failure(outcomes)) is type(found)
    assert str(failure(outcomes)).split("\n")[1:] == expected[1:]


@pytest.mark.parametrize(
    ("outcome", "told"),
    [
        (FINISHED, "finished"),
        (WRONG, "failed: KeyError at b/c.py:7: why"),
        (Outcome(Kind.WOKEN), "stopped"),
        (Outcome(Kind.FAIL, "OSError", " \n", "c.py", 1), "failed: OSError at c.py:1: "),
    ],
)
def test_an_outcome_is_told_in_one_line(outcome: Outcome, told: str) -> None:
    assert str(outcome) == told
    assert table([outcome, FINISHED]) == f"  rank 0: {told}\n  rank 1: finished"


@pytest.mark.parametrize("error", [None, KeyError()])
@pytest.mark.parametrize("kind", sorted(DONE, key=str))
def test_a_rank_without_an_error_learns_of_another_that_did_not_finish(
    kind: Kind, error: BaseException | None
) -> None:
    outcomes = [FINISHED, Outcome(kind)]
    learns = error is None and kind not in (Kind.OK, Kind.REJECT)
    told = re.escape(f"another rank has failed:\n{table(outcomes)}")
    with pytest.raises(PeerFailed, match=told) if learns else nullcontext():
        raise_for_peers(error, outcomes)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (None, Kind.OK),
        (pytest.skip.Exception("x"), Kind.SKIP),
        (pytest.xfail.Exception("x"), Kind.SKIP),
        (pytest.exit.Exception("x"), Kind.SKIP),
        (unittest.SkipTest("x"), Kind.SKIP),
        (UnsatisfiedAssumption(), Kind.REJECT),
        (KeyboardInterrupt(), Kind.FAIL),
    ],
)
def test_what_pytest_and_hypothesis_raise_has_a_kind_of_its_own(
    error: BaseException | None, kind: Kind
) -> None:
    def body() -> None:
        if error is not None:
            raise error

    assert (outcome_of(body).kind, capture(error).kind) == (kind, kind)


def test_causes_that_form_a_circle_have_an_end() -> None:
    loop = KeyError("a")
    loop.__cause__, loop.__context__ = ValueError("b"), OSError("c")
    loop.__cause__.__context__ = loop
    assert capture(loop).type == "KeyError"


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


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("Get_rank", ""),
        ("Isend", "_message"),
        ("Dup", "_agreed"),
        ("Psend_init", "_unchecked"),
        ("Call_of_a_later_version", "_unchecked"),
    ],
)
def test_a_call_is_made_by_the_method_of_its_kind(name: str, method: str) -> None:
    assert method_for(name) == method


def test_what_is_not_checked_is_told_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(session.current, "notes", {})
    say("Isendrecv")
    say("Isendrecv")
    text = "not checked between ranks: Isendrecv, because MPICH does not report"
    assert capsys.readouterr().err.count(text) == 1
    assert [note.startswith(text) for note in session.current.notes] == [True]
