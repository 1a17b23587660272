"""A benchmark as pytest-benchmark's documentation has it, of ranks with unequal work.

It hangs. test_bench.py starts it.
"""

import os
import time
from pathlib import Path
from typing import Any

from mpi4py import MPI


def test_plain(benchmark: Any) -> None:
    world = MPI.COMM_WORLD

    def step() -> None:
        world.Barrier()
        time.sleep(0.001 + 0.1 * world.rank)

    # so that their first call, from which they conclude how often to repeat, takes what they work
    world.Barrier()
    Path(os.environ["SP_STARTED"], str(world.rank)).touch()
    benchmark(step)
