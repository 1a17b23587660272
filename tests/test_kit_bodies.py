"""Test what the body of a test on ranks may do, and which tests are refused.

On ranks other than 0 the text of a failure has one line.
"""

from contextlib import nullcontext
from typing import Any, cast
from unittest import SkipTest, TestCase
from unittest.mock import patch

import hypothesis
import pytest
import torch
from hypothesis import assume, example, reproduce_failure, seed, settings, strategies as st
from kit.failing import SEARCH, assert_fails, assert_told, failure_of, leads

import sp_core as sp
from sp_core.testing import given, run_threads, spmd
from sp_core.testing.outcome import RankFailure

pytestmark = pytest.mark.ranks  # these laws hold for threads and for MPI


def raise_skip(reason: str) -> None:
    raise SkipTest(reason)


@pytest.mark.parametrize(
    ("leave", "expected"),
    [
        (pytest.skip, pytest.skip.Exception),
        (raise_skip, pytest.skip.Exception),
        (pytest.xfail, pytest.xfail.Exception),
        (pytest.exit, pytest.exit.Exception),
    ],
)
def test_a_body_leaves_a_test_as_pytest_lets_it(leave: Any, expected: Any) -> None:
    """A skip on only one rank is a failure, which test_kit_faults.py tests."""
    with pytest.raises(expected, match="not here"):
        spmd(2)(lambda comm: leave("not here"))()
    with pytest.raises(expected, match="not here"):
        run_threads(2, lambda comm: leave("not here"))
    if leave is pytest.xfail:
        with pytest.raises(expected, match="not here"):
            given(nprocs=2, n=st.integers(0, 9))(lambda comm, n: leave("not here"))()


@pytest.mark.parametrize(
    ("leave", "end"),
    [
        (lambda: pytest.skip("not here"), None),
        (lambda: pytest.xfail("not here"), pytest.xfail.Exception),
        (lambda: assume(False), None),
    ],
)
def test_a_size_that_leaves_does_not_hide_the_others(leave: Any, end: Any) -> None:
    def body(comm: Any, last: int) -> None:
        if comm.size == 1:
            leave()
        assert comm.size < last, "too many"

    assert_told(failure_of(spmd(1, 2)(lambda comm: body(comm, 2))), "too many")
    with pytest.raises(end) if end else nullcontext():
        spmd(1, 2)(lambda comm: body(comm, 3))()


def test_a_test_whose_sizes_are_all_rejected_is_skipped() -> None:
    with pytest.raises(pytest.skip.Exception, match="`assume` rejects every size"):
        spmd(1, 2)(lambda comm: assume(False) and None)()


@pytest.mark.parametrize("in_mesh", [False, True])
def test_an_exit_of_one_rank_ends_the_session(*, in_mesh: bool) -> None:
    """In a mesh the others fail with `PeerFailed`, which only tells of it."""

    @spmd(2)
    def body(comm: Any) -> None:
        with sp.Mesh(comm, sp=2) if in_mesh else nullcontext() as mesh:
            if comm.rank == (not in_mesh):
                pytest.exit("not here", returncode=77)
            if mesh:
                sp.all_reduce(torch.ones(3), comm=mesh["sp"])
            comm.barrier()

    with pytest.raises(pytest.exit.Exception, match="not here") as caught:
        body()
    assert caught.value.returncode == 77


def test_an_exit_of_one_rank_does_not_hide_the_failure_of_another() -> None:
    @spmd(2)
    def body(comm: Any) -> None:
        if comm.rank:
            pytest.exit("done", returncode=0)
        raise LookupError("mine")

    assert_fails(body, "LookupError", "mine", "rank 1: skipped: Exit")


class Exit(Exception):
    """An error of a program, whose text cannot be made."""

    def __str__(self) -> str:
        raise LookupError

    __repr__ = __str__


class Keyed(Exception):
    """An error of a program with an attribute that the kit's own errors have."""

    def __init__(self, key: object) -> None:
        super().__init__("what was wrong")
        self.key = key


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (Exit(), ("RankFailure[Exit at", "<str() of Exit failed>")),
        (ValueError("caf\udce9"), ("caf\udce9",)),
        (Keyed(None), ("RankFailure[Keyed at", "Keyed on rank 1 of 2: what was wrong")),
        (Keyed("abc"), ("RankFailure[Keyed at", "Keyed on rank 1 of 2: what was wrong")),
    ],
)
def test_an_error_with_an_odd_text_is_told(error: Exception, said: tuple[str, ...]) -> None:
    @spmd(2)
    def body(comm: Any) -> None:
        if comm.rank:
            raise error

    assert_told(failure_of(body), *said)


def test_a_file_with_an_odd_name_is_told() -> None:
    names: dict[str, Any] = {}
    exec(compile("def body(comm): assert comm.rank == 0", "caf\udce9.py", "exec"), names)
    assert_told(failure_of(spmd(2)(names["body"])), r"caf\udce9.py:1")


@given(nprocs=2, odd=st.builds(Exit))
def test_ranks_may_be_given_as_a_number_and_a_value_without_a_text(comm: Any, odd: Any) -> None:
    assert (comm.size, type(odd)) == (2, Exit)


async def coroutine(comm: Any) -> None: ...


def generator(comm: Any) -> Any:
    yield comm


@hypothesis.given(m=st.integers())
def drawing(comm: Any, m: int) -> None: ...


@pytest.mark.parametrize(
    ("decorate", "body", "said"),
    [
        (lambda: given(n=st.integers()), leads, "first parameter"),
        (spmd, lambda comm, subtests: None, "cannot use `subtests`"),
        (lambda: given(n=st.integers()), failure_of, r"parameters named \['n'\]"),
        (spmd, coroutine, "coroutine is `async` or has a `yield`"),
        (given, generator, "generator is `async` or has a `yield`"),
        (given, drawing, "drawing has @given or @spmd already"),
        (spmd, drawing, "drawing has @given or @spmd already"),
        (given, spmd(1)(cast("Any", failure_of)), "has @given or @spmd already"),
        (spmd, patch("os.getppid")(generator), "generator has @mock.patch. Put it above @given"),
        (lambda: given(n=cast("Any", 3)), failure_of, "got n=3. Pass a strategy"),
        (lambda: given(cast("Any", "2")), failure_of, "got nprocs='2'. Pass a strategy"),
        *(
            (lambda size=size: spmd(size), failure_of, r"write @spmd\(\)")
            for size in (failure_of, 2.0, "2")
        ),
        (
            lambda: lambda body: given(n=st.integers())(body)(),
            lambda comm, n, fixture: None,
            "missing a required argument: 'fixture'",
        ),
        *(
            (lambda late=late: given(n=late), failure_of, "all ranks see the same example")
            for late in (st.data(), st.randoms(), st.randoms(use_true_random=True))
        ),
    ],
)
def test_a_test_that_cannot_run_on_ranks_is_refused(decorate: Any, body: Any, said: str) -> None:
    with pytest.raises(TypeError, match=said):
        decorate()(body)


@pytest.mark.parametrize(
    "early", [st.deferred(lambda: LATER), st.randoms().map(lambda chance: chance.randrange(9))]
)
def test_a_strategy_may_draw_in_any_way_before_the_body_begins(early: Any) -> None:
    seen = []
    given(nprocs=1, n=early, max_examples=3)(lambda comm, n: seen.append(n))()
    assert {*map(type, seen)} <= {int}


LATER: st.SearchStrategy[int] = st.just(7)


@pytest.mark.parametrize(
    "decorator", [example(nprocs=1), settings(max_examples=3), seed(1), reproduce_failure("", b"")]
)
def test_decorators_of_hypothesis_are_refused_where_nothing_is_drawn(decorator: Any) -> None:
    ran = []
    with pytest.raises((TypeError, RankFailure), match="@spmd draws nothing"):
        decorator(spmd(1)(lambda comm: ran.append(comm)))()
    assert not ran


def test_names_in_annotations_may_be_unknown() -> None:
    """From Python 3.14 on a function evaluates them when they are asked for."""

    class OfTypeChecker: ...

    def body(comm: OfTypeChecker) -> None: ...

    del OfTypeChecker
    for decorate in (spmd(1), given(nprocs=1)):
        decorate(body)()


def test_a_body_that_returns_a_result_fails() -> None:
    def body(comm: Any, n: int) -> Any:
        return n == 25

    told = "body returned False. The body of a test must return None: use `assert`"
    assert_fails(given(n=st.integers(0, 9))(body), "TypeError", told)


def test_what_a_rank_does_to_its_arguments_no_other_rank_and_no_report_sees() -> None:
    @SEARCH
    @given(nprocs=2, numbers=st.lists(st.integers(0, 9), min_size=1))
    def body(comm: Any, numbers: list[int]) -> None:
        drawn = [*numbers]
        numbers[:] = [10]
        assert comm.bcast(drawn) == drawn, "ranks differ"
        assert len(drawn) < 3, "long"

    keep = "@example(nprocs=2, numbers=[0, 0, 0])"
    assert "ranks differ" not in assert_fails(body, "AssertionError", "long", keep)


def test_subtests_are_refused(subtests: Any) -> None:
    @spmd(1)
    def body(comm: Any) -> None:
        with subtests.test():
            comm.barrier()

    assert_told(failure_of(body), "a body that runs on ranks cannot use `subtests` or `subTest`")


class Subtest(TestCase):
    """A test of unittest on ranks."""

    @spmd(1)
    def test_a_subtest_of_unittest_is_refused(self, comm: Any) -> None:
        with pytest.raises(TypeError, match="cannot use `subtests` or `subTest`"), self.subTest():
            comm.barrier()


def test_an_assumption_that_fails_on_a_rank_rejects_the_example() -> None:
    kept: list[int] = []

    @settings(database=None)
    @hypothesis.given(st.integers(0, 9))
    def test(n: int) -> None:
        run_threads(2, lambda comm: assume(comm.rank == 0 or n > 4))
        kept.append(n)

    test()
    assert {*kept} == {5, 6, 7, 8, 9}
