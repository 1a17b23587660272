"""Test what the tests of a session share: counts, remarks, profiles, and the device of a rank."""

import math
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import Mock, call

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, Verbosity, given, settings, strategies as st
from hypothesis.database import InMemoryExampleDatabase

from sp_core import testing, transport
from sp_core.errors import DeviceError
from sp_core.testing import profiles, session
from sp_core.testing.session import Remarks, Session, Tally

CONSTANT = 0x5EED_0F_5EED
REMARKS: Remarks = {
    ("event", "odd", "1"): 0.0,
    ("feature", "scheme=ring"): 0.0,
    ("feature", "n=3"): 0.0,
    ("target", "steps"): 7.0,
    ("note", "said"): 0.0,
    ("ratio", "out"): 0.25,
}


def test_a_summary_counts_examples_by_ranks_and_schemes() -> None:
    """An example that runs once more without checks counts as raw only; its errors count."""
    found = Session()
    assert found.summary() == "threads: 0 tests, 0 examples; examples by ranks {}"
    found.tally.tests = 4
    for ranks, raw in ((3, False), (1, False), (3, False), (3, True)):
        found.tally.count(ranks, {**REMARKS, ("ratio", "out"): 0.25 + raw}, raw=raw)
    found.tally.count(2, {("feature", "scheme=all"): 0.0})
    assert found.tally.ratios == {"out": 1.25}
    assert found.tally.features == {"scheme=ring": 3, "n=3": 3, "scheme=all": 1}
    twice = Tally()
    for _ in range(2):
        twice.merge(found.tally)
    assert (twice.tests, twice.examples, twice.raw) == (8, 8, 2)
    twice.merge(Tally(ratios={"out": 0.5}))
    assert twice.ratios == {"out": 1.25}
    assert found.summary() == (
        "threads: 4 tests, 4 examples (+ 1 raw); examples by ranks {1: 1, 2: 1, 3: 2}\n"
        "examples by scheme {all: 1, ring: 3}"
    )


def test_the_larger_number_stays_and_nan_is_the_largest() -> None:
    mine = {"a": 1.0, "b": 2.0, "c": math.nan, "d": 1.0}
    session.keep_largest(mine, {"a": 2.0, "b": 1.0, "c": 9.0, "d": math.nan, "e": -1.0})
    assert str(mine) == "{'a': 2.0, 'b': 2.0, 'c': nan, 'd': nan, 'e': -1.0}"


@pytest.mark.parametrize("in_test", [True, False])
def test_remarks_reach_the_innermost_example_else_hypothesis(
    monkeypatch: pytest.MonkeyPatch, *, in_test: bool
) -> None:
    """Outside of an example the session keeps errors, and Hypothesis gets the rest."""
    told, tally = Mock(), Tally()
    told.currently_in_test_context.return_value = in_test
    monkeypatch.setitem(sys.modules, "hypothesis", told)
    monkeypatch.setattr(session.current, "tally", tally)

    def say() -> None:
        session.event("odd", 1)
        session.features({"scheme": "ring", "n": 3})
        session.target(7.0, label="steps")
        session.note("said")
        session.record_ratio("out", 0.25)

    with session.collected() as outer:
        with session.collected() as inner:
            say()
        session.target(3.0, label="steps")
        session.target(2.0, label="steps")
    assert (inner, outer) == (REMARKS, {("target", "steps"): 3.0})
    assert (session.thread.sink, tally.ratios, told.mock_calls) == (None, {}, [])
    say()
    assert tally.ratios == {"out": 0.25}
    calls = [call.event("odd", "1"), call.event("scheme=ring"), call.event("n=3")]
    calls += [call.target(7.0, label="steps"), call.note("said")]
    asked = call.currently_in_test_context()
    assert [each for each in told.mock_calls if each != asked] == (calls if in_test else [])


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf, "7 steps"])
def test_a_target_that_hypothesis_would_refuse_is_an_error_where_it_is_set(wrong: Any) -> None:
    """Numbers of all types are taken."""
    with session.collected() as sink:
        with pytest.raises(ValueError, match=f"{wrong}"):
            session.target(wrong)
        numbers: list[Any] = [3, np.float32(0.5), torch.tensor(7)]
        for number in numbers:
            session.target(number, label=str(number))
    assert [type(each) for each in sink.values()] == [float] * 3


def test_remarks_go_nowhere_without_hypothesis(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "hypothesis")
    session.replay(REMARKS)


@pytest.mark.parametrize(
    ("variables", "count", "shared", "allowed", "number"),
    [
        ({}, 2, False, False, 0),
        ({"MPI_LOCALRANKID": "1"}, 2, False, False, 1),
        ({"SLURM_LOCALID": "5", "SLURM_STEP_NUM_TASKS": "6"}, 3, True, True, 2),
        ({"OMPI_COMM_WORLD_LOCAL_RANK": "3", "SLURM_LOCALID": "0"}, 3, False, True, 0),
        ({"OMPI_COMM_WORLD_LOCAL_RANK": "2", "SLURM_LOCALID": "0"}, 3, False, False, 2),
        ({}, 0, False, True, None),
        ({}, 1, True, False, None),
    ],
)
def test_a_rank_has_the_device_with_its_number_on_the_machine(
    variables: dict[str, str],
    count: int,
    number: int | None,
    monkeypatch: pytest.MonkeyPatch,
    *,
    shared: bool,
    allowed: bool,
) -> None:
    """With fewer devices than ranks, which must be allowed, ranks get them round-robin."""
    monkeypatch.setattr(os, "environ", {**variables})
    monkeypatch.setattr(transport, "count_devices", lambda _: count)
    assert session.device() == torch.device("cpu")
    one = Session(device="cuda", gpu_is_shared=shared, share_gpu=allowed)
    monkeypatch.setattr(session, "current", one)
    if number is None:
        with pytest.raises(DeviceError, match="local rank 0 has no cuda device of its own"):
            session.device()
    else:
        assert session.device() == torch.device("cuda", number)


def test_the_session_has_the_ranks_of_its_launch_else_those_of_its_attempts() -> None:
    control: Any = SimpleNamespace(size=3)
    assert [Session().world_size, Session(ranks=4).world_size] == [0, 4]
    assert Session(ranks=4, control=control).world_size == 3


EXAMPLES = {"pr": 60, "quick": 25, "brief": 6, "soak": 3}
EXAMPLES["explore"] = int(os.environ.get("SP_EXAMPLES") or 5000)
"""Numbers of examples by profile, as the module tells them."""
VERBOSE = [f"{name}-with-verbose-verbosity" for name in ("brief", "explore", "mine")]
"""Names of profiles that Hypothesis makes for its option --hypothesis-verbosity."""


@pytest.mark.parametrize(
    "own",
    [
        None,
        {},
        {"max_examples": 40, "deadline": 5},
        {"database": InMemoryExampleDatabase()},
        {"max_examples": 100},
        {"suppress_health_check": [HealthCheck.filter_too_much]},
    ],
)
@pytest.mark.parametrize("most", [None, 4, 40])
@pytest.mark.parametrize("seeded", [False, True])
@pytest.mark.parametrize("profile", [*EXAMPLES, "mine", "default", *VERBOSE])
@pytest.mark.usefixtures("loaded")
def test_settings_of_a_test_are_its_own_else_those_of_the_profile(
    profile: str,
    own: dict[str, Any] | None,
    most: int | None,
    *,
    seeded: bool,
) -> None:
    default = settings.get_profile("default")
    settings.register_profile("mine", default, max_examples=7, derandomize=False)
    profile, is_verbose, _ = profile.partition("-with-verbose-verbosity")
    settings.load_profile(profile)
    if is_verbose:
        settings.register_profile(profile + is_verbose, verbosity=Verbosity.verbose)
        settings.load_profile(profile + is_verbose)
    marks = {} if own is None else {"_hypothesis_internal_use_settings": settings(**own)}
    found = profiles.chosen(marks, most, seeded=seeded)
    usual = EXAMPLES.get(profile, 60)
    # if no other profile is loaded, a value that is Hypothesis' own default counts as not given
    asked = {} if profile == "default" and 100 in (own or {}).values() else own or {}
    named = asked.get("max_examples", 7 if profile == "mine" else usual)
    differs = profile in ("soak", "explore")
    grown = max((most or 0) * usual // 60, 3 if profile in ("brief", "soak") else most or 0)
    assert found.max_examples == (named if most is None else grown)
    assert found.derandomize == (not differs and not seeded)
    has_database = profile == "explore" or "database" in (own or {})
    assert (found.database is None) == (found.derandomize or not has_database)
    assert found.deadline is None
    assert found.verbosity == (Verbosity.verbose if is_verbose else Verbosity.normal)
    assert found.print_blob
    assert {*found.phases} == {*Phase} - {Phase.explain}
    assert {*found.suppress_health_check} == {
        *(HealthCheck.too_slow, HealthCheck.data_too_large),
        *(HealthCheck.large_base_example, HealthCheck.function_scoped_fixture),
        *(own or {}).get("suppress_health_check", ()),
    }


@pytest.mark.parametrize("own", [None, 9])
@pytest.mark.usefixtures("loaded")
def test_a_profile_that_a_later_module_loads_is_that_of_earlier_tests_too(own: int | None) -> None:
    settings.register_profile("late", settings.get_profile("default"), max_examples=7)
    settings.load_profile("default")
    test = testing.given(nprocs=1)(lambda comm: None)
    profiles.allow_fixtures(test if own is None else settings(max_examples=own)(test))
    settings.load_profile("late")
    assert profiles.chosen(vars(test)).max_examples == (own or 7)


def test_constants_of_the_modules_of_a_project_are_not_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, path = ModuleType("project"), tmp_path / "project.py"
    module.__file__ = str(path)
    path.write_text(f"x = {CONSTANT}")
    monkeypatch.setitem(sys.modules, "project", module)
    drawn = set[int]()

    @settings(max_examples=300, derandomize=True, database=None)
    @given(st.integers(CONSTANT - 2**30, CONSTANT + 2**30))
    def draw(number: int) -> None:
        drawn.add(number)

    draw()
    assert len(drawn) > 100
    assert CONSTANT not in drawn


@pytest.mark.parametrize("has_settings", [True, False])
def test_a_test_may_have_fixtures_besides_what_it_suppresses_itself(*, has_settings: bool) -> None:
    class Tests:
        def test(self) -> None:
            """Do nothing."""

    own = settings(max_examples=7, suppress_health_check=[HealthCheck.too_slow])
    if has_settings:
        vars(Tests)["test"]._hypothesis_internal_use_settings = own
    profiles.allow_fixtures(Tests().test)
    found = Tests.test._hypothesis_internal_use_settings  # type: ignore[attr-defined]
    expected = own if has_settings else settings()
    assert found.max_examples == expected.max_examples
    fixtures = HealthCheck.function_scoped_fixture
    assert {*found.suppress_health_check} == {*expected.suppress_health_check, fixtures}
