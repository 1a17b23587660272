"""The real launches of a comparison: `python -m benchmarks.record` from the present tree, with the library of one side."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.compare.pairs import Key
from benchmarks.compare.sides import CompareError, Side
from benchmarks.launching import tail

RECORD = ("-m", "benchmarks.record")
USAGE = 2  # the exit code for options that make no run
LIST_SECONDS = 120.0


@dataclass(frozen=True)
class RecordRunner:
    """Starts the benchmark runner.

    Args:
        options: for every launch, such as `--quick`.
        timeout: seconds for one launch.
        program: what the interpreter runs.
    """

    options: tuple[str, ...] = ()
    timeout: float = 600.0
    program: tuple[str, ...] = RECORD

    def listed(self, side: Side, ranks: Sequence[int]) -> set[Key]:
        """The cases that a side has: lines of a case and its number of ranks.

        Raises:
            CompareError: the runner does not know an option, or the library of this side cannot be imported.
        """
        wanted = ",".join(str(n) for n in ranks)
        code, output = self._run(side, ["--list", "--ranks", wanted, *self.options], LIST_SECONDS)
        if code != 0:
            raise CompareError(f"the cases of {side.name} cannot be listed (exit code {code}):\n{tail(output)}")
        return {(case, int(number)) for case, number in (line.split() for line in output.splitlines() if line.strip())}

    def launch(self, side: Side, ranks: int, cases: Sequence[str], pair: dict[str, Any], out: Path) -> None:
        """Measure some cases once. A launch that leaves no records is seen by what is missing.

        Raises:
            CompareError: the runner does not know an option.
        """
        chosen = [argument for case in cases for argument in ("--only", case)]
        told = ["--ranks", str(ranks), "--out", str(out), "--pair", json.dumps(pair), *chosen, *self.options]
        code, output = self._run(side, told, self.timeout)
        if code == USAGE:
            raise CompareError(f"the benchmark runner refuses its options:\n{tail(output)}")
        if code != 0:
            log = out.with_suffix(".log")
            with log.open("a") as file:
                file.write(f"{side.name}, P={ranks}, {pair['stage']} pair {pair['index']}: exit code {code}\n{tail(output)}\n\n")

    def _run(self, side: Side, arguments: Sequence[str], timeout: float) -> tuple[int | None, str]:
        """Exit code, None where time ran out, and what was printed."""
        with tempfile.TemporaryDirectory(prefix="sp_core-launch-") as folder:
            return watch([side.python, *self.program, "--root", str(side.root), *arguments], Path(folder), timeout)
