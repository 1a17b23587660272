"""One rank of one launch: `mpiexec -n 2 python -m mpi4py -m benchmarks.peers.worker FOLDER`.

FOLDER holds `setting.json`. Every contestant is first checked against one process; then those that are right are timed in rounds,
in a new random order each. Rank 0 writes `record.json`. An exception on any rank ends all of them: `-m mpi4py` calls `MPI_Abort`.
"""

from __future__ import annotations

import gc
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from benchmarks.machine import environment
from benchmarks.peers import problem
from benchmarks.peers.contestants import Contestant, Field
from benchmarks.peers.problem import LIMIT, Part
from benchmarks.peers.setting import Setting
from benchmarks.peers.waiting import meet

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

BROKEN = (RuntimeError, ValueError, TypeError, AttributeError, AssertionError, NotImplementedError)


class Heat:
    """All contestants at one sequence length.

    Args:
        field: who takes part.
        setting: sizes.
        seq: tokens.
    """

    def __init__(self, field: Field, setting: Setting, seq: int) -> None:
        self.world = field.world
        self.contestants = field.contestants(seq, extras=setting.extras(seq))
        self._seq = seq
        self._whole = problem.draw(setting, seq)
        self._parts: dict[tuple[str, int, bool], Part] = {}
        self._expected: dict[bool, list[Tensor]] = {}

    def check(self, contestant: Contestant) -> dict[str, Any]:
        """Whether a contestant's results are those of one process; the same answer on every rank. Also its warm-up."""
        if contestant.attend is None:
            return {"status": "not installed", "reason": contestant.missing}
        broken, found = "", [0.0] * len(problem.NAMES)
        expected = self._expect(contestant.causal)
        with taking_part(contestant, self.world) as takes_part:
            if takes_part:
                try:
                    found = problem.errors(contestant.run(self.part(contestant)), self.part(contestant), expected)
                except BROKEN as error:
                    broken = f"{type(error).__name__}: {error}"
        return verdict(self.world.allgather((broken, found)))

    def sample(self, contestant: Contestant) -> tuple[float, float]:
        """Start and end of one forward and backward on this rank; (inf, -inf) where it has no part in it."""
        with taking_part(contestant, self.world) as takes_part:
            if not takes_part:
                return float("inf"), float("-inf")
            mine = self.part(contestant)
            if contestant.ranks > 1:
                self.world.Barrier()
            start = time.perf_counter()
            contestant.run(mine)
            return start, time.perf_counter()

    def part(self, contestant: Contestant) -> Part:
        """This rank's tokens; made once, so that every sample has the same memory."""
        key = (contestant.layout, contestant.ranks, contestant.heads_first)
        if key not in self._parts:
            rank = self.world.rank if contestant.ranks > 1 else 0
            positions = contestant.sharding(self._seq).positions(rank)
            self._parts[key] = problem.part(self._whole, torch.as_tensor(list(positions)), heads_first=contestant.heads_first)
        return self._parts[key]

    def _expect(self, causal: bool) -> list[Tensor]:
        """The results of one process, on every rank."""
        if causal not in self._expected:
            empty = [torch.empty_like(x) for x in self._whole]
            results = list(problem.alone(self._whole, causal=causal)) if self.world.rank == 0 else empty
            meet(self.world)
            self._expected[causal] = [x.contiguous() for x in results]
            for x in self._expected[causal]:
                self.world.Bcast(x.view(-1).numpy(), 0)
        return self._expected[causal]


def verdict(answers: list[tuple[str, list[float]]]) -> dict[str, Any]:
    """The check of one contestant from what its ranks found."""
    broken = [f"rank {rank}: {text}" for rank, (text, _) in enumerate(answers) if text]
    if broken:
        return {"status": "failed", "reason": broken[0]}
    worst = dict(zip(problem.NAMES, map(max, zip(*(found for _, found in answers), strict=True)), strict=True))
    right = max(worst.values()) <= LIMIT
    shown = {name: error if error < float("inf") else None for name, error in worst.items()}  # JSON knows no infinity
    return {"status": "ok" if right else "wrong", "errors": shown, "limit": LIMIT}


@contextmanager
def taking_part(contestant: Contestant, world: Intracomm) -> Iterator[bool]:
    """Whether this rank computes; one that does not sleeps until the others are done."""
    torch.set_num_threads(contestant.threads)
    try:
        yield contestant.ranks > 1 or world.rank == 0
    finally:
        torch.set_num_threads(1)
    if contestant.ranks == 1:
        meet(world)


def race(heat: Heat, names: list[str], rounds: int, seed: int) -> dict[str, list[float]]:
    """Seconds of every sample of each contestant, from the first rank's start to the last rank's end."""
    runners = [c for c in heat.contestants if c.name in names]
    order = random.Random(seed)
    spans: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for _ in range(rounds):
        gc.collect()
        for contestant in order.sample(runners, len(runners)):
            spans[contestant.name].append(heat.sample(contestant))
    by_rank = heat.world.allgather(spans)
    return {
        name: [
            max(end for _, end in span) - min(start for start, _ in span)
            for span in zip(*(rank[name] for rank in by_rank), strict=True)
        ]
        for name in names
    }


def run_heat(field: Field, setting: Setting, seq: int) -> dict[str, Any]:
    """The record of one length: each contestant's check and, where it is right, its samples."""
    heat = Heat(field, setting, seq)
    record = {contestant.name: heat.check(contestant) for contestant in heat.contestants}
    if setting.check_only:
        return record
    gc.freeze()
    gc.disable()
    right = [name for name, found in record.items() if found["status"] == "ok"]
    for name, samples in race(heat, right, setting.samples(seq), setting.seed + seq).items():
        record[name] |= {"samples_s": samples, "median_s": statistics.median(samples)}
    gc.enable()
    gc.unfreeze()
    return record


def redirect(folder: Path) -> None:
    """Send what this rank prints, and what its libraries do, to a file that is shown if the launch fails."""
    with (folder / f"output-{os.getpid()}").open("w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)


def facts(world: Intracomm) -> dict[str, Any]:
    """Machine and libraries."""
    from mpi4py import MPI

    vendor, numbers = MPI.get_vendor()
    return {**environment(), "mpi": f"{vendor} {'.'.join(map(str, numbers))}", "ranks": world.size}


def main(folder: Path) -> None:
    """Carry out the launch that `folder` describes."""
    from mpi4py import MPI

    redirect(folder)
    setting = Setting.from_dict(json.loads((folder / "setting.json").read_text()))
    world = MPI.COMM_WORLD
    torch.set_num_threads(1)
    field = Field(world, folder)
    record = {"env": facts(world), "seqs": {str(seq): run_heat(field, setting, seq) for seq in setting.seqs}}
    field.free()
    if world.rank == 0:
        (folder / "record.json").write_text(json.dumps(record, allow_nan=False))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
