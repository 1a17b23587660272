"""Who died first, told by the launcher's watch over processes."""

from __future__ import annotations

import os
import random
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from sp_core.launch.deaths import Deaths
from sp_core.launch.watch import hold_life

RANKS = 6
SEEDS = range(5)


@pytest.fixture
def watch(tmp_path: Path) -> Iterator[Deaths]:
    with closing(Deaths(tmp_path, RANKS)) as deaths:
        yield deaths


@pytest.fixture
def ranks() -> Iterator[list[subprocess.Popen[bytes]]]:
    with ExitStack() as stack:
        sleepers = [stack.enter_context(subprocess.Popen(["sleep", "60"])) for _ in range(RANKS)]
        for sleeper in sleepers:
            stack.callback(sleeper.kill)
        yield sleepers


def introduce(folder: Path, sleepers: list[subprocess.Popen[bytes]]) -> None:
    for rank, sleeper in enumerate(sleepers):
        (folder / f"rank{rank}.pid").write_text(str(sleeper.pid))


def end(sleepers: list[subprocess.Popen[bytes]], order: list[int]) -> None:
    for rank in order:
        sleepers[rank].kill()
        sleepers[rank].wait()


def check_that_the_first_is_told(watch: Deaths, order: list[int]) -> None:
    assert watch.alive() == {}
    assert watch.first() == order[0]
    assert watch.suspects()[0].startswith(f"rank {order[0]} died first: ")
    assert "dead, the first to die" in watch.story(order[0])
    assert not any("the first to die" in watch.story(rank) for rank in order[1:])


@pytest.mark.parametrize("seed", SEEDS)
def test_the_first_of_many_deaths_is_told_by_a_launcher_that_looks_late(
    tmp_path: Path, watch: Deaths, ranks: list[subprocess.Popen[bytes]], seed: int
) -> None:
    order = random.Random(seed).sample(range(RANKS), RANKS)
    introduce(tmp_path, ranks)
    assert sorted(watch.alive()) == list(range(RANKS))
    end(ranks, order)
    check_that_the_first_is_told(watch, order)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("looks", ["before it knows the ranks", "at the start", "each time"])
def test_one_whose_files_were_closed_goes_before_those_that_were_killed_for_it(
    tmp_path: Path, watch: Deaths, ranks: list[subprocess.Popen[bytes]], looks: str, seed: int
) -> None:
    """mpiexec hears of a death by the files that it closes, and those that it kills then can be gone before the first is."""
    order = random.Random(seed).sample(range(RANKS), RANKS)
    held = [hold_life(tmp_path, rank) for rank in range(RANKS)]
    if looks != "before it knows the ranks":
        introduce(tmp_path, ranks)
    watch.look(0.0)
    for rank in order:
        os.close(held[rank])
        assert looks != "each time" or len(watch.alive()) == RANKS
    introduce(tmp_path, ranks)
    end(ranks, order[::-1])
    check_that_the_first_is_told(watch, order)


def test_of_those_that_were_gone_before_they_were_seen_it_says_that_it_knows_nothing(
    tmp_path: Path, watch: Deaths, ranks: list[subprocess.Popen[bytes]]
) -> None:
    end(ranks, list(range(RANKS)))
    introduce(tmp_path, ranks)
    assert watch.alive() == {}
    assert "how is not known here" in watch.suspects()[0]


def test_without_a_launcher_nothing_is_held(tmp_path: Path) -> None:
    assert hold_life(tmp_path, 0) == -1
    Deaths(tmp_path, 1).close()
    assert hold_life(tmp_path, 0) == -1
