"""Which cases there are: `python -m benchmarks.harness.suite SETTING P P ...` prints them as JSON, for programs without torch."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

from benchmarks.harness.case import Case
from benchmarks.harness.setting import Setting

SUITES = {"collectives": "bench_collectives", "schemes": "bench_schemes", "layers": "bench_layers"}
"""Module of each layer."""


def cases(ranks: int, setting: Setting) -> list[Case]:
    """All chosen cases on that number of ranks, in the order in which they run."""
    return [case for layer, name in SUITES.items() for case in of_module(f"benchmarks.{name}", ranks, setting, layer)]


def of_module(name: str, ranks: int, setting: Setting, layer: str | None = None) -> list[Case]:
    """The chosen cases of one module."""
    if layer is not None and setting.layers and layer not in setting.layers:
        return []
    made: list[Case] = importlib.import_module(name).cases(ranks, setting.device)
    return [case for case in made if chosen(case, setting)]


def chosen(case: Case, setting: Setting) -> bool:
    """Whether the setting asks for the case."""
    named = not setting.only or any(part in case.id for part in setting.only)
    return named and (case.quick or not setting.quick) and (not setting.layers or case.layer in setting.layers)


def main(setting: Path, *ranks: str) -> None:
    """Print the cases of every number of ranks."""
    asked = Setting.load(setting)
    found = {size: [case.as_dict() for case in cases(int(size), asked)] for size in ranks}
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
