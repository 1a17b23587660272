"""An error that ends the program of one rank ends all ranks; the report names rank and cause.

`nox -s deaths` tries every place with everything that starts ranks; here is a sample.
"""

from __future__ import annotations

from collections import Counter

import pytest
from deaths import programs
from deaths.programs import ERROR, PLACES, RANKS, launched, rows, wrong

from sp_core.failing import exit_code

pytestmark = [pytest.mark.mpi_skip, pytest.mark.starts_mpi]
OF_MPI = (
    *(("before", "mpiexec"), ("again", "mpiexec"), ("exit", "sp-core run")),
    *(("early", "mpi4py"), ("import", "sp-core run"), ("_exit", "sp-core run")),
)
"""Launches that depend on whose MPI it is."""
OTHERS = (
    *(("inside", "torchrun"), ("thread", "torchrun"), ("atexit", "mpiexec")),
    *(("wait", "mpiexec"), ("backward", "mpiexec"), ("SIGTERM", "mpiexec")),
    ("slow", "torchrun"),  # the others end after it though it ends late
)


def of(place: str, start: str) -> object:
    """Name a launch; those that depend on the MPI run with each."""
    marks = [pytest.mark.every_mpi] if (place, start) in OF_MPI else []
    return pytest.param(place, start, id=f"{place}-{start}", marks=marks)


@pytest.mark.parametrize(("place", "start"), [of(*row) for row in (*OF_MPI, *OTHERS)])
def test_a_failure_on_one_rank_ends_all(place: str, start: str) -> None:
    code, text, (pid, _) = launched(place, start)
    assert [*wrong(place, start, code, text, pid)] == [], text
    assert place != "before" or text.count(ERROR) == 1
    assert place != "exit" or code == 3


def test_an_error_that_all_ranks_raise_is_printed_by_one() -> None:
    code, text, _ = launched("agreed", "mpiexec")
    assert code != 0
    assert text.count("Traceback (most recent call last)") == 1, text
    for rank in (1, 2):
        assert f"rank {rank} of {RANKS}: CollectiveMismatch: the ranks disagree" in text


@pytest.mark.parametrize("place", ["caught", pytest.param("left", marks=pytest.mark.every_mpi)])
def test_an_error_that_is_caught_and_a_thread_that_exits_end_nothing(place: str) -> None:
    code, text, _ = launched(place, "mpiexec")
    assert code == 0, text


@pytest.mark.parametrize(
    ("error", "code"),
    [
        *((SystemExit(code), code) for code in (0, 1, 3)),
        *((SystemExit(None), 0), (SystemExit("a text"), 1)),
        *((KeyError("lost"), 1), (KeyboardInterrupt(), 130)),
    ],
)
def test_the_exit_code_is_that_of_python(error: BaseException, code: int) -> None:
    assert exit_code(error) == code


def test_the_study_tries_each_place_with_two_starts_or_more() -> None:
    assert {*OF_MPI, *OTHERS} <= {*rows()}
    assert min(Counter(place for place, _ in rows()).values()) >= 2
    assert {place for place, _ in rows()} == {*PLACES}


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("rank 1 of 3: ", "rank 2 of 3: ", "no rank"),
        (ERROR, "", "no cause"),
        (programs.CASE, "", "no stack"),
    ],
)
def test_what_a_report_lacks_is_told(old: str, new: str, fault: str) -> None:
    text = f"rank 1 of 3: this error ends all ranks.\nFile {programs.CASE}, line 5\n{ERROR}\n"
    assert [*wrong("before", "mpiexec", 1, text, "7")] == []
    assert [*wrong("before", "mpiexec", 0, text.replace(old, new), "7")] == ["exit code 0", fault]
