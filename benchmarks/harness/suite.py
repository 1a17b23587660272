"""Which cases there are: `python -m benchmarks.harness.suite LIBRARY SETTING P P ...` prints them as JSON.

The runner asks in a process of its own, because the library that it measures need not be the one that it could import.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.harness.library import take_library
from benchmarks.harness.setting import LAYERS, Setting

if TYPE_CHECKING:
    from benchmarks.harness.case import Case


def cases(ranks: int, setting: Setting) -> list[Case]:
    """All chosen cases on that number of ranks, in the order in which they run."""
    return [case for layer in LAYERS for case in of_module(f"benchmarks.bench_{layer}", ranks, setting)]


def of_module(name: str, ranks: int, setting: Setting) -> list[Case]:
    """The chosen cases of one module."""
    made: list[Case] = importlib.import_module(name).cases(ranks, setting.device)
    return [case for case in made if chosen(case, setting)]


def chosen(case: Case, setting: Setting) -> bool:
    """Whether the setting asks for the case."""
    named = not setting.only or any(part in case.id for part in setting.only)
    return named and (case.quick or not setting.quick) and (not setting.layers or case.layer in setting.layers)


def main(library: Path, setting: Path, *ranks: str) -> None:
    """Print the cases of every number of ranks."""
    take_library(library)
    asked = Setting.load(setting)
    found = {size: [case.as_dict() for case in cases(int(size), asked)] for size in ranks}
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
