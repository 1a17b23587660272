"""Collectives and ring attention over an emulated network: hosts are network namespaces, their links are shaped.

Every algorithm is checked across hosts, then the requirements on slow links are measured. As root
it needs `ip` and `tc`; without root it uses a model of the link inside the transport, and says so.
Exit code: 0 if all results were right, whatever the times; 1 if one was wrong or a launch failed; 2
for options that cannot be run.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median

import msgspec

from benchmarks.contests.contest import RESULTS, compete, new_document, refused
from benchmarks.contests.netlab import starting
from benchmarks.contests.netlab.hosts import NetlabError, check_system
from benchmarks.contests.netlab.setting import SETTINGS, Setting, rows
from benchmarks.files import write_json
from benchmarks.launching import Launch, Options, Record, UsageError, about, main, parse, writable
from benchmarks.records import fingerprint
from benchmarks.reporting import terminal
from benchmarks.reporting.tables import make
from benchmarks.reporting.terminal import Console

MODEL = "link model inside the transport, on this machine, because there is no root; the library's own collectives are not measured"
NAMESPACES = "network namespaces"
OPTIONS: Options = {
    "--only": about(default="", metavar="TEXT", help="launches with this in their name"),
    "--list": about(action="store_true", help="names of the launches"),
    "--rounds": about(type=int, metavar="N", help="samples of each contestant"),
    "--link-model": about(action="store_true", help="the model of the link, as without root"),
    "--out": about(type=Path, metavar="FILE", help="default: benchmarks/results/netlab-MPI.json"),
}


def chosen(options: argparse.Namespace, *, modelled: bool) -> list[Setting]:
    """Return the launches that are asked for; the model has one rank per host."""
    found = [
        setting
        for setting in SETTINGS
        if options.only in setting.name and (setting.per_host == 1 or not modelled)
    ]
    return [
        msgspec.structs.replace(one, modelled=modelled, rounds=options.rounds or one.rounds)
        for one in found
    ]


def netlab(arguments: Sequence[str] | None = None) -> int:
    """Check and measure; return the exit code."""
    options = parse("netlab", __doc__, OPTIONS, arguments)
    modelled = options.link_model or os.geteuid() != 0
    settings = chosen(options, modelled=modelled)
    if options.list or not settings or (options.rounds or 1) < 1:
        print("\n".join(setting.name for setting in SETTINGS))
        return 0 if options.list else 2
    try:
        if not modelled:
            check_system()
        mpi = starting.installed()
        out = writable(options.out or RESULTS / f"netlab-{mpi}.json")
        net = MODEL if modelled else NAMESPACES
        document = new_document(mpi=mpi, net=net)
        print(f"netlab: {mpi} over {net}")
        measure, launch = f"{__package__}.measure:measure", Launch(timeout=starting.TIMEOUT)
        entries = [
            starting.Hosted(
                one.name,
                one.ranks,
                measure,
                one,
                launch,
                {"setting": msgspec.structs.asdict(one)},
                mpi,
            )
            for one in settings
        ]
        code = compete("netlab", entries, document, out, show)
    except UsageError as error:
        return refused("netlab", error)
    except NetlabError as error:
        print(f"netlab: {error}")
        return 1
    write_json(out, {**document, **_summary(document)})
    return code


def show(screen: Console, document: Record) -> Iterator[str]:
    """Print the requirements, which are for MPICH; for another MPI they are shown beside."""
    launches = {launch["name"]: launch for launch in document["launches"]}
    for name, launch in launches.items():
        if "checked" in launch:
            text = f"{launch['checked']} algorithms right on {', '.join(launch['hosts'])}"
        else:
            text = "ms: " + ", ".join(
                f"{who} {median(times) * 1e3:.2f}" for who, times in launch["seconds"].items()
            )
        terminal.say(screen, f"{name}: {text}")
    title = "over the link" if document["mpi"] == "mpich" else "over the link (required of MPICH)"
    shown = [(row.text, *row.cells()) for row in rows(launches)]
    terminal.show(screen, make(title, ("requirement", "must be", "median, interval", ""), shown))
    yield from ()


def _summary(document: Record) -> Record:
    """Rows, machine and fingerprint of a document."""
    launches = {launch["name"]: launch for launch in document["launches"]}
    found: Record = {"rows": [{**asdict(row), "mark": row.mark} for row in rows(launches)]}
    launch = next((launch for launch in launches.values() if "env" in launch), None)
    if launch is not None:
        said = {"mpi": launch["mpi"], "mode": document["net"]}
        found |= {"env": launch["env"], "fingerprint": fingerprint(launch["env"], {}, said)}
    return found


if __name__ == "__main__":
    main(netlab)
