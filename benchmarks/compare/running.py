"""Starts the launches of a comparison in their random order, stage by stage, and says how long it will take."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import msgspec

from benchmarks.cases.setting import Setting
from benchmarks.compare.pairs import SIDES, STAGES, Key, coin, suspects
from benchmarks.compare.sides import Side
from benchmarks.launching import KEEP_MEMORY, Launch, UsageError, commit
from benchmarks.record import Plan, listing, run_launch
from benchmarks.records import read

Told = Callable[[str, int, int, float], None]
"""Told after every launch: what was launched, how many are done, of how many in this stage, and seconds that the rest will take."""


class Runner(Protocol):
    """What measures: one launch of some cases on one number of ranks."""

    def listed(self, side: Side, ranks: Sequence[int]) -> set[Key]:
        """The cases that a side has."""

    def launch(
        self, side: Side, ranks: int, cases: Sequence[str], pair: dict[str, Any], out: Path
    ) -> None:
        """Measure some cases once; a record of each is appended to `out`, also of those that fail."""


@dataclass
class Session:
    """The launches of one comparison.

    Args:
        runner: what measures.
        sides: base and head.
        seed: of the coins.
        out: file of records.
        told: hears of progress.
    """

    runner: Runner
    sides: tuple[Side, Side]
    seed: int
    out: Path
    told: Told
    seconds: list[float] = field(default_factory=list)

    def run(self, keys: Iterable[Key]) -> None:
        """Both stages for some cases: all in the first, those that look changed in the second."""
        screened = self._stage("screen", _by_ranks(keys))
        again = set(suspects(read(self.out).records)) if self.out.exists() else set()
        self._stage("confirm", _by_ranks(again & set(screened)))

    def _stage(self, stage: str, cases: dict[int, list[str]]) -> list[Key]:
        """All pairs of a stage, one after the other for every number of ranks in turn."""
        total, done = 2 * STAGES[stage] * len(cases), 0
        living = dict(cases)
        for index in range(STAGES[stage]):
            for ranks, names in list(living.items()):
                thrown = coin(self.seed, stage, ranks, index)
                for place, side in enumerate(self.sides if thrown == 0 else self.sides[::-1]):
                    pair = {"index": index, "stage": stage, "side": side.name, "slot": place}
                    start = time.monotonic()
                    self.runner.launch(
                        side, ranks, names, {**pair, "coin": thrown, "seed": self.seed}, self.out
                    )
                    self.seconds.append(time.monotonic() - start)
                    done += 1
                    self.told(
                        f"{stage} pair {index + 1}, P={ranks}, {side.name}",
                        done,
                        total,
                        (total - done) * statistics.mean(self.seconds),
                    )
                if index == 0 and self._hopeless(ranks):
                    del living[ranks]
                    total -= 2 * (STAGES[stage] - 1)
        return [(name, ranks) for ranks, names in cases.items() for name in names]

    def _hopeless(self, ranks: int) -> bool:
        """Whether a side has no time for any case: more pairs would not change that."""
        records = (
            [r for r in read(self.out).records if r.case.ranks == ranks]
            if self.out.exists()
            else []
        )
        timed = {record.pair.side for record in records if record.timing and record.pair}
        return timed != set(SIDES)


def _by_ranks(keys: Iterable[Key]) -> dict[int, list[str]]:
    found: dict[int, list[str]] = {}
    for name, ranks in sorted(keys):
        found.setdefault(ranks, []).append(name)
    return dict(sorted(found.items()))


VARIABLES = (KEEP_MEMORY,)
"""Without it, it is chance whether the kernel clears the same pages in every step of a launch.

Ulysses, forward, P = 2, on two cores, takes 7.0 to 9.6 ms without, and 6.8 to 7.5 ms with this.
"""


@dataclass
class Bench:
    """Starts launches as `nox -s bench` does, but asks only once which cases there are.

    Args:
        setting: of every launch.
        launcher: instead of mpiexec, with `{ranks}` in it.
        timeout: seconds for one launch.
    """

    setting: Setting
    launcher: str = ""
    timeout: float = 300.0
    _plans: dict[str, Plan] = field(default_factory=dict, init=False)
    _launches: int = field(default=0, init=False)

    def listed(self, side: Side, ranks: Sequence[int]) -> set[Key]:
        """Return the cases that a side has.

        Raises:
            UsageError: its library cannot be imported, or lacks what all cases need.
        """
        try:
            plan = self._plans[side.name] = listing(self.setting, ranks, side.root, side.python)
        except UsageError as error:
            raise UsageError(f"{side.name}: {error}") from error
        return {(case.id, size) for size, cases in plan.items() for case in cases}

    def launch(
        self, side: Side, ranks: int, cases: Sequence[str], pair: dict[str, Any], out: Path
    ) -> None:
        """Measure some cases once; each has a record in `out` afterwards, however the launch ends."""
        part = out.with_name(
            "launch.jsonl"
        )  # a file of its own: its reader need not read all launches before it
        facts = {**commit(side.root), "merge_base": None, "branch": None}
        more = {
            "out": str(part),
            "pair": pair,
            "only": tuple(cases),
            "launch": self._launches,
            "commit": facts,
        }
        planned = [
            case for case in self._plans[side.name][ranks] if any(text in case.id for text in cases)
        ]
        self._launches += 1
        try:
            how = Launch(self.launcher, self.timeout, side.python, VARIABLES)
            setting = msgspec.structs.replace(self.setting, **more)
            printed = run_launch(ranks, planned, setting, how, side.root, lambda news: None)
        finally:
            if part.exists():
                with out.open("ab") as file:
                    file.write(part.read_bytes())
                part.unlink()
        if printed:
            with out.with_suffix(".log").open("a") as log:
                log.write(
                    f"{side.name}, P={ranks}, {pair['stage']} pair {pair['index']}\n{printed}\n\n"
                )
