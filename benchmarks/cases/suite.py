"""List the cases, and time one: what pytest collects, and what the runner asks for.

`python -m benchmarks.cases.suite LIBRARY SETTING P P ...` prints the cases as JSON. The runner asks
in a process of its own, because the library that it measures need not be the one that it could
import.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.cases.setting import LAYERS, Setting
from benchmarks.records import Case
from benchmarks.worker import take_library


def module_of(layer: str) -> Any:
    """Return the module that has the cases of a layer."""
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


def bench_case(parallel_benchmark: Callable[..., None], case: Case) -> None:
    """Time one case."""
    parallel_benchmark(case, module_of(case.layer).build)


def main(library: str, setting: str, *ranks: str) -> None:
    """Print the cases of every number of ranks."""
    take_library(Path(library))
    asked = msgspec.json.decode(setting, type=Setting)
    print(msgspec.json.encode({size: listed(int(size), asked) for size in ranks}).decode())


if __name__ == "__main__":
    main(*sys.argv[1:])
