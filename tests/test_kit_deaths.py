"""Who died first, told by the launcher's watch over processes."""

from __future__ import annotations

import random
import subprocess
from contextlib import ExitStack
from pathlib import Path

import pytest

from sp_core.testing.deaths import Deaths

RANKS = 6


@pytest.mark.parametrize("seed", range(5))
def test_the_first_of_many_deaths_is_told_by_a_launcher_that_looks_late(tmp_path: Path, seed: int) -> None:
    order = random.Random(seed).sample(range(RANKS), RANKS)
    watch = Deaths(tmp_path, RANKS)
    with ExitStack() as stack:
        sleepers = [stack.enter_context(subprocess.Popen(["sleep", "60"])) for _ in range(RANKS)]
        for rank, sleeper in enumerate(sleepers):
            stack.callback(sleeper.kill)
            (tmp_path / f"rank{rank}.pid").write_text(str(sleeper.pid))
        assert sorted(watch.alive()) == list(range(RANKS))
        for rank in order:
            sleepers[rank].kill()
            sleepers[rank].wait()
        assert watch.alive() == {}
    assert watch.first() == order[0]
    assert watch.suspects()[0].startswith(f"rank {order[0]} died first: ")
    assert "dead, the first to die" in watch.story(order[0])
    assert not any("the first to die" in watch.story(rank) for rank in order[1:])
