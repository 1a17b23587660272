"""Hold the settings that all cases of a run share, and list the cases.

`python -m benchmarks.cases.setting LIBRARY SETTING P P ...` prints the cases as JSON. The runner
calls this in a separate process, because the library to measure need not be the one that the runner
would import.
"""

import importlib
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.checkout import digest
from benchmarks.records import AXIS, SCHEMA_VERSION, Case
from benchmarks.worker import take_library

BENCHMARKS = Path(__file__).resolve().parent.parent
MEASURING = ("cases/*.py", "sample.py", "machine.py", "worker.py")
LAYERS = ("collectives", "schemes", "layers", "llama")
HYBRID = "hybrid"
NOTHING: dict[str, Any] = dict.fromkeys(
    ("device", "transport", "env", "timing", "phases", "comm", "memory", "work")
)
"""The parts of a record, all None as in a case that was not measured."""


class Setting(msgspec.Struct, frozen=True):
    """One launch.

    Args:
        out: file to which rank 0 appends records.
        run_id: the id of the run, one call of the runner.
        launch: index of the launch of this P within the run.
        pair: the launch's place in a comparison (`records.Pair`); None outside of one.
        commit: the commit of the library that is measured.
        only: texts, one of which a case's id must contain; all cases if empty.
        layers: suites to run; all if empty.
        quick: whether to run only the small selection, each case for longer.
        device: "cpu" or "cuda".
        share_gpu: whether several ranks may use one GPU.
    """

    out: str = ""
    run_id: str = "by-hand"
    launch: int = 0
    pair: dict[str, Any] | None = None
    commit: dict[str, Any] = msgspec.field(default_factory=lambda: {"sha": None, "dirty": None})
    only: tuple[str, ...] = ()
    layers: tuple[str, ...] = ()
    quick: bool = False
    device: str = "cpu"
    share_gpu: bool = False

    def record(self, case: Case, **parts: Any) -> dict[str, Any]:
        """Return the record of a case; a part that is not passed is None in it."""
        shared = {name: getattr(self, name) for name in ("run_id", "launch", "pair", "commit")}
        head = {"schema": SCHEMA_VERSION, **shared, "harness_sha": harness_sha(), "case": case}
        return {**head, **NOTHING, **parts}


class BlockSetting(msgspec.Struct, frozen=True):
    """One launch of the scaling experiment.

    Args:
        case: the block's scheme, mesh, sizes and dtype.
        iterations: timed steps.
        warmup: steps before the timed ones.
        seed: the seed of weights and embedding.
        device: "cpu" or "cuda".
        share_gpu: whether several ranks may use one GPU.
    """

    case: Case
    iterations: int = 10
    warmup: int = 2
    seed: int = 0
    device: str = "cpu"
    share_gpu: bool = False


def mesh_of(scheme: str, ranks: int) -> dict[str, int] | None:
    """Return a scheme's axes with their sizes; None for a hybrid on a prime number of ranks."""
    if scheme != HYBRID:
        return {AXIS: ranks}
    heads = max(n for n in range(1, int(ranks**0.5) + 1) if ranks % n == 0)
    return {"ring": ranks // heads, "ulysses": heads} if heads > 1 or ranks == 1 else None


@cache
def harness_sha() -> str:
    """Return the SHA-256 of the files that decide what is measured and how.

    Records with the same hash were measured by the same code.
    """
    return digest(BENCHMARKS, *MEASURING)


def module_of(layer: str) -> Any:
    """Return the module that has the cases of a suite, such as "schemes"."""
    return importlib.import_module(f"benchmarks.cases.bench_{layer}")


def listed(ranks: int, setting: Setting) -> list[Case]:
    """Return the cases that the setting asks for, in the order in which they run."""
    return [
        case
        for layer in LAYERS
        if not setting.layers or layer in setting.layers
        for case in module_of(layer).cases(ranks, setting.device)
        if not setting.only or any(part in case.id for part in setting.only)
        if not setting.quick or module_of(layer).quick(case)
    ]


@dataclass(frozen=True)
class Verdict:
    """How far the output of the ranks is from the single device's, and how far it may be.

    Args:
        max_abs_error: max |ranks - single device| over all tokens; None if an output is not finite.
        single_error: max |single device - float64| over the tokens computed in float64.
        ranks_error: max |ranks - float64| over the same.
        bound: the bound of `ranks_error`: 2 * single_error + ROUND_OFFS * u * scale.
        single_bound: the bound of `single_error`: sqrt(terms of the longest sum) * u * scale.
        scale: max |float64|.
        tokens: how many tokens were computed in float64.
        passed: whether the output counts as right.
    """

    max_abs_error: float | None
    single_error: float | None
    ranks_error: float | None
    bound: float
    single_bound: float
    scale: float
    tokens: int
    passed: bool

    def __str__(self) -> str:
        errors = (self.max_abs_error, self.ranks_error, self.single_error)
        between, ranks, single = (
            "not finite" if error is None else f"{error:.2e}" for error in errors
        )
        text = (
            f"max |ranks - single device| = {between}; against float64: ranks {ranks}, "
            f"single device {single}, allowed {self.bound:.2e}"
        )
        if self.single_error is None or self.single_error <= self.single_bound:
            return text
        return (
            f"{text}. The single device itself is too far off: {self.single_bound:.2e} is what "
            "rounding explains"
        )


def main(library: str, setting: str, *ranks: str) -> None:
    """Print the cases of every number of ranks as JSON."""
    take_library(Path(library))
    asked = msgspec.json.decode(setting, type=Setting)
    print(msgspec.json.encode({size: listed(int(size), asked) for size in ranks}).decode())


if __name__ == "__main__":
    main(*sys.argv[1:])
