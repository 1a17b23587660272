"""Start the launches of a comparison in their random order, stage by stage."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.cases.setting import Setting
from benchmarks.compare.pairs import SIDES, STAGES, coin, grouped
from benchmarks.compare.result import Key
from benchmarks.compare.sides import Side
from benchmarks.launching import KEEP_MEMORY, Launch, UsageError, commit
from benchmarks.record import Plan, listing, run_launch
from benchmarks.records import Record, read

Heard = Callable[[str, str, int, int, float], None]
"""Hears after every launch: stage, launch, how many are done, of how many, seconds left."""

VARIABLES = (KEEP_MEMORY,)
"""Without it, it is chance whether the kernel clears the same pages in every step of a launch.

Ulysses, forward, P = 2, on two cores, takes 7.0 to 9.6 ms without, and 6.8 to 7.5 ms with this.
"""


@dataclass
class Bench:
    """Starts launches as `nox -s bench` does, but asks only once which cases there are.

    Args:
        setting: of every launch.
        how: ranks are started, but for interpreter and variables.
    """

    setting: Setting
    how: Launch
    plans: dict[str, Plan] = field(default_factory=dict, init=False)
    launches: int = field(default=0, init=False)

    def listed(self, side: Side, ranks: Sequence[int]) -> set[Key]:
        """Return the cases that a side has.

        Raises:
            UsageError: its library cannot be imported, or lacks what all cases need.
        """
        try:
            plan = self.plans[side.name] = listing(self.setting, ranks, side.root, side.python)
        except UsageError as error:
            raise UsageError(f"{side.name}: {error}") from error
        return {(case.id, size) for size, cases in plan.items() for case in cases}

    def launch(
        self, side: Side, ranks: int, cases: Sequence[str], pair: dict[str, Any], out: Path
    ) -> None:
        """Measure some cases once. Each has a record in `out` then, however the launch ends."""
        part = out.with_name("launch.jsonl")  # its reader need not read all launches before it
        setting = msgspec.structs.replace(
            self.setting,
            out=str(part),
            pair=pair,
            only=tuple(cases),
            launch=self.launches,
            commit={**commit(side.root), "merge_base": None, "branch": None},
        )
        plan = self.plans[side.name][ranks]
        planned = [case for case in plan if any(text in case.id for text in cases)]
        self.launches += 1
        try:
            how = Launch(self.how.prefix, self.how.timeout, side.python, VARIABLES)
            printed = run_launch(ranks, planned, setting, how, side.root, lambda news: None)
        finally:
            if part.exists():
                with out.open("ab") as file:
                    file.write(part.read_bytes())
                part.unlink()
        if printed:
            about = f"{side.name}, P={ranks}, {pair['stage']} pair {pair['index']}"
            with out.with_suffix(".log").open("a") as log:
                log.write(f"{about}\n{printed}\n\n")


@dataclass
class Session:
    """The launches of one comparison.

    Args:
        bench: what measures.
        sides: base and head.
        seed: of the coins.
        out: file of records.
        heard: hears of progress.
    """

    bench: Bench
    sides: tuple[Side, Side]
    seed: int
    out: Path
    heard: Heard
    seconds: list[float] = field(default_factory=list)

    def run(self, keys: set[Key]) -> None:
        """Measure both stages: all cases in the first, those that look changed in the second."""
        self._stage("screen", keys)
        groups = grouped(self._records())
        self._stage("confirm", {key for key in groups if groups[key].is_suspicious} & keys)

    def _stage(self, stage: str, keys: set[Key]) -> None:
        """Measure all pairs of a stage, one after the other for every number of ranks in turn."""
        living: dict[int, list[str]] = {}
        for case, ranks in sorted(keys, key=lambda key: (key[1], key[0])):
            living.setdefault(ranks, []).append(case)
        total, done = 2 * STAGES[stage] * len(living), 0
        for index in range(STAGES[stage]):
            for ranks, names in list(living.items()):
                thrown = coin(self.seed, stage, ranks, index)
                about = {"index": index, "stage": stage, "coin": thrown, "seed": self.seed}
                for slot, side in enumerate(self.sides if thrown == 0 else self.sides[::-1]):
                    pair, start = {**about, "side": side.name, "slot": slot}, time.monotonic()
                    self.bench.launch(side, ranks, names, pair, self.out)
                    self.seconds.append(time.monotonic() - start)
                    done += 1
                    left = (total - done) * statistics.mean(self.seconds)
                    what = f"pair {index + 1}, P={ranks}, {side.name}"
                    self.heard(stage, what, done, total, left)
                if index == 0 and self._hopeless(ranks):
                    del living[ranks]
                    total -= 2 * (STAGES[stage] - 1)

    def _hopeless(self, ranks: int) -> bool:
        """Return whether a side has no time for any case: more pairs would not change that."""
        mine = [record for record in self._records() if record.case.ranks == ranks]
        return {record.pair.side for record in mine if record.timing and record.pair} != set(SIDES)

    def _records(self) -> list[Record]:
        return read(self.out).records
