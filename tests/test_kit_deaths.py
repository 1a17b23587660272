"""Test parts of the launcher without a launch: what ranks leave, and the first death."""

from __future__ import annotations

import mmap
import os
import random
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
from studies.commands import outside, printed

from sp_core.launch import deaths as deaths_module, watch as watch_module
from sp_core.launch.deaths import Deaths, innermost, mpi_file, shared_files, shortened
from sp_core.launch.watch import file_of, hold_life

RANKS = 4


@pytest.fixture
def watch(tmp_path: Path) -> Iterator[Deaths]:
    with closing(Deaths(tmp_path, RANKS)) as deaths:
        yield deaths


@pytest.fixture
def ranks() -> Iterator[list[subprocess.Popen[bytes]]]:
    sleepers = [subprocess.Popen(["sleep", "60"]) for _ in range(RANKS)]
    yield sleepers
    end(sleepers)


def introduce(folder: Path, sleepers: list[subprocess.Popen[bytes]]) -> None:
    for rank, sleeper in enumerate(sleepers):
        (folder / f"rank{rank}.pid").write_text(str(sleeper.pid))


def end(sleepers: Iterable[subprocess.Popen[bytes]]) -> None:
    for sleeper in sleepers:
        sleeper.kill()
        sleeper.wait()


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    "looks", ["late", "before it knows the ranks", "at the start", "each time"]
)
def test_the_first_of_many_deaths_is_told(
    tmp_path: Path, watch: Deaths, ranks: list[subprocess.Popen[bytes]], looks: str, seed: int
) -> None:
    """The first death is that of the rank whose pipe closed first, even if others end sooner.

    If the launcher looks late, the ranks here hold no pipes, and the order of deaths counts.
    """
    order = random.Random(seed).sample(range(RANKS), RANKS)
    held = [hold_life(tmp_path, rank) for rank in order if looks != "late"]
    if looks != "before it knows the ranks":
        introduce(tmp_path, ranks)
    watch.look(0.0)
    for life in held:
        os.close(life)
        assert looks != "each time" or len(watch.alive()) == RANKS
    introduce(tmp_path, ranks)
    end(ranks[rank] for rank in (order[::-1] if held else order))
    assert watch.alive() == {}
    assert watch.suspects()[0].startswith(f"rank {order[0]} died first: ")
    first = [rank for rank in range(RANKS) if "dead, the first to die" in watch.story(rank)]
    assert [watch.first()] == first == order[:1]


def test_of_those_that_were_gone_before_they_were_seen_it_says_that_it_knows_nothing(
    tmp_path: Path, watch: Deaths, ranks: list[subprocess.Popen[bytes]]
) -> None:
    end(ranks)
    introduce(tmp_path, ranks)
    assert watch.alive() == {}
    assert "its exit code is not known" in watch.suspects()[0]
    assert not watch.failed()
    file_of(tmp_path, 1, "place").write_bytes(b"raised KeyError('x')\0")
    assert watch.failed()


def wait_for(is_so: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("stopped", [False, True])
def test_a_living_rank_writes_its_stacks_and_a_stopped_one_is_ended(
    tmp_path: Path, watch: Deaths, monkeypatch: pytest.MonkeyPatch, *, stopped: bool
) -> None:
    monkeypatch.setattr(deaths_module, "DUMP_SECONDS", 0.4)
    program = "import time; from sp_core.launch import watch; watch.start(2); time.sleep(60)"
    rank = subprocess.Popen([sys.executable, "-c", program], env=outside(SP_RUN_DIR=str(tmp_path)))
    try:
        wait_for(lambda: watch.alive())
        if stopped:
            rank.send_signal(signal.SIGSTOP)
            wait_for(lambda: deaths_module.stat(rank.pid)[0] == "T")
        watch.dump()
        assert 'File "<string>", line 1 in <module>' in watch.story(2)
        if stopped:
            assert rank.wait(10) == -signal.SIGTERM
            assert watch.suspects() == ["rank 2 is stopped by a signal"]
        else:
            assert watch.alive() == {2: rank.pid}
    finally:
        end([rank])


LIBRARY, KIT = watch_module.LIBRARY / "mesh.py", watch_module.KIT[0] + "watch.py"
FRAMES = {
    "kit": f'  File "{KIT}", line 3 in here',
    "library": f'  File "{LIBRARY}", line 2 in mesh',
    "test": '  File "/some/test.py", line 5 in test',
    "foreign": f'  File "{os.__file__}", line 1 in run',
}


@pytest.mark.parametrize(
    ("inner_first", "shown", "place"),
    [
        ("kit library test foreign kit", "library test", ""),
        ("library kit test test foreign", "library test test", "library"),
        ("foreign test library foreign", "foreign test library", "test"),
        ("foreign kit", "foreign kit", ""),
    ],
)
def test_stacks_are_shown_from_the_test_on_and_without_the_kit(
    inner_first: str, shown: str, place: str
) -> None:
    head = "Thread 1 (most recent call first):"
    stacks = "\n".join([head, *map(FRAMES.__getitem__, inner_first.split())])
    assert shortened(stacks).splitlines() == [head, *map(FRAMES.__getitem__, shown.split())]
    assert innermost(stacks) == FRAMES.get(place, "").strip()


@pytest.mark.parametrize(
    ("hang", "stack", "shown"),
    [
        ("", "foreign", "foreign"),
        ("foreign", "", "foreign"),
        ("foreign", "kit", "foreign"),
        ("Timeout (0:00:20)!", "foreign", "foreign"),
        ("Timeout (0:00:20)!", "", "Timeout (0:00:20)!"),
    ],
)
def test_the_stacks_of_a_rank_are_those_that_were_written(
    hang: str, stack: str, shown: str, tmp_path: Path, watch: Deaths
) -> None:
    """A rank that is ended while it writes at a time limit has written no frame."""
    for kind, text in (("hang", hang), ("stack", stack)):
        file_of(tmp_path, 1, kind).write_text(FRAMES.get(text, text))
    assert watch.story(1).endswith(f"\n{FRAMES.get(shown, shown).strip()}")


def test_files_in_shared_memory_that_a_process_has_mapped_are_found() -> None:
    path = Path(f"/dev/shm/mpich_shm_{os.getpid()}")
    try:
        with path.open("w+b") as file:
            file.truncate(mmap.PAGESIZE)
            with mmap.mmap(file.fileno(), mmap.PAGESIZE):
                assert path in shared_files(os.getpid())
        assert path not in shared_files(os.getpid())
    finally:
        path.unlink()


def test_the_example_under_way_replaces_a_longer_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "flying"
    with path.open("w") as file:
        monkeypatch.setattr(watch_module, "_watch", SimpleNamespace(flying=file.fileno()))
        for text in ("a long example", "caf\udce9", "short", ""):
            watch_module.in_flight(text)
            assert path.read_text() == text.replace("\udce9", r"\udce9")


@pytest.mark.parametrize(
    ("code", "has_mpi", "is_session", "aborts"),
    [(3, True, False, [3]), (0, True, False, []), (3, False, False, []), (3, True, True, [])],
)
def test_an_exit_aborts_all_ranks_of_a_program_that_has_failed(
    code: int,
    aborts: list[int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    has_mpi: bool,
    is_session: bool,
) -> None:
    codes: list[int] = []
    mpi = SimpleNamespace(_set_abort_status=codes.append) if has_mpi else None
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", mpi)
    monkeypatch.setenv(watch_module.RUN_DIR, str(tmp_path))
    if is_session:
        (tmp_path / watch_module.STARTED).touch()
    watch_module.abort_at_exit(code)
    assert codes == aborts


@pytest.mark.parametrize(
    ("mapped", "name"),
    [
        ("/dev/shm/sm_segment.host.0", "sm_segment.host.0"),
        ("/dev/shm/mpich_shm_1", "mpich_shm_1"),
        ("/dev/shm/folder/mpich_shm_1", None),
        ("/dev/shm/mpich_shm_1/other", None),
        ("/dev/shm/mpich_shm_1 (deleted)", None),
        ("/dev/shm/somebody", None),
        ("/tmp/mpich_shm_1", None),
        ("", None),
    ],
)
def test_files_of_an_mpi_library_in_shared_memory_are_known_by_name(
    mapped: str, name: str | None
) -> None:
    found = mpi_file(f"7f00-7f01 rw-s 00000000 00:1a 42    {mapped}".rstrip())
    assert found == (None if name is None else Path("/dev/shm") / name)


@pytest.mark.parametrize(
    ("ending", "code"),
    [
        *(("pass", None), ("sys.exit(0)", 0), ("sys.exit(None)", 0), ("sys.exit(3)", 3)),
        *(("sys.exit('text')", 1), ("{}['key']", 1), ("raise KeyboardInterrupt", 1)),
        ("raise type('Odd', (KeyError,), {'__repr__': lambda error: 1 / 0})", 1),
        ("compile('(', '', 'exec')", 1),
    ],
)
def test_a_program_ends_all_ranks_with_its_own_exit_code_and_notes_its_error(
    ending: str, code: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[object] = []
    monkeypatch.setattr(watch_module, "abort_at_exit", said.append)
    monkeypatch.setattr(watch_module, "note", said.append)
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(sys, "path", [*sys.path])
    last = watch_module.ENDED
    try:
        watch_module.run_program(["-c", f"import sys; {ending}"])
    except BaseException as error:  # noqa: BLE001  # every way in which a program may end
        if code:
            last = f"raised {traceback.format_exception_only(error)[-1].strip()}"
    assert said == ([last] if code is None else [last, code])


@pytest.mark.parametrize("ending", ["{}['key']", "sys.exit(3)", "pass"])
def test_the_end_of_a_forked_process_is_not_that_of_the_rank(
    ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[object] = []
    monkeypatch.setattr(watch_module, "abort_at_exit", said.append)
    monkeypatch.setattr(watch_module, "note", said.append)
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(os, "getpid", os.getpid)  # the program replaces it, as a fork does
    with suppress(KeyError, SystemExit):
        watch_module.run_program(["-c", f"import os, sys; os.getpid = lambda: -1; {ending}"])
    assert said == []


@pytest.mark.parametrize("flags", [[], ["-P"]])
@pytest.mark.parametrize("kind", ["file", "link", "-m", "-c"])
def test_a_program_finds_its_modules_and_arguments_as_without_the_launcher(
    kind: str, flags: list[str], tmp_path: Path
) -> None:
    (tmp_path / "apart").mkdir()
    code = "import sys; print(sys.path, *sys.argv)"
    (tmp_path / "apart" / "case.py").write_text(code)
    (tmp_path / "module.py").write_text(code)
    (tmp_path / "link.py").symlink_to("apart/case.py")
    program = {
        "file": ["apart/case.py"],
        "link": ["link.py"],
        "-m": ["-m", "module"],
        "-c": ["-c", code],
    }[kind]
    command = [*program, "one", "-c"]
    watched = [sys.executable, *flags, watch_module.__file__, *command]
    env = outside(PYTHONPATH=str(tmp_path))
    alone = printed([sys.executable, *flags, *command], tmp_path, env, 60)
    assert printed(watched, tmp_path, env, 60) == alone
    assert alone[1].endswith("one -c\n")


def test_what_a_process_outside_of_a_launch_tells_goes_to_standard_error(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(watch_module, "_watch", None)
    watch_module.tell("the kit has failed")
    assert capfd.readouterr().err == "the kit has failed"
