"""Check and time contestants: each first against one process; those that are right take turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import msgspec
import torch
from torch import Tensor

from benchmarks.contests.peers import contestants as problem
from benchmarks.contests.peers.contestants import LIMIT, Contestant, Field, Part
from benchmarks.contests.peers.setting import Setting
from benchmarks.launching import Record
from benchmarks.machine import facts
from benchmarks.sample import ABSENT, Span, makespans, meet_asleep, race
from benchmarks.worker import THREADS, Intracomm, Rank

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
        self.contestants = list(field.contestants(seq, extras=setting.extras(seq)))
        self._seq = seq
        self._whole = problem.draw(setting, seq)
        self._parts: dict[tuple[str, int, bool], Part] = {}
        self._expected: dict[bool, list[Tensor]] = {}

    def check(self, contestant: Contestant) -> Record:
        """Compare a contestant's results with those of one process; the same answer on every rank. This is its warm-up too."""
        if contestant.attend is None:
            return {"status": "not installed", "reason": contestant.missing}
        broken, found = "", [0.0] * len(problem.NAMES)
        expected = self._expect(contestant.causal)
        with taking_part(contestant, self.world) as takes_part:
            if takes_part:
                try:
                    found = problem.errors(
                        contestant.run(self.part(contestant)), self.part(contestant), expected
                    )
                except BROKEN as error:
                    broken = f"{type(error).__name__}: {error}"
        return verdict(self.world.allgather((broken, found)))

    def sample(self, contestant: Contestant) -> Span:
        """Time one forward and backward on this rank."""
        with taking_part(contestant, self.world) as takes_part:
            if not takes_part:
                return ABSENT
            mine = self.part(contestant)
            if contestant.ranks > 1:
                self.world.Barrier()
            start = time.perf_counter()
            contestant.run(mine)
            return start, time.perf_counter()

    def part(self, contestant: Contestant) -> Part:
        """Return this rank's tokens; made once, so that every sample has the same memory."""
        key = (contestant.layout, contestant.ranks, contestant.heads_first)
        if key not in self._parts:
            rank = self.world.rank if contestant.ranks > 1 else 0
            positions = contestant.sharding(self._seq).positions(rank)
            self._parts[key] = problem.part(
                self._whole, torch.as_tensor(list(positions)), heads_first=contestant.heads_first
            )
        return self._parts[key]

    def _expect(self, causal: bool) -> list[Tensor]:
        """The results of one process, on every rank."""
        if causal not in self._expected:
            empty = [torch.empty_like(x) for x in self._whole]
            results = (
                list(problem.alone(self._whole, causal=causal)) if self.world.rank == 0 else empty
            )
            meet_asleep(self.world)
            self._expected[causal] = [x.contiguous() for x in results]
            for x in self._expected[causal]:
                self.world.Bcast(x.view(-1).numpy(), 0)
        return self._expected[causal]


def verdict(answers: list[tuple[str, list[float]]]) -> Record:
    """Return the check of one contestant from the error text and the errors of each rank."""
    broken = [f"rank {rank}: {text}" for rank, (text, _) in enumerate(answers) if text]
    if broken:
        return {"status": "failed", "reason": broken[0]}
    worst = dict(
        zip(
            problem.NAMES, map(max, zip(*(found for _, found in answers), strict=True)), strict=True
        )
    )
    right = max(worst.values()) <= LIMIT
    shown = {
        name: error if error < float("inf") else None for name, error in worst.items()
    }  # JSON knows no infinity
    return {"status": "ok" if right else "wrong", "errors": shown, "limit": LIMIT}


@contextmanager
def taking_part(contestant: Contestant, world: Intracomm) -> Iterator[bool]:
    """Give whether this rank computes; one that does not sleeps until the others are done."""
    torch.set_num_threads(contestant.threads)
    try:
        yield contestant.ranks > 1 or world.rank == 0
    finally:
        torch.set_num_threads(THREADS)
    if contestant.ranks == 1:
        meet_asleep(world)


def run_heat(field: Field, setting: Setting, seq: int) -> Record:
    """Return the record of one length: each contestant's check and, if it is right, its samples."""
    heat = Heat(field, setting, seq)
    record = {contestant.name: heat.check(contestant) for contestant in heat.contestants}
    if not setting.check_only:
        right = {
            c.name: partial(heat.sample, c)
            for c in heat.contestants
            if record[c.name]["status"] == "ok"
        }
        for name, spans in race(
            field.world, right, setting.samples(seq), setting.seed + seq
        ).items():
            record[name] |= {
                "samples_s": makespans(spans),
                "median_s": statistics.median(makespans(spans)),
            }
    return record


def measure(values: Any, rank: Rank) -> Record:
    """Carry out one launch."""
    setting = msgspec.convert(values, Setting)
    field = Field(rank.world, rank.folder)
    said = facts(rank.world, torch.device("cpu"), "all")
    record = {**said, "seqs": {str(seq): run_heat(field, setting, seq) for seq in setting.seqs}}
    field.free()
    return record
