"""List the cases: `python -m benchmarks.cases.suite LIBRARY SETTING P P ...` prints them as JSON.

The runner asks in a process of its own, because the library that it measures need not be the one
that it could import.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import msgspec

from benchmarks.cases.setting import LAYERS, Setting
from benchmarks.records import Case
from benchmarks.worker import take_library


def of_module(name: str, ranks: int, setting: Setting) -> list[Case]:
    """Return the cases of one module that the setting asks for."""
    module = importlib.import_module(name)

    def chosen(case: Case) -> bool:
        named = not setting.only or any(part in case.id for part in setting.only)
        return (
            named
            and (not setting.quick or module.quick(case))
            and (not setting.layers or case.layer in setting.layers)
        )

    return [case for case in module.cases(ranks, setting.device) if chosen(case)]


def main(library: str, setting: str, *ranks: str) -> None:
    """Print the cases of every number of ranks, in the order in which they run."""
    take_library(Path(library))
    asked = msgspec.json.decode(setting, type=Setting)
    modules = [f"benchmarks.cases.bench_{layer}" for layer in LAYERS]
    found = {
        size: [case for name in modules for case in of_module(name, int(size), asked)]
        for size in ranks
    }
    print(msgspec.json.encode(found).decode())


if __name__ == "__main__":
    main(*sys.argv[1:])
