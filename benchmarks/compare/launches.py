"""The real launches of a comparison: harness and cases of the present tree, the library of one side, all within one run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.cases.setting import Setting
from benchmarks.compare.pairs import Key
from benchmarks.compare.sides import Side
from benchmarks.launching import KEEP_MEMORY, Launch, UsageError, commit
from benchmarks.record import Plan, listing, run_launch

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

    def launch(self, side: Side, ranks: int, cases: Sequence[str], pair: dict[str, Any], out: Path) -> None:
        """Measure some cases once; each has a record in `out` afterwards, however the launch ends."""
        part = out.with_name("launch.jsonl")  # a file of its own: its reader need not read all launches before it
        facts = {**commit(side.root), "merge_base": None, "branch": None}
        more = {"out": str(part), "pair": pair, "only": tuple(cases), "launch": self._launches, "commit": facts}
        planned = [case for case in self._plans[side.name][ranks] if any(text in case.id for text in cases)]
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
                log.write(f"{side.name}, P={ranks}, {pair['stage']} pair {pair['index']}\n{printed}\n\n")
