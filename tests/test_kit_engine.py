"""Test the engine: drawing examples, deciding and reporting on several ranks.

On ranks other than 0 the text of a failure has one line.
"""

import os
import sys
from typing import Any, cast
from unittest.mock import Mock, call, patch

import hypothesis
import pytest
from hypothesis import HealthCheck, assume, example, settings, strategies as st
from hypothesis.errors import FailedHealthCheck, Unsatisfiable
from kit.failing import SEARCH, assert_fails, assert_told, failure_of, leads
from oracle.ways import offered
from studies.commands import ROOT, outside, printed

from sp_core.launch import watch
from sp_core.testing import (
    CheckedComm,
    engine,
    event,
    given,
    note,
    profiles,
    run_threads,
    session,
    spmd,
    target,
    tier,
)
from sp_core.testing.comm import LockstepComm
from sp_core.testing.outcome import RankFailure
from sp_core.testing.plan import Example

pytestmark = pytest.mark.ranks  # these laws hold for threads and for MPI


def test_ranks_are_a_value_in_any_order_and_without_rank_0() -> None:
    seen = []

    @SEARCH
    @given(nprocs=st.sampled_from([(2, 1), (1,), 2, (0, 2, 1)]), n=st.integers(0, 9))
    def body(comm: Any, n: int) -> None:
        world = session.current.control.rank if session.current.control else None
        ranks = comm.allgather(world)
        seen.append(tuple(ranks))
        assert n < 5 or comm.size < 3 or comm.rank < 2

    text = failure_of(body)
    if tier() == "mpi":
        assert all(cast("Any", session.current.control).rank in ranks for ranks in seen)
        assert set(seen) <= {(2, 1), (1,), (0, 1), (0, 2, 1)}
    assert_told(text, "on rank 2 of 3 (world ranks (0, 2, 1))", "@example(nprocs=(0, 2, 1), n=5)")


@pytest.mark.parametrize(
    "more", [st.just(1), st.integers(1, 9), st.sampled_from([1, 2])], ids=["one", "range", "choice"]
)
def test_a_search_without_ranks_that_the_launch_has_is_a_skip(
    monkeypatch: pytest.MonkeyPatch, more: Any
) -> None:
    if tier() == "threads":
        monkeypatch.setattr(session.Session, "world_size", 2)
    there = session.current.world_size

    @given(nprocs=more.map(lambda number: there + number))
    def body(comm: Any) -> None:
        raise AssertionError("it has been run")

    with pytest.raises(
        pytest.skip.Exception, match=f"no number of ranks .* fits a launch of {there}"
    ):
        body()


@pytest.mark.parametrize("accepted", [{77}, set()])
def test_a_search_that_rejects_nearly_everything_fails_a_health_check(accepted: set[int]) -> None:
    @settings(suppress_health_check=[HealthCheck.too_slow])
    @given(nprocs=st.just(2), n=st.integers(0, 1000))
    def body(comm: Any, n: int) -> None:
        assume(n in accepted)

    # a skip would have another text
    expected = (Unsatisfiable, FailedHealthCheck, RankFailure, pytest.skip.Exception)
    with pytest.raises(expected, match=r"[Ff]ilter|satisf"):
        body()


def test_decorators_of_hypothesis_work_on_top() -> None:
    seen = []

    @example(nprocs=3, n=-7)
    @example(nprocs=9, n=-8)
    @settings(max_examples=5)
    @given(n=st.integers(0, 9))
    def body(comm: Any, n: int) -> None:
        comm.Barrier()
        if comm.rank == 0:
            seen.append((comm.size, n))

    before, fits = session.current.tally.examples, session.current.world_size in (0, 9)
    body()
    if leads():
        assert session.current.tally.examples - before == 6 + fits
        assert ((3, -7) in seen, (9, -8) in seen) == (True, fits)


def test_events_targets_and_notes_may_come_from_any_rank() -> None:
    @SEARCH
    @given(nprocs=st.just(2), n=st.integers(0, 1000))
    def body(comm: Any, n: int) -> None:
        event(f"rank {comm.rank}")
        target(float(n * comm.rank), label="n")
        note(f"said by rank {comm.rank}")
        assert n < 100

    said = ("said by rank 0", "said by rank 1", "@example(nprocs=2, n=100)", "test case: body(")
    assert "raw replay" not in assert_fails(body, "AssertionError", *said)


@pytest.mark.parametrize("of_kit", [True, False])
def test_what_is_said_in_a_test_reaches_hypothesis(substitute: Any, *, of_kit: bool) -> None:
    """What ranks say is handed over once, and of their targets the largest."""
    said = {name: Mock() for name in ("event", "target", "note")}
    substitute(hypothesis, **said)

    def body(comm: Any) -> None:
        event("rank", str(comm.rank))
        target(7.0 * comm.rank, label="n")
        note("said by all")

    if of_kit:
        given(nprocs=st.just(2), max_examples=1)(body)()
    else:

        def on_ranks(size: int) -> None:
            run_threads(size, body)

        settings(max_examples=1, database=None)(hypothesis.given(st.just(2))(on_ranks))()
    if leads() or not of_kit:
        ranks = [call("rank", str(rank)) for rank in range(2)]
        assert said["event"].call_args_list[-2:] == ranks
        said["target"].assert_called_with(7.0, label="n")
        assert said["note"].call_args_list == [call("said by all")] * said["target"].call_count


@pytest.mark.mpi  # between ranks that are threads nothing is sent
@pytest.mark.parametrize(
    "values", [st.just(lambda: 0), st.randoms().map(lambda x: [x])], ids=["pickle", "unpickle"]
)
def test_values_that_cannot_be_sent_fail_their_own_test_only(values: Any) -> None:
    @given(nprocs=st.just(1), f=values, max_examples=1)
    def body(comm: Any, f: Any) -> None:
        str(f)

    with pytest.raises(TypeError if leads() else RankFailure) as caught:
        body()
    assert not leads() or "Draw values that can be pickled" in str(caught.value)


@pytest.mark.parametrize("replay", [False, True])
def test_raw_replay_finds_what_the_checks_hide(
    monkeypatch: pytest.MonkeyPatch, replay: bool
) -> None:
    @SEARCH
    @given(n=st.integers(0, 9))
    def body(comm: Any, n: int) -> None:
        assert isinstance(comm, LockstepComm) or comm.size < 2 or n < 3

    told: list[str] = []
    monkeypatch.setattr(watch, "in_flight", told.append)
    monkeypatch.setattr(session.current, "raw_replay", replay)
    if replay and tier() == "mpi":
        said = "raw replay: this example passes with checked communicators"
        assert said in failure_of(body)
        assert any(text.startswith("raw replay of ") for text in told) == leads()
    else:
        before = session.current.tally.raw
        body()
        assert session.current.tally.raw == before


@pytest.mark.mpi  # ranks that are threads are always checked
def test_a_message_left_by_a_raw_example_does_not_reach_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    @spmd(2)
    def leaves(comm: Any) -> None:
        is_checked = isinstance(comm, LockstepComm)
        if not is_checked:
            comm.Isend(bytearray(1), 1 - comm.rank)
        assert is_checked

    @spmd(2)
    def receives(comm: Any) -> None:
        comm.barrier()
        assert not comm.iprobe()

    monkeypatch.setattr(session.current, "raw_replay", True)
    assert "AssertionError" in failure_of(leaves)
    receives()


@pytest.mark.mpi  # ranks that are threads get new communicators for each example
def test_communicators_are_kept_for_later_examples_and_the_oldest_is_freed(substitute: Any) -> None:
    control: Any = session.current.control
    substitute(engine, _pool={}, MAX_COMMUNICATORS=2)
    asked = [Example(ranks, {}, raw) for ranks in ((0, 1), (1, 0), (1,)) for raw in (False, True)]
    made, found, due = list[Any](), list[Any](), list[Any]()
    for number, one in enumerate(asked, 1):
        made += [engine._communicator(control, one), engine._communicator(control, one)]
        place = one.ranks.index(control.rank) if control.rank in one.ranks else None
        found.append((place is not None and (made[-1].rank, made[-1].size), [*engine._pool]))
        kept = [(each.ranks, each.raw) for each in asked[:number][-2:]]
        due.append((place is not None and (place, len(one.ranks)), kept))
        found.append(
            [isinstance(made[-1], CheckedComm), made[-1] is made[-2], *map(bool, made[:-4])]
        )
        due.append([place is not None and not one.raw, True, *[False] * len(made[:-4])])
    for comm in filter(None, engine._pool.values()):
        (comm._free if isinstance(comm, CheckedComm) else comm.Free)()
    assert found == due


@pytest.mark.parametrize(
    ("named", "drawn"),
    [
        ("", ("ipc", "pinned", "pipelined", "staged")),
        ("host", ("ipc", "pinned", "pipelined", "staged")),
        ("device", ("device",)),
    ],
)
def test_tests_on_a_gpu_draw_transports_that_are_there_or_the_one_that_is_named(
    named: str, drawn: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SP_TRANSPORT", named)
    assert offered("cuda") == drawn


class TestMethods:
    """Tests that are methods."""

    @given(n=st.integers(0, 3))
    @pytest.mark.parametrize("power", [1, 2])
    def test_fixtures_and_parameters_are_pytests(
        self, comm: Any, tmp_path: Any, n: int, power: int
    ) -> None:
        assert isinstance(self, TestMethods)
        assert tmp_path.is_dir()
        assert power in (1, 2)
        assert comm.allreduce(1) == comm.size


@patch("os.getppid")
@patch("os.getlogin")
@given(nprocs=2, n=st.integers(0, 3))
def test_arguments_of_decorators_come_in_their_order(
    comm: Any, login: Mock, parent: Mock, n: int
) -> None:
    assert comm.allreduce(1) == 2
    assert (os.getlogin, os.getppid) == (login, parent)


def test_a_profile_that_does_not_exist_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SP_PROFILE", "quik")
    with pytest.raises(ValueError, match=r"SP_PROFILE='quik' is not one of .*quick"):
        profiles.load(None)


@pytest.mark.mpi_skip
@pytest.mark.parametrize(
    ("profile", "examples", "said"),
    [
        ("brief", "abc", ""),
        ("explore", "abc", "SP_EXAMPLES='abc' was given. Set it to a whole number above 0."),
        ("explore", "0", "SP_EXAMPLES='0' was given. Set it to a whole number above 0."),
    ],
)
def test_a_wrong_number_of_examples_is_an_error_of_its_profile(
    profile: str, examples: str, said: str
) -> None:
    program = "from sp_core.testing import profiles; profiles.load(None)"
    variables = outside(SP_PROFILE=profile, SP_EXAMPLES=examples)
    code, text = printed([sys.executable, "-c", program], ROOT, variables, 100)
    assert (code, said in text) == (int(bool(said)), True), text
