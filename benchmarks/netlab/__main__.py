"""Collectives and ring attention over an emulated network: hosts are network namespaces, their links are shaped.

Every algorithm is checked across hosts, then what is required on slow links is measured. As root it needs `ip` and `tc`; without
root it uses a model of the link inside the transport, and says so. Exit code: 0 if all results were right, whatever the times;
1 if one was wrong or a launch failed; 2 for options that cannot be run.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from benchmarks.files import write_json
from benchmarks.launching import ROOT, commit
from benchmarks.netlab import mpis
from benchmarks.netlab.hosts import NetlabError, check_system
from benchmarks.netlab.launching import run_once
from benchmarks.netlab.rows import SETTINGS, Row, rows
from benchmarks.netlab.setting import Setting
from benchmarks.records import fingerprint

if TYPE_CHECKING:
    from rich.console import Console

SCHEMA_VERSION = 1
ATTEMPTS = 2  # MPICH's launcher now and then dies while it starts ("demux engine error")
MODEL = "link model inside the transport, on this machine, because there is no root; the library's own collectives are not measured"
NAMESPACES = "network namespaces"
STYLES = {"reached": "green", "not reached": "red"}
Document = dict[str, Any]


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(prog="python -m benchmarks.netlab", description=__doc__)
    made.add_argument("--only", default="", metavar="TEXT", help="launches with this in their name")
    made.add_argument("--list", action="store_true", help="names of the launches")
    made.add_argument("--rounds", type=int, metavar="N", help="samples of each contestant")
    made.add_argument("--link-model", action="store_true", help="the model of the link, as without root")
    made.add_argument("--out", type=Path, metavar="FILE", help="default: benchmarks/results/netlab-MPI.json")
    return made


def chosen(options: argparse.Namespace, *, modelled: bool) -> list[Setting]:
    """The launches that are asked for; the model has one rank per host."""
    found = [replace(setting, modelled=modelled) for setting in SETTINGS if options.only in setting.name]
    found = [setting for setting in found if not modelled or setting.per_host == 1]
    return [replace(setting, rounds=options.rounds or setting.rounds) for setting in found]


def main(arguments: Sequence[str] | None = None) -> int:
    """Check and measure.

    Returns:
        The exit code.
    """
    from rich.console import Console

    options = parser().parse_args(arguments)
    modelled = options.link_model or os.geteuid() != 0
    settings, console = chosen(options, modelled=modelled), Console(width=None if sys.stdout.isatty() else 140)
    if options.list or not settings or (options.rounds or 1) < 1:
        print("\n".join(setting.name for setting in SETTINGS))
        return 0 if options.list else 2
    try:
        if not modelled:
            check_system()
        return _measure(console, settings, options.out, mpis.installed())
    except (NetlabError, ValueError, FileNotFoundError) as error:
        console.print(f"netlab: {error}", style="red", markup=False, soft_wrap=True)
        return 1


def _measure(console: Console, settings: Sequence[Setting], out: Path | None, mpi: str) -> int:
    net = MODEL if settings[0].modelled else NAMESPACES
    document: Document = {"schema_version": SCHEMA_VERSION, "commit": commit(), "mpi": mpi, "net": net, "launches": {}}
    console.print(f"netlab: {mpi} over {net}", highlight=False, soft_wrap=True)
    for setting in settings:
        record = attempts(setting, mpi)
        document["launches"][setting.name] = {"setting": asdict(setting), **record}
        console.print(f"{setting.name}: {record['status']}{_told(record)}", highlight=False, markup=False, soft_wrap=True)
        write(out or ROOT / "benchmarks" / "results" / f"netlab-{mpi}.json", document)
    console.print(table(list(rows(document["launches"])), judged=mpi == "mpich"))
    return 0 if all(launch["status"] == "ok" for launch in document["launches"].values()) else 1


def attempts(setting: Setting, mpi: str) -> dict[str, Any]:
    """The record of a launch, tried again where the launcher itself failed; never where a result was wrong."""
    record: dict[str, Any] = {}
    for _ in range(ATTEMPTS):
        record = run_once(setting, mpi)
        if record["status"] == "ok" or "demux engine error" not in record["output"]:
            break
    return record


def write(path: Path, document: Document) -> None:
    """Replace the file, with what its launches have found so far."""
    for launch in document["launches"].values():
        if "env" in launch:
            document["env"] = launch["env"]
            document["fingerprint"] = fingerprint(launch["env"], {}, {"mpi": launch["mpi"], "mode": document["net"]})
    document["rows"] = [{**asdict(row), "mark": row.mark} for row in rows(document["launches"])]
    write_json(path, document)


def table(found: Sequence[Row], *, judged: bool) -> Any:
    """The requirements, which are for MPICH; for another MPI they are shown beside."""
    from rich import box
    from rich.table import Table

    title = "over the link" if judged else "over the link (required of MPICH)"
    shown = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left")
    for column in ("", "median [interval]", "must be", "mark"):
        shown.add_column(column, justify="left" if column in ("", "mark") else "right", overflow="fold")
    for row in found:
        style = STYLES.get(row.mark.split(",")[0], "yellow") if judged else ""
        shown.add_row(row.text, str(row.found or "-"), f"{row.relation} {row.target:g}", row.mark, style=style)
    return shown


def _told(record: dict[str, Any]) -> str:
    """What is worth a line about a launch."""
    if record["status"] != "ok":
        return f"\n{record['reason']}\n{record['output']}"
    if "checked" in record:
        return f", {record['checked']} algorithms right on {', '.join(record['hosts'])}"
    return ", ms: " + ", ".join(f"{name} {median(times) * 1e3:.2f}" for name, times in record["seconds"].items())


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the hosts are taken down
    raise SystemExit(main())
