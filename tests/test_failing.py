"""Test that an error which ends one rank's program ends all ranks, and names rank and cause.

`nox -s deaths` tries every place of an error with every launcher. Here is a sample.
"""

import io
import multiprocessing
import os
import sys
import threading
from contextlib import suppress
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, call as called

import pytest
from deaths import programs
from deaths.programs import ERROR, RANKS, launched, wrong

from sp_core import failing
from sp_core.errors import AGREED, CollectiveMismatch, PeerFailed

pytestmark = [pytest.mark.mpi_skip, pytest.mark.starts_mpi]
OF_MPI = (
    ("before", "mpiexec"),
    ("exit", "sp-core run"),
    ("import", "sp-core run"),
    ("_exit", "sp-core run"),
)
"""Place of the error and launcher, for launches that differ between MPI libraries."""
OTHERS = (
    ("inside", "torchrun"),
    ("atexit", "mpiexec"),
    ("wait", "mpiexec"),
    ("again", "mpiexec"),
    ("early", "mpi4py"),  # of 100 such launches, mpiexec of MPICH leaves out the rank in 3
)


@pytest.mark.parametrize(
    ("place", "start"),
    [*(pytest.param(*row, marks=pytest.mark.every_mpi) for row in OF_MPI), *OTHERS],
)
def test_a_failure_on_one_rank_ends_all(place: str, start: str) -> None:
    code, text, (pid, _) = launched(place, start)
    assert [*wrong(place, start, code, text, pid)] == [], text
    assert place != "before" or text.count(ERROR) == 1
    assert place != "exit" or code == 3, text


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


END = failing.end
HOOKS = (sys, "excepthook"), (threading, "excepthook"), (sys, "unraisablehook")


@pytest.fixture
def usual(substitute: Any) -> list[Mock]:
    """Replace Python's exception hooks, and the call that ends the program; return the hooks."""
    substitute(failing, hooked=False, _head="", _pid=0, _stop=Mock(), end=Mock(), _reserve=[])
    before = [Mock() for _ in HOOKS]
    for (module, name), hook in zip(HOOKS, before, strict=True):
        substitute(module, **{name: hook})
    return before


def set_now() -> list[object]:
    return [getattr(module, name) for module, name in HOOKS]


def test_an_error_is_printed_though_torch_would_print_it_afterwards(
    usual: list[Mock], substitute: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    """`init_process_group` sets a hook that collects what ours writes, and ours does not return."""
    substitute(failing, end=END, GRACE_SECONDS=0.0)
    failing.watch_over(1, 3, Mock())
    substitute(sys, stderr=io.StringIO())
    sys.excepthook(LookupError, LOST, None)
    assert capfd.readouterr().err == "rank 1 of 3: this error ends all ranks.\n"
    assert usual[0].call_count == 1


def test_hooks_are_set_once_and_for_several_ranks(usual: list[Mock]) -> None:
    failing.watch_over(0, 1, Mock())
    assert (set_now(), failing.hooked, failing._reserve) == (usual, False, [])
    failing.watch_over(1, 2, stop := Mock())
    assert (failing.hooked, failing._head, failing._stop) == (True, "rank 1 of 2: ", stop)
    assert failing._pid == os.getpid()
    ours = set_now()
    assert all(one != other for one, other in zip(ours, usual, strict=True))
    failing.left_by(LOST)
    assert failing._reserve == []
    failing.watch_over(0, 3, Mock())
    assert (set_now(), failing._stop) == (ours, stop)
    assert [len(memory) for memory in failing._reserve] == [failing.RESERVE_BYTES]


@pytest.mark.parametrize(
    "launcher", [{"PMI_SIZE": "4"}, {"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "4"}]
)
def test_ranks_that_mpi_does_not_know_are_told(
    launcher: dict[str, str], usual: list[Mock], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would compute P times the same, such as under the mpiexec of another MPI."""
    monkeypatch.setattr(os, "environ", launcher)
    with pytest.warns(UserWarning, match="has started 4 processes, but MPI has 1 rank"):
        failing.watch_over(0, 1, Mock())
    failing.watch_over(0, 4, Mock())


def test_a_rank_that_leaves_ends_its_daemonic_children(substitute: Any) -> None:
    children = [Mock(daemon=True), Mock(daemon=False)]
    substitute(multiprocessing, active_children=lambda: children)
    substitute(os, _exit=(leave := Mock()))
    failing.leave(3)
    children[0].terminate.side_effect = MemoryError
    with pytest.raises(MemoryError):
        failing.leave(4)
    assert [child.terminate.call_count for child in children] == [2, 0]
    assert leave.mock_calls == [called(3), called(4)]


def told(error: BaseException | None, text: str | None = None) -> Any:
    """Return the arguments with which Python calls the hooks of threads and unraisable errors."""
    return SimpleNamespace(exc_value=error, err_msg=text)


LOST = LookupError("lost")
AT_EXIT = "Exception ignored in atexit callback"


@pytest.mark.parametrize(
    ("place", "given", "ends", "tells"),
    [
        (0, ("kind", LOST, "trace"), LOST, True),
        (1, (told(LOST),), LOST, True),
        (1, (told(SystemExit(3)),), None, False),
        (2, (told(LOST, AT_EXIT),), LOST, False),
        (2, (told(LOST, "in a destructor"),), None, False),
        (2, (told(LOST),), None, False),
        (2, (told(None, AT_EXIT),), None, False),
    ],
)
def test_an_error_ends_all_after_the_usual_hook_has_told_it_once(
    place: int, given: tuple[Any, ...], ends: object, tells: bool, usual: list[Mock]
) -> None:
    """`end` calls the hook if it prints the error. Otherwise the hook is called before."""
    failing.watch_over(1, 3, Mock())
    hook: Any = set_now()[place]
    hook(*given)
    end: Any = failing.end
    assert [call.args[0] for call in end.call_args_list] == ([ends] if ends else [])
    assert usual[place].called != tells
    for call in end.call_args_list:
        call.args[1]()
    usual[place].assert_called_once_with(*given)


@pytest.mark.parametrize(
    ("place", "given"),
    [(0, ("kind", LOST, "trace")), (1, (told(LOST),)), (2, (told(LOST, AT_EXIT),))],
)
def test_an_error_of_a_forked_process_ends_only_that_process(
    place: int, given: tuple[Any, ...], usual: list[Mock], substitute: Any
) -> None:
    failing.watch_over(1, 3, stop := Mock())
    substitute(
        failing, end=END, os=Mock(**{"getpid.return_value": -1}), atexit=(registry := Mock())
    )
    hook: Any = set_now()[place]
    hook(*given)
    usual[place].assert_called_once_with(*given)
    failing.left_by(SystemExit(3))
    assert (stop.called, registry.register.called) == (False, False)


def with_cause(error: BaseException, *, agreed: bool, cause: BaseException | None) -> BaseException:
    setattr(error, AGREED, int(agreed))
    error.__cause__ = cause
    return error


LINE = "rank 1 of 3: CollectiveMismatch: differ\n"
WHOLE = "rank 1 of 3: this error ends all ranks.\nthe traceback\n"


@pytest.mark.parametrize(
    ("error", "text", "pauses", "code"),
    [
        (LOST, WHOLE, 4, 1),
        (SystemExit(3), WHOLE, 4, 3),
        (PeerFailed("gone"), WHOLE, 8, 1),
        (with_cause(CollectiveMismatch("differ"), agreed=True, cause=None), LINE, 8, 1),
        (with_cause(CollectiveMismatch("differ"), agreed=True, cause=LOST), WHOLE, 8, 1),
        (with_cause(CollectiveMismatch("differ"), agreed=False, cause=None), WHOLE, 4, 1),
    ],
)
@pytest.mark.parametrize("is_open", [True, False])
def test_an_error_is_printed_and_messages_move_until_all_ranks_are_ended(
    error: BaseException, text: str, pauses: int, code: int, substitute: Any, *, is_open: bool
) -> None:
    """Messages move for two seconds, or for four if other ranks print the error.

    Each pause moves the clock by half a second. `is_open`: whether the outputs still are.
    """
    done: list[object] = []

    def done_if_open(word: str) -> None:
        done.append(word)
        if not is_open:
            raise BrokenPipeError

    clock = Mock(monotonic=lambda: 0.5 * done.count("pause"))
    clock.sleep = lambda seconds: done.append("pause" if len(done) < 99 else pytest.fail("endless"))
    advance = Mock(side_effect=RuntimeError)
    substitute(
        failing,
        time=clock,
        progress=Mock(**{"of_this_rank.return_value.advance": advance}),
        _head="rank 1 of 3: ",
        _stop=done.append,
    )
    substitute(
        sys,
        stdout=Mock(flush=partial(done_if_open, "flush stdout")),
        stderr=Mock(write=done_if_open, flush=partial(done_if_open, "flush stderr")),
    )
    failing.end(error, lambda: done.append("the traceback\n"))
    flushed = done.index("flush stderr")
    told = text if is_open else text.replace("\n", "", 1)  # `print` ends at its first error
    assert "".join(map(str, done[:flushed])) == told
    assert done[flushed:] == ["flush stderr", "flush stdout", *["pause"] * pauses, code]
    assert advance.call_count == pauses


@pytest.mark.parametrize(
    ("head", "error", "ends"),
    [
        ("rank 1 of 3: ", SystemExit(3), True),
        ("rank 1 of 3: ", SystemExit(0), False),
        ("rank 1 of 3: ", LOST, False),
        ("", SystemExit(3), False),
    ],
)
def test_an_exit_that_leaves_a_mesh_ends_all_at_the_end_of_the_program(
    head: str, error: BaseException, ends: bool, substitute: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    registered = Mock()
    substitute(failing, _head=head, atexit=Mock(register=registered))
    failing.left_by(error)
    assert registered.called == ends
    if ends:
        end, given, tell = registered.call_args.args
        assert (end, given) == (failing.end, error)
        tell()
        assert capsys.readouterr().err == "SystemExit: 3\n"


def test_an_exit_ends_nothing_if_the_program_catches_it_and_makes_another_mesh(
    usual: list[Mock], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program may also make a mesh in a `finally`, while the SystemExit goes on."""
    monkeypatch.setattr(failing, "atexit", registry := Mock())
    with suppress(SystemExit):
        try:
            raise SystemExit(3)
        finally:
            failing.watch_over(1, 3, Mock())
    registry.unregister.assert_not_called()
    failing.watch_over(1, 3, Mock())
    registry.unregister.assert_called_once_with(failing.end)


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("rank 1 of 3: ", "rank 2 of 3: ", "no rank"),
        (ERROR, "", "no cause"),
        pytest.param(programs.CASE, "", "no stack", id="no stack"),
    ],
)
def test_what_a_report_lacks_is_told(old: str, new: str, fault: str) -> None:
    text = f"rank 1 of 3: this error ends all ranks.\nFile {programs.CASE}, line 5\n{ERROR}\n"
    assert [*wrong("before", "mpiexec", 1, text, "7")] == []
    assert [*wrong("before", "mpiexec", 0, text.replace(old, new), "7")] == ["exit code 0", fault]
