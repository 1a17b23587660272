"""Speed of our collectives on two ranks of this machine: the table of requirements, for the MPI that is installed.

Contestants of a row share one pair of processes and take turns; a ratio is the median over all
rounds of all launches, with its exact interval. Exit code: 0 whatever the ratios, 1 if a result was
wrong or a launch failed, 2 for options that cannot be run.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.contests.collectives import regret
from benchmarks.contests.collectives.rows import COLUMNS, lines
from benchmarks.contests.contest import RESULTS, Entry, compete, new_document, refused
from benchmarks.launching import (
    KEEP_MEMORY,
    Launch,
    Options,
    Record,
    UsageError,
    about,
    main,
    parse,
    writable,
)
from benchmarks.reporting import terminal
from benchmarks.reporting.tables import make
from benchmarks.reporting.terminal import Console
from sp_core.machine import cores

RANKS = 2
KINDS = ("default", "tuned", "huge", "regret")
YIELDS = ("MPIR_CVAR_ENABLE_HEAVY_YIELD", "OMPI_MCA_mpi_yield_when_idle")
"""Let ranks share cores. Where each rank has a core of its own, they make a library's large messages several times slower."""

HUGE_PAGES = "THP_MEM_ALLOC_ENABLE"
"""Lets torch ask for huge pages, as NumPy does. A copy out of another process goes through its memory page by page."""

MEMORY = {"tuned": KEEP_MEMORY, "huge": f"{HUGE_PAGES}=1"}
OPTIONS: Options = {
    "--launches": about(
        type=int, default=2, metavar="N", help="how often processes start for a row (%(default)s)"
    ),
    "--only": about(choices=KINDS, help="one kind of launch"),
    "--out": about(type=Path, default=RESULTS, metavar="DIR", help="default: benchmarks/results"),
    "--timeout": about(
        type=float, default=150.0, metavar="S", help="limit of a launch (default: %(default)g)"
    ),
    "--show": about(
        type=Path,
        nargs="+",
        metavar="FILE",
        help="show records that are there, and measure nothing",
    ),
}


def variables(kind: str) -> tuple[str, ...]:
    """Return the changes of the environment in which a kind of launch runs."""
    unset = (
        *(text.partition("=")[0] for text in MEMORY.values()),
        *(YIELDS if cores() >= RANKS else ()),
    )
    return *(f"-u{name}" for name in unset), *((MEMORY[kind],) if kind in MEMORY else ())


def mpi_of(document: Record) -> str:
    """Return the MPI of a document."""
    return next(
        (
            launch["transport"]["mpi"]["vendor"]
            for launch in document["launches"]
            if "transport" in launch
        ),
        "no MPI",
    )


def show(screen: Console, document: Record) -> Iterator[str]:
    """Print all tables of a document."""
    launches = [launch for launch in document["launches"] if launch["status"] == "ok"]
    first, mpi = launches[0], mpi_of(document)
    version, env = first["transport"]["mpi"]["version"], first["env"]
    parts = (
        f"{mpi} {version}",
        f"torch {env['torch']}",
        first["device"]["name"],
        f"{env['cores']} cores",
    )
    terminal.say(screen, ", ".join((*parts, str(document["commit"]["sha"]))))
    timed = [launch for launch in launches if "heats" in launch]
    if timed:
        title = f"{mpi}, {document['ranks']} ranks, float32"
        terminal.show(screen, make(title, COLUMNS, (line.cells() for line in lines(timed, mpi))))
    for launch in launches:
        if "summary" in launch:
            terminal.show(screen, regret.table(launch))
    yield from ()


def collectives(arguments: Sequence[str] | None = None) -> int:
    """Measure, write the record, show the table; return the exit code."""
    options = parse("collectives", __doc__, OPTIONS, arguments)
    if options.show:
        for path in options.show:
            list(show(terminal.console(), json.loads(path.read_text())))
        return 0
    kinds = [kind for kind in KINDS if options.only in (None, kind)]
    order = [kind for _ in range(options.launches) for kind in kinds if kind != "regret"] + [
        k for k in kinds if k == "regret"
    ]
    try:
        draft = writable(options.out / "collectives.json")
        launches = [Launch(timeout=options.timeout, variables=variables(kind)) for kind in order]
    except UsageError as error:
        return refused("collectives", error)
    measure = f"{__package__}.contestants:measure"
    entries = [
        Entry(kind, RANKS, measure, kind, how, {"kind": kind})
        for kind, how in zip(order, launches, strict=True)
    ]
    document = new_document(ranks=RANKS)
    code = compete("collectives", entries, document, draft, show)
    if draft.exists():
        shutil.move(
            draft, draft.with_stem(f"collectives_{mpi_of(document).lower().replace(' ', '')}")
        )
    return code


if __name__ == "__main__":
    main(collectives)
