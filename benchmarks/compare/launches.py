"""The real launches of a comparison: harness and cases of the present tree, the library of one side, all within one run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.compare.pairs import Key
from benchmarks.compare.sides import CompareError, Side
from benchmarks.harness.launches import Plan, UsageError, listing, run_launch
from benchmarks.harness.setting import Setting
from benchmarks.launching import KEEP_MEMORY, Launch, commit, tail

VARIABLES = (f"GLIBC_TUNABLES={KEEP_MEMORY}",)
"""Else it is chance whether a launch has the kernel clear the same pages in every step: Ulysses, forward, P = 2, then takes 7.0 to
9.6 ms on two cores, and 6.8 to 7.5 ms with this."""


@dataclass
class Bench:
    """Starts launches as `nox -s bench` does, but asks only once which cases there are.

    Args:
        run_id: of the comparison, in all its records.
        quick: the small selection, each case for longer.
        device: "cpu" or "cuda".
        share_gpu: let several ranks use one GPU.
        launcher: instead of mpiexec, with `{ranks}` in it.
        timeout: seconds for one launch.
    """

    run_id: str
    quick: bool = True
    device: str = "cpu"
    share_gpu: bool = False
    launcher: str = ""
    timeout: float = 300.0
    _plans: dict[str, Plan] = field(default_factory=dict, init=False)
    _launches: int = field(default=0, init=False)

    def listed(self, side: Side, ranks: Sequence[int]) -> set[Key]:
        """The cases that a side has.

        Raises:
            CompareError: its library cannot be imported, or lacks what all cases need.
        """
        try:
            plan = listing(self._setting(), ranks, side.root, side.python)
        except UsageError as error:
            raise CompareError(f"{side.name}: {error}") from error
        self._plans[side.name] = plan
        return {(case["id"], size) for size, cases in plan.items() for case in cases}

    def launch(self, side: Side, ranks: int, cases: Sequence[str], pair: dict[str, Any], out: Path) -> None:
        """Measure some cases once; each has a record in `out` afterwards, however the launch ends."""
        part = out.with_name("launch.jsonl")  # a file of its own: what reads it need not read all launches before it
        facts = {**commit(side.root), "merge_base": None, "branch": None}
        setting = self._setting(out=str(part), pair=pair, only=tuple(cases), launch=self._launches, commit=facts)
        planned = [case for case in self._plans[side.name][ranks] if any(text in case["id"] for text in cases)]
        self._launches += 1
        try:
            how = Launch(self.launcher, self.timeout, side.python, VARIABLES)
            printed = run_launch(ranks, planned, setting, how, side.root, lambda news: None)
        finally:
            if part.exists():
                with out.open("ab") as file:
                    file.write(part.read_bytes())
                part.unlink()
        if printed:
            with out.with_suffix(".log").open("a") as log:
                log.write(f"{side.name}, P={ranks}, {pair['stage']} pair {pair['index']}\n{tail(printed)}\n\n")

    def _setting(self, **more: Any) -> Setting:
        return Setting(run_id=self.run_id, quick=self.quick, device=self.device, share_gpu=self.share_gpu, **more)
