"""Test how examples are chosen, run once more, and told of."""

import inspect
import itertools
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock, call

import hypothesis
import pytest
from hypothesis import strategies as st
from kit.failing import Alike

from sp_core.testing import engine, given, session
from sp_core.testing.outcome import FINISHED, Kind, Outcome, RankFailure, failure_class, leave
from sp_core.testing.plan import (
    Example,
    Result,
    Spec,
    _decorated,
    fits,
    ranks_of,
    search,
    sweep,
)
from sp_core.testing.session import Session

pytestmark = pytest.mark.mpi_skip


@pytest.fixture
def own_session(monkeypatch: pytest.MonkeyPatch) -> Session:
    """Give a test its own session, without SP_PROFILE."""
    monkeypatch.delenv("SP_PROFILE", raising=False)
    monkeypatch.setattr(session, "current", Session(node_id="test_a.py::test_b"))
    return session.current


def plain(comm: Any, n: int = 0) -> None:
    """Do nothing."""


def decorated() -> Any:
    """Return a new test with decorators of Hypothesis, and with a digest as its plugin sets it."""
    test: Any = given(nprocs=2, n=st.integers(0, 9))(plain)
    test = hypothesis.reproduce_failure("6.0", b"")(hypothesis.example(nprocs=3, n=1)(test))
    test._hypothesis_internal_add_digest = b"digest"
    return test


@pytest.mark.parametrize("seed", [None, 5])
@pytest.mark.parametrize("own", [None, 3])
def test_hypothesis_gets_the_body_and_its_decorators(
    own_session: Session, own: int | None, seed: int | None
) -> None:
    own_session.seed = seed
    test = decorated() if own is None else hypothesis.seed(own)(decorated())
    drawn = dict.fromkeys(("nprocs", "n"), st.just(1))
    made: Any = _decorated(Spec(plain, {}, plain, vars(test)), lambda **_: None, drawn, None)
    driver = made.hypothesis.inner_test
    for name in ("__name__", "__qualname__", "__module__"):
        assert getattr(driver, name) == getattr(plain, name)
    assert inspect.unwrap(driver) is plain
    kinds = {name: x.kind for name, x in inspect.signature(driver).parameters.items()}
    assert kinds == dict.fromkeys(("nprocs", "n"), inspect.Parameter.KEYWORD_ONLY)
    kept = ("use_seed", "use_reproduce_failure", "add_digest")
    names = {*(f"_hypothesis_internal_{name}" for name in kept), "hypothesis_explicit_examples"}
    marks = {name: vars(test)[name] for name in names & vars(test).keys()}
    assert len(marks) == (3 if own is None else 4)
    assert marks.items() <= vars(made).items()
    if own is None and seed is not None:
        marks["_hypothesis_internal_use_seed"] = "5 test_b"
    assert {name: vars(driver)[name] for name in names & vars(driver).keys()} == marks


def left(run: Callable[[], object]) -> tuple[Any, str]:
    """Return how a function leaves a test: kind and text of the exception; None and "" if not."""
    try:
        run()
    except (pytest.skip.Exception, pytest.xfail.Exception, pytest.exit.Exception) as way:
        return type(way), str(way)
    return None, ""


NUMBERS = [*range(-1, 5), 128, 129, True, 2.0, "2", None]
TUPLES = [(), (0,), (2, 0), (1, 1), (0, -1), (0, 127), (0, 128), ("0",), [0, 1], {0}, (0, 1.0)]


@pytest.mark.parametrize("there", [0, 3])
@pytest.mark.parametrize("nprocs", [*NUMBERS, *TUPLES], ids=repr)
def test_ranks_fit_a_launch_that_has_them(own_session: Session, nprocs: Any, there: int) -> None:
    own_session.ranks = there
    many = nprocs if isinstance(nprocs, int) else 0
    ranks = [*range(many)] if isinstance(nprocs, int) else nprocs
    valid = isinstance(ranks, list | tuple) and all(isinstance(x, int) for x in ranks)
    valid = valid and len(ranks) == len(set(ranks)) > 0 <= min(ranks)
    if not valid or (not there and max(ranks) > 127):
        with pytest.raises(ValueError, match="neither a number of ranks nor a tuple of different"):
            fits(nprocs)
        return
    assert fits(nprocs) == (not there or set(ranks) <= set(range(there)))
    assert ranks_of(nprocs) == tuple(ranks)
    shown = Example(tuple(ranks), {"n": 7})
    assert shown.nprocs == (len(ranks) if tuple(ranks) == (*range(len(ranks)),) else tuple(ranks))
    assert str(shown) == f"nprocs={shown.nprocs}, n=7"


@pytest.mark.parametrize("there", [0, 3, 9])
def test_no_more_ranks_are_drawn_than_the_launch_has(
    own_session: Session, monkeypatch: pytest.MonkeyPatch, there: int
) -> None:
    own_session.ranks = there
    monkeypatch.setattr(engine, "search", searched := Mock())
    given(max_ranks=4)(plain)()
    assert repr(searched.call_args.args[2]) == repr(st.integers(1, min(4, there or 4)))


@pytest.mark.parametrize("there", [2, 3])
def test_a_draw_that_needs_more_ranks_is_drawn_again(own_session: Session, there: int) -> None:
    own_session.ranks, attempt = there, Mock(return_value={Kind.OK})
    search(Spec(plain, {}, plain, {}), attempt, st.integers(1, 64), {}, 60)
    drawn = {len(each.args[0].ranks) for each in attempt.call_args_list}
    assert drawn <= {*range(1, there + 1)}
    assert len(drawn) > 1


@pytest.mark.parametrize(
    ("sizes", "ran"), [((1, 2, 5), (1, 2)), (((0, 2), 3, (3,)), ((0, 2), 3)), ((5, (7, 0)), None)]
)
def test_sizes_that_the_launch_has_are_run(own_session: Session, sizes: Any, ran: Any) -> None:
    own_session.ranks, attempt = 3, Mock(return_value={Kind.OK})
    skipped = pytest.skip.Exception, "needs 5 ranks, the launch has 3"
    assert left(lambda: sweep(Spec(plain, {}, plain, {}), attempt, sizes)) == (
        (None, "") if ran else skipped
    )
    due = [call(Example(ranks_of(size), {}), "failed with {}") for size in ran or ()]
    assert attempt.call_args_list == due


SKIP, EXIT, XFAIL = (Outcome(Kind.SKIP, name, name) for name in ("Skipped", "Exit", "XFailed"))


@pytest.mark.parametrize(
    ("outcomes", "kind", "text"),
    [
        ([FINISHED, SKIP], None, ""),
        ([FINISHED, XFAIL], None, ""),
        ([SKIP, SKIP], pytest.skip.Exception, "Skipped"),
        ([XFAIL, SKIP], pytest.xfail.Exception, "XFailed"),
        ([SKIP, XFAIL], pytest.skip.Exception, "Skipped"),
        ([SKIP, EXIT], pytest.exit.Exception, "Exit"),
        ([FINISHED, EXIT], pytest.exit.Exception, "Exit"),
        ([Outcome(Kind.FAIL, "Exit", "no"), FINISHED], None, ""),
        ([Outcome(Kind.FAIL), EXIT], None, ""),
        ([EXIT, SKIP, Outcome(Kind.MISMATCH)], None, ""),
    ],
)
def test_ranks_leave_a_test_together_but_one_may_end_the_session(
    outcomes: list[Outcome], kind: Any, text: str
) -> None:
    assert left(lambda: leave(outcomes)) == (kind, text)


def judge(many: int, most: int, bad: Any = lambda example: False) -> list[tuple[int, bool]]:
    """Return number and kind of the examples that are run, if `many` pass and `most` run again."""
    ran: list[tuple[int, bool]] = []

    def attempt(spec: Spec, example: Example) -> Result:
        ran.append((example.values["n"], example.raw))
        return Result(bad(example) or [FINISHED] * 2, {})

    def plan(spec: Spec, judged: Any) -> None:
        for n in range(many):
            judged(Example((0, 1), {"n": Alike(n)}), "keep {}")

    engine._lead(Spec(plain, {}, plain, {}), plan, attempt, most)
    return ran


@pytest.mark.parametrize("many", [0, 1, 3, 7, 10])
@pytest.mark.parametrize("most", [0, 1, 3, 5, 50])
def test_passed_examples_run_again_evenly_spread(
    own_session: Session, many: int, most: int
) -> None:
    again = [n for n, raw in judge(many, most) if raw]
    assert len(again) == min(many, most) == own_session.tally.raw
    assert again == [place * many // len(again) for place in range(len(again))]
    assert own_session.tally.sizes == ({2: many} if many else {})


@pytest.mark.parametrize(
    "outcome", [Outcome(Kind.REJECT), Outcome(Kind.OK, replayable=False)], ids=["rejected", "ended"]
)
def test_what_cannot_run_without_checks_does_not_run_again(
    own_session: Session, outcome: Outcome
) -> None:
    odd = judge(4, 9, lambda example: example.values["n"] % 2 and [FINISHED, outcome])
    assert [n for n, raw in odd if raw] == [0, 2]


@pytest.mark.parametrize("raw", [False, True])
def test_a_failure_names_its_example_and_how_to_run_it_again(
    own_session: Session, raw: bool
) -> None:
    wrong = [FINISHED, Outcome(Kind.FAIL, "KeyError", "oh", "b.py", 3)]
    with pytest.raises(RankFailure) as caught:
        judge(2, 1, lambda example: example.raw == raw and wrong)
    assert type(caught.value).__name__ == "RankFailure[KeyError at b.py:3]"
    text = str(caught.value)
    example = "example: plain(nprocs=2, n=0)" if raw else "keep nprocs=2, n=0"
    assert text.endswith(f"\n{example}\nrun it again: python -m pytest test_a.py::test_b")
    assert text.startswith("raw replay: this example passes") == raw
    assert ("--sp-no-raw-replay leaves the second run out" in text) == raw


def test_errors_are_told_with_their_notes_and_those_within() -> None:
    first, second, third = ValueError("one"), KeyError("two"), TypeError("")
    for error, notes in ((first, ["a\n", "", "b"]), (second, [" c "])):
        for note in notes:
            error.add_note(note)
    group = ExceptionGroup("all", [first, ExceptionGroup("some", [second, third])])
    group.add_note("last")
    assert engine._told(first) == "one\na\nb"
    assert engine._told(group) == "all\n\none\na\nb\n\nsome\n\n'two'\n c\n\n\nlast"


@pytest.mark.parametrize("bug", [failure_class("KeyError", "b.py", 3)("two"), ValueError("two")])
def test_several_bugs_of_one_test_are_told_together(own_session: Session, bug: Exception) -> None:
    """Other groups of errors are raised as they are."""
    group = ExceptionGroup("both", [ValueError("one"), bug])
    with pytest.raises((RankFailure, ExceptionGroup)) as caught:
        engine._lead(Spec(plain, {}, plain, {}), Mock(side_effect=group), Mock())
    if isinstance(bug, RankFailure):
        assert str(caught.value).startswith("both\n\none\n\ntwo\nrun it again: python")
        assert type(caught.value) is not RankFailure
        assert vars(type(caught.value))["key"] == ("ExceptionGroup", "", 0)
    else:
        assert caught.value is group


@pytest.mark.parametrize("wanted", [*itertools.product([False, True], repeat=7)])
def test_the_command_to_run_a_test_again_has_what_this_run_has(
    monkeypatch: pytest.MonkeyPatch, own_session: Session, wanted: tuple[bool, ...]
) -> None:
    profile, examples, ranks, device, shared, seed, named = wanted
    monkeypatch.setenv("SP_PROFILE", "soak" * profile)
    monkeypatch.setenv("SP_EXAMPLES", "7" * examples)
    own_session.ranks, own_session.seed = 3 * ranks, (0, "a b")[examples] if seed else None
    own_session.device, own_session.share_gpu = "cuda" if device else "cpu", shared
    own_session.node_id, own_session.profile = "test_a.py::test_b[$x]", "own" if named else None
    words = [
        "SP_PROFILE=soak" * profile,
        "SP_EXAMPLES=7" * examples,
        "python -m sp_core.testing.launch -n 3 --" * ranks,
        "python -m pytest",
        "--with-mpi" * ranks,
        "--sp-device cuda" * device,
        "--sp-share-gpu" * shared,
        "--hypothesis-profile=own" * named,
        ("--hypothesis-seed=0", "'--hypothesis-seed=a b'")[examples] * seed,
        "'test_a.py::test_b[$x]'",
    ]
    command = " ".join(filter(None, words))
    assert engine._rerun(Spec(plain, {}, plain, {})) == f"run it again: {command}"
