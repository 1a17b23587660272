"""Test what a rank writes about itself: its stacks, its time limits, its last place."""

import faulthandler
import os
import py_compile
import select
import signal
import subprocess
import sys
import sysconfig
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock, call

import pytest
from kit.failing import assert_told
from studies.commands import outside, printed

from sp_core.launch import watch
from sp_core.launch.watch import GRACE_SECONDS, KIT, LIBRARY, PLACE_BYTES, RANKS, file_of


@pytest.mark.parametrize(
    ("phase", "example", "longest"),
    [
        *((None, None, 300.0), ("9", "4", 9.0), ("9", "40", 40.0), (None, "400", 400.0)),
        *(("0.4", "0.2", 0.4), ("", "", 300.0), ("inf", "4", watch.LONGEST_SECONDS)),
    ],
)
def test_the_innermost_time_limit_begins_anew_at_each_step(
    phase: str | None,
    example: str | None,
    longest: float,
    monkeypatch: pytest.MonkeyPatch,
    substitute: Callable[..., None],
) -> None:
    """At a limit the stacks are written, and GRACE_SECONDS later an alarm ends the process."""
    for name, value in (("SP_WATCHDOG_PHASE_S", phase), ("SP_WATCHDOG_S", example)):
        monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(
            name, value
        )
    said, limits = Mock(), [longest, 7.0, 3.0, 3.0, 7.0, longest]
    substitute(watch, _limits=[1.0], _watch=SimpleNamespace(hang=5))
    substitute(
        faulthandler, dump_traceback_later=said.dump, cancel_dump_traceback_later=said.cancel
    )
    substitute(signal, setitimer=said.alarm, signal=said.signal)
    watch.limit_phases()
    with suppress(KeyError), watch.limit(7.0):
        with watch.limit(3.0):
            watch.progress()
        raise KeyError
    watch.stop()
    watch.progress()
    assert said.mock_calls == [
        call.signal(signal.SIGALRM, signal.SIG_DFL),
        *(
            each
            for limit in limits
            for each in (
                call.dump(limit, exit=False, file=5),
                call.alarm(signal.ITIMER_REAL, limit + GRACE_SECONDS),
            )
        ),
        call.alarm(signal.ITIMER_REAL, 0.0),
        call.cancel(),
    ]


def test_what_no_rank_does_has_no_limit_and_is_told_on_standard_error(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(watch, "_watch", None)
    monkeypatch.setattr(faulthandler, "dump_traceback_later", None)
    with watch.limit(1.0):
        watch.note("nothing")
        watch.in_flight("nothing")
        watch.tell("the kit has failed")
    assert capfd.readouterr().err == "the kit has failed"


ENDS = {
    "os.kill(os.getpid(), signal.SIGTERM)": (-signal.SIGTERM, "stack"),
    "os.kill(os.getpid(), signal.SIGSEGV)": (-signal.SIGSEGV, "stack"),
    "os.kill(os.getpid(), watch.STACKS)": (0, "stack"),
    # in a rank of `sp-core run` the launcher's module starts to watch, and the kit does so again
    "watch.start(2); watch.tell('told'); os.kill(os.getpid(), watch.STACKS)": (0, "stack"),
    "faulthandler.unregister(watch.STACKS); os.kill(os.getpid(), watch.STACKS)": (0, ""),
    "watch.limit_phases(); time.sleep(60)": (-signal.SIGALRM, "hang"),
}
"""By the last thing that a rank does: its exit code, and the kind of file with its stacks."""


@pytest.mark.parametrize("launched", [True, False])
@pytest.mark.parametrize("last", ENDS)
def test_the_stacks_of_a_rank_outlive_it(last: str, tmp_path: Path, *, launched: bool) -> None:
    """Without a launcher they are on standard error."""
    code, kind = ENDS[last]
    lines = (
        "import faulthandler, os, signal, time; from sp_core.launch import watch",
        "watch.GRACE_SECONDS = 2.0; watch.start(2); watch.tell('told')",
        "print(os.getpid(), flush=True)",
        last,
    )
    os.mkfifo(file_of(tmp_path, 2, "life"))
    life = os.open(file_of(tmp_path, 2, "life"), os.O_RDONLY | os.O_NONBLOCK)
    (ends := select.poll()).register(life)
    limits = {"SP_WATCHDOG_PHASE_S": "0.2", "SP_WATCHDOG_S": "0.1", "TMPDIR": str(tmp_path)}
    env = outside(**limits, **({watch.RUN_DIR: str(tmp_path)} if launched else {}))
    command = [sys.executable, "-c", "\n".join(lines)]
    found = subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=60, check=False
    )
    assert ends.poll(0) == ([(life, select.POLLHUP)] if launched else [])
    os.close(life)
    assert found.returncode == code, found.stderr
    texts = {"stderr": found.stderr}
    if launched:
        texts = {name: file_of(tmp_path, 2, name).read_text() for name in ("stack", "hang")}
        assert file_of(tmp_path, 2, "pid").read_text() == found.stdout.strip()
        # its block is taken at the start, so that a full disk has room for the last place
        assert file_of(tmp_path, 2, "place").read_bytes() == bytes(PLACE_BYTES)
        assert found.stderr == ""
        assert file_of(tmp_path, 2, "place").stat().st_size == PLACE_BYTES  # though disks fill up
    expected = {kind if launched else "stderr"} if kind else set()
    assert {name for name, text in texts.items() if 'File "<string>", line 4' in text} == expected
    assert texts["stack" if launched else "stderr"].startswith("told")
    assert launched or code or [each.name for each in tmp_path.iterdir()] == ["rank2.life"]


@pytest.mark.parametrize("text", ["0", "-1", "nan", "a minute"])
@pytest.mark.parametrize("name", ["SP_WATCHDOG_S", "SP_WATCHDOG_PHASE_S"])
def test_a_time_limit_that_is_none_names_its_variable(
    name: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signal, "signal", Mock())
    monkeypatch.setenv(name, text)
    with pytest.raises(ValueError, match=f"{name}='{text}'"):
        watch.limit_phases()


@pytest.mark.parametrize(
    ("given", "expected"),
    [({name: "3"}, 3) for name in RANKS] + [(dict(zip(RANKS, "456", strict=True)), 4), ({}, None)],
)
def test_a_rank_knows_its_number(
    given: dict[str, str], expected: int | None, tmp_path: Path
) -> None:
    command = [sys.executable, watch.__file__, "-c", "pass"]
    subprocess.run(command, env=outside(**given, SP_RUN_DIR=str(tmp_path)), timeout=60, check=True)
    found = [path.name for path in tmp_path.glob("*.pid")]
    assert found == ([] if expected is None else [f"rank{expected}.pid"])


@pytest.mark.parametrize("length", [0, 1, PLACE_BYTES - 2, PLACE_BYTES - 1, PLACE_BYTES, 9999])
def test_the_last_place_replaces_a_longer_one(
    length: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (tmp_path / "place").open("w+b") as file:
        monkeypatch.setattr(watch, "_watch", SimpleNamespace(place=file.fileno()))
        for text in ("y" * 2000, "x" * length):
            watch.note(text)
        found, _, rest = file.read().partition(b"\0")
    assert found == b"x" * min(length, 511)
    assert len(found) + len(rest) == 511


PURELIB, STDLIB = (sysconfig.get_paths()[name] for name in ("purelib", "stdlib"))
OWNERS = {
    "kit": [f"{KIT[0]}watch.py", f"{KIT[1]}given.py"],
    "library": [f"{LIBRARY}/mesh.py", f"{LIBRARY}/testing_more.py"],
    "foreign": [
        *(f"{STDLIB}/runpy.py", f"{PURELIB}/x.py", "<string>", "MPI.src/a.pyx", "a.pxi"),
        *("/other/lib/python3/dist-packages/x.py", "/.local/site-packages/a/x.py"),
    ],
    "test": [
        *("/some/test.py", "test.py", f"{LIBRARY}_more/mesh.py", f"{LIBRARY}.py"),
        *("/some/site-packages.py", "/my-site-packages/x.py"),
    ],
}


@pytest.mark.parametrize(
    ("owner", "file"),
    [
        pytest.param(owner, file, id=f"{owner}-{n}")  # an id with the path is one checkout's only
        for owner, files in OWNERS.items()
        for n, file in enumerate(files)
    ],
)
def test_every_source_file_has_an_owner(
    owner: str, file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert watch.owner(file) == owner
    monkeypatch.chdir("/")
    assert watch.owner(os.path.relpath(file, "/") if file[0] == "/" else file) == owner


def through(files: list[str], end: Callable[[], object]) -> object:
    """Call `end` through one function in each of the files, the innermost first."""
    for file in files:
        found: dict[str, Callable[[], object]] = {}
        exec(compile("def inner(): return end()", file, "exec"), {"end": end}, found)
        end = found["inner"]
    with ThreadPoolExecutor() as pool:  # else this file would be a caller
        return pool.submit(end).result(60)


@pytest.mark.parametrize(
    ("inner_first", "place"),
    [
        ("library test", "sp_core/mesh.py:1 (called from some/test.py:1)"),
        ("kit library foreign kit test", "sp_core/mesh.py:1 (called from some/test.py:1)"),
        ("library more test foreign", "sp_core/mesh.py:1 (called from some/test.py:1)"),
        ("more library foreign", "sp_core/testing_more.py:1"),
        ("foreign test library test", "some/test.py:1"),
        ("kit foreign", "an unknown place"),
    ],
)
def test_a_place_is_the_innermost_in_library_or_test(inner_first: str, place: str) -> None:
    files = {name: files[0] for name, files in OWNERS.items()} | {"more": OWNERS["library"][1]}
    assert through([files[name] for name in inner_first.split()], watch.here) == place


def test_the_example_under_way_replaces_a_longer_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "flying"
    with path.open("w") as file:
        monkeypatch.setattr(watch, "_watch", SimpleNamespace(flying=file.fileno()))
        for text in ("a long example", "caf\udce9", "short", ""):
            watch.in_flight(text)
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
    monkeypatch.setenv(watch.RUN_DIR, str(tmp_path))
    if is_session:
        (tmp_path / watch.STARTED).touch()
    watch.abort_at_exit(code)
    assert codes == aborts


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch, substitute: Callable[..., None]) -> list[object]:
    """Replace exits and notes; return the list that records them."""
    found: list[object] = []
    substitute(watch, abort_at_exit=found.append, note=found.append)
    substitute(sys, argv=[], path=[*sys.path])
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    return found


@pytest.mark.parametrize(
    ("ending", "code"),
    [
        *(("pass", None), ("sys.exit(0)", 0), ("sys.exit(None)", 0), ("sys.exit(3)", 3)),
        *(("sys.exit('text')", 1), ("{}['key']", 1), ("raise KeyboardInterrupt", 130)),
        ("raise type('Odd', (KeyError,), {'__repr__': lambda error: 1 / 0})", 1),
        ("compile('(', '', 'exec')", 1),
    ],
)
def test_a_program_ends_all_ranks_with_its_own_exit_code_and_notes_its_error(
    ending: str, code: int | None, said: list[object]
) -> None:
    last = watch.ENDED
    try:
        watch.run_program(["-c", f"import sys; {ending}"])
    except BaseException as error:  # noqa: BLE001  # every way in which a program may end
        if code:
            last = f"raised {traceback.format_exception_only(error)[-1].strip()}"
    assert said == ([last] if code is None else [code, last])


def test_a_full_disk_changes_nothing_of_a_program(monkeypatch: pytest.MonkeyPatch) -> None:
    with Path("/dev/full").open("wb", buffering=0) as full:  # each write finds no space left
        files = dict.fromkeys(("place", "flying", "stack"), full.fileno())
        monkeypatch.setattr(watch, "_watch", SimpleNamespace(**files))
        assert [tell("x") for tell in (watch.note, watch.in_flight, watch.tell)] == [None] * 3


@pytest.mark.parametrize("ending", ["{}['key']", "sys.exit(3)", "pass"])
def test_the_end_of_a_forked_process_is_not_that_of_the_rank(
    ending: str, said: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getpid", os.getpid)  # the program replaces it, as a fork does
    with suppress(KeyError, SystemExit):
        watch.run_program(["-c", f"import os, sys; os.getpid = lambda: -1; {ending}"])
    assert said == []


PROGRAM = """
import sys; print(sys.path, *sys.argv)
import atexit, pickle, threading
class Kept: pass
def annotated(x: int): pass
def pickled():
    threading.main_thread().join()
    print(pickle.loads(pickle.dumps(Kept)), sys.modules["__main__"].Kept is Kept)
threading.Thread(target=pickled).start()
atexit.register(lambda: print(sys.modules["__main__"].Kept is Kept))
print(annotated.__annotations__, __name__, globals().get("__file__"), "Path" in globals())
note = os = traceback = abort_at_exit = ENDED = None
"""


@pytest.mark.parametrize("flags", [[], ["-P"]])
@pytest.mark.parametrize("kind", ["file", "link", "folder", "compiled", "-m", "-c"])
def test_a_program_runs_to_its_end_as_without_the_launcher(
    kind: str, flags: list[str], tmp_path: Path
) -> None:
    (tmp_path / "apart").mkdir()
    code = PROGRAM
    (tmp_path / "apart" / "case.py").write_text(code)
    (tmp_path / "module.py").write_text(code)
    (tmp_path / "apart" / "__main__.py").write_text(code)
    (tmp_path / "link.py").symlink_to("apart/case.py")
    py_compile.compile(str(tmp_path / "module.py"), str(tmp_path / "module.pyc"))
    program = {
        "file": ["apart/case.py"],
        "link": ["link.py"],
        "folder": ["apart"],
        "compiled": ["module.pyc"],
        "-m": ["-m", "module"],
        "-c": ["-c", code],
    }[kind]
    command = [*program, "one", "-c"]
    watched = [sys.executable, *flags, watch.__file__, *command]
    env = outside(PYTHONPATH=str(tmp_path))
    alone = printed([sys.executable, *flags, *command], tmp_path, env, 60)
    assert printed(watched, tmp_path, env, 60) == alone
    assert "one -c\n" in alone[1]
    assert alone[1].endswith("True\nTrue\n")


@pytest.mark.parametrize("version", [(3, 13), (3, 14)])
def test_indented_text_after_c_is_read_as_by_python(
    version: tuple[int, int], said: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "version_info", version)
    with nullcontext() if version >= (3, 14) else pytest.raises(IndentationError):
        watch.run_program(["-c", "\n  import sys\n  if sys:\n    x = 1\n", "else:"])


@pytest.mark.parametrize("listens", [True, False])
@pytest.mark.parametrize("host", ["", watch.this_host(), "far pid:[1]"])
def test_a_rank_on_another_host_than_its_launcher_is_refused(
    host: str, tmp_path: Path, *, listens: bool
) -> None:
    """There the launcher's process ids, pipes and perhaps files are not those of the rank."""
    folder = tmp_path / ("here" if listens else "there")
    if listens:
        folder.mkdir()
        os.mkfifo(file_of(folder, 0, "life"))
        life = os.open(file_of(folder, 0, "life"), os.O_RDONLY | os.O_NONBLOCK)
    else:
        folder = folder if host else tmp_path
    env = outside(PMI_RANK="0", SP_RUN_DIR=str(folder), SP_RUN_HOST=host, PMI_FD="1")
    code, text = printed([sys.executable, watch.__file__, "-c", "print('on')"], tmp_path, env, 60)
    if listens:
        os.close(life)
    if not host or (listens and host == watch.this_host()):
        assert (code, text) == (0, "on\n")
        return
    assert code == 1
    assert_told(
        text,
        f"sp-core run on host {host} cannot watch this rank on {watch.this_host()}. ",
        "If it has ended, unset SP_RUN_DIR and SP_RUN_HOST",
        "Start programs on several nodes with mpiexec or srun directly",
    )
    assert text.endswith("cmd=abort exitcode=1\n")


def test_a_program_has_the_signals_of_users_for_itself() -> None:
    assert watch.STACKS not in (signal.SIGUSR1, signal.SIGUSR2)
    assert signal.SIGRTMIN < watch.STACKS < signal.SIGRTMAX
