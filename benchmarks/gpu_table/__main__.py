"""AllGather between ranks that share a GPU: naive, staged, pipelined, device memory (ipc), and an MPI that reads it.

Exit code: 0 whatever the times, 1 if a result was wrong or a launch failed, 2 for ranks that are no numbers.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.files import write_json
from benchmarks.gpu_table.rows import rows, slicing
from benchmarks.launching import ROOT, Launch, commit, failure, numbers_of_ranks, tail, watch

if TYPE_CHECKING:
    from rich.console import Console

SCHEMA_VERSION = 1
WORKER = "benchmarks.gpu_table.worker"
WIDTH = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, write the record, show the table.

    Returns:
        The exit code.
    """
    from rich.console import Console

    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_table", description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu tries the program (default: %(default)s)")
    parser.add_argument("--ranks", default="2,4", metavar="P,...", help="default: %(default)s")
    parser.add_argument("--mib", type=float, default=16.0, help="size of the gathered vector (default: %(default)g)")
    parser.add_argument("--out", type=Path, default=ROOT / "reports" / "gpu_table.json", metavar="FILE")
    parser.add_argument("--timeout", type=float, default=150.0, metavar="S", help="limit of a launch (default: %(default)g)")
    parser.add_argument("--show", type=Path, metavar="FILE", help="show a record that is there, and measure nothing")
    options = parser.parse_args(arguments)
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    if options.show:
        show(console, json.loads(options.show.read_text()))
        return 0
    document: dict[str, Any] = {"schema_version": SCHEMA_VERSION, "commit": commit(), "kind": options.device, "launches": []}
    try:
        counts = numbers_of_ranks(options.ranks, ValueError)
    except ValueError as error:
        print(f"gpu_table: {error}", file=sys.stderr)
        return 2
    for ranks in counts:
        document["launches"].append(run_once(ranks, options.device, options.mib, options.timeout))
        write_json(options.out, document)
    show(console, document)
    return 0 if all(launch["status"] == "ok" for launch in document["launches"]) else 1


def run_once(ranks: int, kind: str, mib: float, timeout: float) -> dict[str, Any]:
    """Start the ranks, wait for their end, and read their record."""
    with tempfile.TemporaryDirectory(prefix="sp_core-gpu-") as name:
        command = Launch(timeout=timeout).command(ranks, WORKER, name, kind, str(mib))
        code, output = watch(command, Path(name), timeout, lambda told: None)
        record = Path(name) / "record.json"
        if code == 0 and record.exists():
            return {"ranks": ranks, "status": "ok", **json.loads(record.read_text())}
    return {"ranks": ranks, **failure(code, output, timeout, "measuring"), "output": tail(output)}


def show(console: Console, document: dict[str, Any]) -> None:
    """The rows of every launch, and what stood beside them."""
    from rich import box
    from rich.table import Table

    table = Table("P", "way", "ms", "of the link's rate", "times as quick as pipelined", "", box=box.SIMPLE_HEAD)
    for launch in document["launches"]:
        if launch["status"] != "ok":
            console.print(f"P = {launch['ranks']}: {launch['status']}: {launch['reason']}", style="red", markup=False)
            continue
        for row in rows(launch, on_gpu=document["kind"] == "cuda"):
            shown = ("-" if value is None else f"{value:.2f}" for value in (row.share, row.quicker))
            table.add_row(str(row.ranks), row.name, f"{row.milliseconds:.3f}", *shown, row.mark)
        console.print(
            f"P = {launch['ranks']}: {launch['device']['name']}, {launch['nbytes'] / 2**20:g} MiB; a computation by all ranks "
            f"takes {slicing(launch):.2f} times as long as its share of the device",
            highlight=False,
        )
        for name, reason in launch["missing"].items():
            console.print(f"  {name}: {reason}", highlight=False, markup=False)
    console.print(table)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the ranks are ended too
    raise SystemExit(main())
