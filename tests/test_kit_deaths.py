"""Test parts of the launcher without a launch: what ranks leave, and the first death."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest.mock import Mock, call

import pytest
from studies.commands import outside

from sp_core.launch import deaths as deaths_module, watch as watch_module
from sp_core.launch.deaths import Deaths, innermost, shortened
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
    tmp_path: Path,
    watch: Deaths,
    ranks: list[subprocess.Popen[bytes]],
    looks: str,
    seed: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first death is that of the rank whose pipe closed first, even if others end sooner.

    If the launcher looks late, the ranks here hold no pipes, and the order of deaths counts.
    Pythons of conda and uv lack `os.pidfd_open`.
    """
    monkeypatch.delattr(os, "pidfd_open", raising=False)
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


def test_the_next_process_of_a_rank_is_watched(
    tmp_path: Path, watch: Deaths, ranks: list[subprocess.Popen[bytes]]
) -> None:
    """A shell may run one session after another."""
    first, second = ranks[:2], ranks[2:]
    introduce(tmp_path, first)
    end(first)
    assert watch.alive() == {}
    assert len(watch.dead) == 2
    introduce(tmp_path, second)
    assert watch.alive() == {rank: each.pid for rank, each in enumerate(second)}
    assert watch.dead == {}
    end(second[::-1])
    assert watch.suspects()[0].startswith("rank 1 died first: killed by SIGKILL")


def wait_for(is_so: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def assert_ended(pids: Iterable[str]) -> None:
    """Assert that these processes have ended. A process that is killed takes a moment to end."""
    end = time.monotonic() + 5
    while living := [pid for pid in pids if deaths_module.stat(pid)[:1] not in ([], ["Z"])]:
        assert time.monotonic() < end, living


@pytest.mark.parametrize("stopped", [False, True])
def test_a_living_rank_writes_its_stacks_and_a_stopped_one_is_ended(
    tmp_path: Path, watch: Deaths, monkeypatch: pytest.MonkeyPatch, *, stopped: bool
) -> None:
    monkeypatch.setattr(deaths_module, "DUMP_SECONDS", 0.4)
    program = "import time; from sp_core.launch import watch; watch.start(2); time.sleep(60)"
    rank = subprocess.Popen([sys.executable, "-c", program], env=outside(SP_RUN_DIR=str(tmp_path)))
    try:
        wait_for(lambda: watch.alive())
        opened = [file.readlink() for file in Path(f"/proc/{rank.pid}/fd").iterdir()]
        assert file_of(tmp_path, 2, "life") in opened
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


def test_all_files_that_were_opened_are_closed(
    tmp_path: Path, ranks: list[subprocess.Popen[bytes]]
) -> None:
    opened = Path("/proc/self/fd")
    before = {*opened.iterdir()}
    introduce(tmp_path, ranks)
    with closing(Deaths(tmp_path, RANKS)) as deaths:
        deaths.look(0.0)
        assert len([*opened.iterdir()]) > len(before) + RANKS
    assert {*opened.iterdir()} <= before


@pytest.mark.parametrize(
    ("number", "seconds", "is_sent"), [(15, 0.01, True), (15, 0.0, False), (-127, 9.0, False)]
)
def test_a_signal_is_passed_on_if_ranks_have_time_to_leave(
    number: int, seconds: float, is_sent: bool, tmp_path: Path, substitute: Any
) -> None:
    told = Mock()
    substitute(deaths_module, _signal=told)
    substitute(Deaths, alive=lambda _: {0: 1234})
    with closing(Deaths(tmp_path, 1)) as deaths:
        deaths.pass_on(number, seconds, lambda: None)
    assert told.called == is_sent


GONE, KILLED = "its exit code is not known", "killed by SIGKILL"
ENDED, RAISED = watch_module.ENDED, "raised SystemExit: 7"


@pytest.mark.parametrize(
    ("causes", "noted", "first", "outcome"),
    [
        ([], {}, None, "succeeded"),
        (["exit code 0", "exit code 0"], {}, 2, "succeeded"),
        (["exit code 0", "exit code 10"], {}, 2, "failed"),
        ([KILLED, "exit code 1"], {}, 3, "failed"),
        (["killed by SIGTERM", GONE, "killed by SIGSEGV"], {}, 1, "failed"),
        (["killed by SIGTERM", GONE, KILLED], {}, 2, "failed"),
        ([GONE, KILLED], {}, 2, "failed"),
        ([GONE, GONE], {}, 2, ""),
        ([GONE, "exit code 0"], {}, 3, ""),
        ([GONE, GONE], {2: ENDED, 3: ENDED}, 2, "succeeded"),
        ([GONE, GONE], {2: ENDED, 3: RAISED}, 3, "failed"),
        ([KILLED, KILLED, KILLED], {3: RAISED}, 3, "failed"),
        ([KILLED, None, KILLED], {3: RAISED}, 3, "failed"),
        ([GONE, None, GONE], {3: RAISED}, 3, ""),
        ([None, KILLED, None], {3: RAISED}, 3, "failed"),
        ([None, None, None], {3: RAISED}, None, "succeeded"),
        (["killed by SIGSEGV", KILLED], {3: RAISED}, 2, "failed"),
        ([KILLED, "exit code 1"], {2: RAISED}, 2, "failed"),
        ([KILLED], {2: ENDED}, 2, "failed"),
    ],
)
def test_a_rank_that_ended_by_itself_or_noted_an_error_is_the_first(
    causes: list[str | None],
    noted: dict[int, str],
    first: int | None,
    outcome: str,
    watch: Deaths,
    tmp_path: Path,
) -> None:
    """Ranks 2, 3 and 1 end in this order, after rank 0 has closed its pipe without dying.

    A rank without a cause is not yet dead. A rank that was killed may have been killed by mpiexec,
    and a noted error may come from the loss of another rank.
    """
    for rank, text in noted.items():
        file_of(tmp_path, rank, "place").write_text(f"{text}\0in an older place")
    ends = dict(zip((2, 3, 1), causes, strict=False))
    watch._ended = dict.fromkeys([0, *ends])
    watch.dead = {rank: cause for rank, cause in sorted(ends.items()) if cause}
    assert watch.first() == first
    told = [int(cause[10:]) for cause in filter(None, causes) if cause.startswith("exit code 1")]
    assert watch.exit_code() == (0 if outcome == "succeeded" else (*told, 1)[0])
    assert watch.failed() == (outcome == "failed")
    died = f"died first: {watch.dead[first]}" if first in watch.dead else "failed first"
    place = f"; last place: {noted[first]}" if first in noted else ""
    assert watch.suspects() == ([] if first is None else [f"rank {first} {died}{place}"])


def test_a_rank_that_the_kernel_does_not_let_us_watch_lives_until_its_process_has_ended(
    tmp_path: Path,
    watch: Deaths,
    ranks: list[subprocess.Popen[bytes]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(deaths_module, "_LIBC", Mock(**{"syscall.return_value": -1}))
    introduce(tmp_path, ranks)
    assert len(watch.alive()) == RANKS
    assert watch.first() is None
    end(ranks[:1])
    assert [*watch.alive()] == [1, 2, 3]
    assert watch.suspects() == [f"rank 0 died first: {GONE}"]


STOPPED, MARK = "stopped by a signal", "Thread 1 (most recent call first):"


def test_the_story_of_a_rank_has_its_state_place_and_stacks(
    tmp_path: Path, watch: Deaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 lives, rank 1 died first, rank 2 too, and rank 3 was never seen. Later one stops."""
    watch._watched = {0: 70, 1: 71, 2: 72}
    monkeypatch.setattr(watch, "look", lambda _: None)
    watch.dead, watch._ended = {2: "killed by SIGKILL", 1: "exit code 3"}, {1: None, 2: None}
    file_of(tmp_path, 1, "place").write_bytes(b"in Barrier\0at an older place")
    file_of(tmp_path, 2, "stack").write_text(f"{MARK}\n{FRAMES['kit']}\n{FRAMES['test']}\n")
    nothing = "no stack was written"
    stacks = f"{MARK}\n{FRAMES['test']}"
    unseen = "never seen: it runs no Python program, or ended before that began"
    assert [watch.story(rank) for rank in range(RANKS)] == [
        f"---- rank 0: alive (process 70)\n{nothing}",
        "---- rank 1: dead, the first to die, exit code 3 (process 71)\nlast place: in Barrier\n"
        + nothing,
        f"---- rank 2: dead, killed by SIGKILL (process 72)\n{stacks}",
        f"---- rank 3: {unseen}\n{nothing}",
    ]
    assert watch.suspects() == ["rank 1 died first: exit code 3; last place: in Barrier"]
    watch._stopped = {2: 72, 0: 70}
    assert [f"rank {rank} is {STOPPED}" for rank in (0, 2)] == watch.suspects()
    assert watch.story(2).startswith(f"---- rank 2: {STOPPED} (process 72)\n")


def test_in_a_session_without_a_death_those_are_suspected_that_wait_for_nobody(
    tmp_path: Path, watch: Deaths
) -> None:
    for rank, frames in enumerate((["kit", "test"], ["foreign", "library", "test"], ["test"])):
        lines = [MARK, *(FRAMES[frame] for frame in frames)]
        file_of(tmp_path, rank, "stack").write_text("\n".join(lines))
    assert watch.suspects() == []
    (tmp_path / watch_module.STARTED).touch()
    assert watch.suspects() == [
        f"rank {rank} waits for nobody: it is at {FRAMES[at].strip()}"
        for rank, at in ((1, "library"), (2, "test"))
    ]


@pytest.mark.parametrize("stopped", [[], [1], [1, 0]])
def test_ranks_that_live_are_asked_for_stacks_and_stopped_ones_are_ended(
    stopped: list[int], tmp_path: Path, watch: Deaths, substitute: Callable[..., None]
) -> None:
    """Rank 2 has written its stacks already, and rank 3 has died."""
    watch._watched, watch.dead = {rank: 70 + rank for rank in range(RANKS)}, {3: "exit code 1"}
    file_of(tmp_path, 2, "hang").write_text("Timeout")
    did = Mock()
    did.kill.side_effect = ProcessLookupError  # they have just ended
    substitute(os, kill=did.kill)
    substitute(deaths_module, stat=lambda pid: ["T" if pid - 70 in stopped else "S"], time=did)
    watch.dump()
    half = deaths_module.DUMP_SECONDS / 2
    assert did.mock_calls == [
        call.sleep(half),
        *(call.kill(70 + rank, watch_module.STACKS) for rank in (0, 1) if rank not in stopped),
        call.sleep(half),
        *(
            call.kill(70 + rank, number)
            for rank in sorted(stopped)
            for number in (signal.SIGTERM, signal.SIGCONT)
        ),
        call.sleep(deaths_module.WRITE_SECONDS if stopped else 0.0),
    ]


@pytest.mark.parametrize("known", ["by the kernel", "by its parent", "after a while", "never"])
@pytest.mark.parametrize(
    ("status", "cause"),
    [
        (0, "exit code 0"),
        (3 << 8, "exit code 3"),
        (signal.SIGSEGV, "killed by SIGSEGV"),
        (signal.SIGRTMIN + 1, f"killed by signal {signal.SIGRTMIN + 1}"),
    ],
)
def test_the_cause_of_a_death_is_what_the_kernel_knows(
    known: str, status: int, cause: str, substitute: Callable[..., None]
) -> None:
    late, slept = known == "after a while", Mock()
    told = Mock(return_value=status if known == "by the kernel" else None)
    fields = ["?"] * late  # the file of a process that is there can be unreadable
    if known in ("by its parent", "by the kernel"):
        fields = ["Z", "1", str(status)]
    told.side_effect = [*[None] * 4, status] if late else None
    substitute(
        deaths_module,
        _status_of=told,
        stat=lambda pid: fields if pid == 70 else ["S", "9"],
        time=slept,
    )
    found = deaths_module._cause(70, 5)
    assert found == cause if known != "never" else found.startswith(GONE)
    told.assert_called_with(5)
    assert slept.sleep.call_count == {"after a while": 4, "never": 5}.get(known, 0)
