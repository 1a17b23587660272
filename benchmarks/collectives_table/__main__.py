"""Speed of our collectives on two ranks of this machine: the table of what must be reached, for the MPI that is installed.

Contestants of a row share one pair of processes and take turns; a ratio is the median over all rounds of all launches, with its
exact interval. Exit code: 0 whatever the ratios, 1 if a result was wrong or a launch failed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.collectives_table import tables
from benchmarks.files import write_json
from benchmarks.launching import KEEP_MEMORY, ROOT, commit
from sp_core.launch import command as launch
from sp_core.machine import cores

SCHEMA_VERSION = 1
RANKS = 2
KINDS = ("default", "tuned", "huge", "regret")
YIELDS = ("MPIR_CVAR_ENABLE_HEAVY_YIELD", "OMPI_MCA_mpi_yield_when_idle")
"""What lets ranks share cores; where each has one of its own it makes a library's large messages several times slower."""

HUGE_PAGES = "THP_MEM_ALLOC_ENABLE"
"""Lets torch ask for huge pages, as NumPy does. Who copies out of another process goes through its memory page by page."""
MEMORY = ("GLIBC_TUNABLES", HUGE_PAGES)

FOLDER = ROOT / "benchmarks" / "results"
WIDTH = 150


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, write the record, show the table.

    Returns:
        The exit code.
    """
    from rich.console import Console

    parser = argparse.ArgumentParser(prog="python -m benchmarks.collectives_table", description=__doc__)
    parser.add_argument("--launches", type=int, default=2, metavar="N", help="how often processes start for a row (%(default)s)")
    parser.add_argument("--only", choices=KINDS, help="one kind of launch")
    parser.add_argument("--out", type=Path, default=FOLDER, metavar="DIR", help="default: benchmarks/results")
    parser.add_argument("--timeout", type=float, default=150.0, metavar="S", help="limit of a launch (default: %(default)g)")
    parser.add_argument("--show", type=Path, nargs="+", metavar="FILE", help="show records that are there, and measure nothing")
    options = parser.parse_args(arguments)
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    if options.show:
        for path in options.show:
            tables.show(console, json.loads(path.read_text()))
        return 0
    document: dict[str, Any] = {"schema_version": SCHEMA_VERSION, "commit": commit(), "ranks": RANKS, "launches": []}
    kinds = [kind for kind in KINDS if options.only in (None, kind)]
    order = [kind for _ in range(options.launches) for kind in kinds if kind != "regret"] + [k for k in kinds if k == "regret"]
    for kind in order:
        found = run_once(kind, options.timeout)
        document["launches"].append(found)
        console.print(f"{kind}: {found['status']}, {found['seconds']:.0f} s", highlight=False)
        if found["status"] != "ok":
            console.print(found["reason"], style="red", highlight=False, markup=False)
    _write(options.out, document)
    tables.show(console, document)
    return 0 if all(found["status"] == "ok" for found in document["launches"]) else 1


def run_once(kind: str, timeout: float) -> dict[str, Any]:
    """Start the ranks, wait for their end, and read their record."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="sp_core-collectives-") as name, contextlib.chdir(ROOT), _environment(kind):
        code = launch.run(
            RANKS, ["python", "-m", "mpi4py", "-m", "benchmarks.collectives_table.worker", name, kind], timeout=timeout
        )
        record = Path(name) / "record.json"
        found = json.loads(record.read_text()) if code == 0 and record.exists() else {}
    told = {"status": "ok"} if found else {"status": "failed", "reason": f"exit code {code}; what the ranks printed is above"}
    return {"kind": kind, "seconds": time.monotonic() - start, **told, **found}


@contextlib.contextmanager
def _environment(kind: str) -> Iterator[None]:
    """That of the processes that start meanwhile; as it was afterwards."""
    before = dict(os.environ)
    for name in (*MEMORY, *(YIELDS if cores() >= RANKS else ())):
        os.environ.pop(name, None)
    os.environ |= {"tuned": {"GLIBC_TUNABLES": KEEP_MEMORY}, "huge": {HUGE_PAGES: "1"}}.get(kind, {})
    try:
        yield
    finally:
        for name in (*YIELDS, *MEMORY):
            os.environ.pop(name, None)
            if name in before:
                os.environ[name] = before[name]


def _write(folder: Path, document: dict[str, Any]) -> None:
    """Replace the record of this MPI."""
    write_json(folder / f"collectives_{tables.mpi_of(document).lower().replace(' ', '')}.json", document)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the ranks are ended too
    raise SystemExit(main())
