"""Time our collectives on two ranks of this machine: the table of requirements, for one MPI.

Contestants of a row share one pair of processes and take turns; a ratio is the median over all
rounds of all launches, with its exact interval, or from six launches on over their medians. Exit
code: 0 whatever the ratios, 1 if a result was wrong or a launch failed, 2 for options that cannot
be run.
"""

import argparse
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from benchmarks.contests.contest import Contest, Entry, Part, at_least
from benchmarks.launching import KEEP_MEMORY, Launch, Record, about
from benchmarks.reporting.tables import Table, make, size
from benchmarks.statistics import FEWEST, Requirement, exact_interval
from sp_core.machine import cores

RANKS = 2
KINDS = ("default", "tuned", "huge", "regret")
YIELDS = ("MPIR_CVAR_ENABLE_HEAVY_YIELD", "OMPI_MCA_mpi_yield_when_idle")
"""Variables that let ranks share cores. If each has a core, they make large messages far slower."""

HUGE_PAGES = "THP_MEM_ALLOC_ENABLE"
"""A variable that lets torch ask for huge pages, as NumPy does.

Copies between processes go page by page.
"""

MEMORY = {"tuned": KEEP_MEMORY, "huge": f"{HUGE_PAGES}=1"}
KIB, MIB = 1 << 10, 1 << 20
OURS = (
    "segmented_ring",
    "rabenseifner",
    "pairwise",
    "ring",
    "recursive_doubling",
    "bruck",
    "binomial",
)
"""Our contestants over messages. The quickest one counts in a row that names no others."""
WINDOW = (*OURS, "window, staged", "window")
"""These, and ours in shared memory, on an ordinary tensor and on a resident one."""


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Args:
        what: the text of the line.
        op, nbytes: the collective, and the bytes of the whole vector (of a piece, in a ring
            exchange); the line must hold at each size.
        ours, other: contestants; the quickest of `ours` counts.
        target: the least ratio of the other's time to ours; None if the line is not judged.
        kind: the launches in which the line is judged: "default"; "tuned", in which the C library
            keeps freed memory; "huge", in which torch asks for huge pages.
        scratch: the most bytes of scratch memory for ours; None without a limit.
        only: the MPI that the line is about; both if empty.
        microseconds: how much longer ours may take; None if a ratio is required.
    """

    what: str
    op: str
    nbytes: tuple[int, ...]
    ours: tuple[str, ...] = OURS
    other: str = "library"
    target: float | None = None
    kind: str = "default"
    scratch: int | None = None
    only: str = ""
    microseconds: float | None = None


LARGE, SHARED, SCATTERED = (
    (64 * MIB, 256 * MIB),
    (64 * KIB, MIB, 4 * MIB, 16 * MIB),
    (256 * KIB, 4 * MIB, 64 * MIB),
)
DEFAULTS = (64 * KIB, MIB, 16 * MIB)
SMALL_SCRATCH = ("segmented_ring", "pairwise", "window, staged")
HALVED = ("bf16 segmented_ring", "bf16 ring", "bf16 window, staged")
MOVES = ("all_gather", "all_to_all", "broadcast", "reduce")
ROWS = (
    Row(
        "all_reduce, large, scratch of 4 MiB",
        "all_reduce",
        LARGE,
        SMALL_SCRATCH,
        target=2.5,
        scratch=4 * MIB,
    ),
    Row(
        "the same, malloc tuned",
        "all_reduce",
        LARGE,
        SMALL_SCRATCH,
        target=0.95,
        kind="tuned",
        scratch=4 * MIB,
    ),
    Row(
        "the same, tensors on huge pages",
        "all_reduce",
        LARGE,
        SMALL_SCRATCH,
        target=2.5,
        kind="huge",
        scratch=4 * MIB,
    ),
    Row("all_reduce in a window", "all_reduce", SHARED, ("window", "window, in place"), target=2.0),
    Row("the same, of an ordinary tensor", "all_reduce", SHARED, ("window, staged",)),
    Row(
        "the memory floor over all_reduce",
        "all_reduce",
        (4 * MIB,),
        ("window, in place",),
        other="memory floor",
        target=0.9,
    ),
    Row("reduce_scatter by messages", "reduce_scatter", SCATTERED, target=2.5, only="Open MPI"),
    Row("reduce_scatter by messages", "reduce_scatter", SCATTERED, only="MPICH"),
    Row("reduce_scatter in a window", "reduce_scatter", SCATTERED, ("window",), target=4.0),
    Row("the same, of an ordinary tensor", "reduce_scatter", SCATTERED, ("window, staged",)),
    Row("ring exchange by messages", "shift", (MIB, 4 * MIB), ("plan of the library",)),
    Row("ring exchange in a window", "shift", (MIB, 4 * MIB), ("window",), target=3.0),
    Row("the same, of an ordinary tensor", "shift", (MIB, 4 * MIB), ("window, staged",)),
    Row(
        "read in place, over a barrier",
        "shift",
        (KIB, MIB, 64 * MIB),
        ("read in place",),
        other="barrier",
        microseconds=2.0,
    ),
    Row(
        "bf16 all_reduce against float32",
        "all_reduce",
        (16 * MIB, 64 * MIB),
        HALVED,
        target=2.0,
    ),
    *(
        Row(f"{op} against gloo", op, (64 * KIB, MIB, 16 * MIB), WINDOW, other="gloo", target=3.0)
        for op in ("all_reduce", "reduce_scatter")
    ),
    *(
        Row(f"{op} against gloo", op, (64 * KIB, MIB, 16 * MIB), WINDOW, other="gloo", target=2.0)
        for op in MOVES
    ),
    *(
        Row(f"{op} by auto without constants", op, DEFAULTS, ("auto",), target=1 / 1.2)
        for op in (*MOVES, "all_reduce", "reduce_scatter", "shift")
    ),
    *(
        Row(f"Plan.run, {op}", op, (64,), ("plan of the library",), microseconds=2.0)
        for op in ("all_reduce", "all_gather")
    ),
)


def heat_of(row: Row, nbytes: int) -> str:
    """Return the name of a heat: the contestants of one row at one size, which take turns.

    Rows do not share heats: contestants push each other's tensors out of the caches, and gloo's
    threads take processor time from the contestants after them.
    """
    return f"{row.what}, {row.op} {nbytes}"


def heats(kind: str) -> dict[str, tuple[str, int, tuple[str, ...]]]:
    """Return collective, bytes and contestants of each heat of a launch."""
    return {
        heat_of(row, nbytes): (row.op, nbytes, (row.other, *row.ours))
        for row in ROWS
        if row.kind == kind
        for nbytes in row.nbytes
    }


def judged(row: Row, nbytes: int, launches: Sequence[Record]) -> tuple[Requirement, str, int]:
    """Return the requirement of a row at one size, our best contestant, and its scratch bytes.

    Ours and the other one are compared round by round. Rounds of one launch are not independent, so
    with `FEWEST` launches each counts once, with its median.
    """
    limit = (">=", row.target) if row.microseconds is None else ("<=", row.microseconds)
    required = Requirement(row.what, *limit, None)
    kinds = (launch["heats"] for launch in launches if launch["kind"] == row.kind)
    found = [heats[heat_of(row, nbytes)] for heats in kinds if heat_of(row, nbytes) in heats]
    there = [name for name in row.ours if found and all(name in heat["samples"] for heat in found)]
    if not there or any(row.other not in heat["samples"] for heat in found):
        return required, "", 0
    times = {
        name: [seconds for heat in found for seconds in heat["samples"][name]]
        for name in (*there, row.other)
    }
    best = min(there, key=lambda name: statistics.median(times[name]))
    by_launch = [
        [
            other / ours if row.microseconds is None else (ours - other) * 1e6
            for other, ours in zip(samples[row.other], samples[best], strict=True)
        ]
        for samples in (heat["samples"] for heat in found)
    ]
    values = [*chain(*by_launch)]
    if len(found) >= FEWEST:
        values = [*map(statistics.median, by_launch)]
    scratch = max(heat["scratch"][best] for heat in found)
    fails = row.scratch is not None and scratch > row.scratch
    return replace(required, found=exact_interval(values), fails=fails), best, scratch


COLUMNS = ("what", "vector", "ours", "must be", "median, interval", "scratch", "")


def cells(row: Row, nbytes: int, launches: Sequence[Record]) -> tuple[str, ...]:
    """Return the cells of one line, in the order of COLUMNS."""
    required, ours, scratch = judged(row, nbytes, launches)
    must, found, mark = required.cells()
    must += " us more" if row.microseconds is not None else ""
    return row.what, size(nbytes), ours, must, found, size(scratch) if ours else "-", mark


MEDIAN, WORST, MICROSECONDS = 0.05, 0.15, 2.0
"""Limits of "auto": the median regret, and the 95th percentile of regrets above so many us."""

SHOWN = 12  # cases of regret, the worst ones
REGRETS = ("collective", "vector", "chosen", "best")
TIMES = {"us": "seconds", "of the best": "least", "predicted us": "predicted", "model us": "plain"}


def regrets(launch: Record) -> Table:
    """Return a table of the worst choices of "auto", with the required figures in its title."""
    told = launch["summary"]
    title = (
        f"auto over {told['cases']} cases: median regret {told['median']:.1%} "
        f"(<= {MEDIAN:.0%}), 95th percentile {told['p95']:.1%}, "
        f"{told['p95_beyond_microseconds']:.1%} where more than {MICROSECONDS:g} us "
        f"(<= {WORST:.0%}): {'reached' if told['reached'] else 'not reached'}"
    )
    note = "prediction off by {median:.0%} (median), {p95:.0%} (95th); ".format(
        **told["prediction_error"]
    ) + "the model without corrections by {median:.0%}, {p95:.0%}".format(**told["model_error"])
    worst = sorted(launch["cases"], key=lambda case: case["least"] / case["seconds"])[:SHOWN]
    rows = [
        (
            *(case["op"], size(case["nbytes"]), case["chosen"], case["best"]),
            *(f"{case[kind] * 1e6:,.1f}" for kind in TIMES.values()),
        )
        for case in worst
    ]
    return make(title, (*REGRETS, *TIMES), rows, note)


def variables(kind: str) -> tuple[str, ...]:
    """Return the changes of the environment for a kind of launch, as `Launch.variables`."""
    unset = [text.partition("=")[0] for text in MEMORY.values()]
    unset += YIELDS if cores() >= RANKS else ()
    return *(f"-u{name}" for name in unset), *((MEMORY[kind],) if kind in MEMORY else ())


def plan(options: argparse.Namespace) -> tuple[Record, list[Entry]]:
    """Return fields of the document, and as many launches of each kind as asked; "regret" once."""
    return {"ranks": RANKS}, [
        Entry(
            *(f"{kind} {number + 1}", RANKS, kind, {"kind": kind}),
            launch=Launch(variables=variables(kind)),
        )
        for number in range(options.launches)
        for kind in (KINDS if number == 0 else KINDS[:-1])
    ]


def show(document: Record) -> Iterator[Part]:
    """Yield all tables of a document."""
    launches = document["launches"]
    first, env, mpi = launches[0], launches[0]["env"], launches[0]["transport"]["mpi"]
    yield (
        f"{mpi['vendor']} {mpi['version']}, torch {env['torch']}, {first['device']['name']}, "
        f"{env['cores']} cores, {document['commit']['sha']}"
    )
    timed = [launch for launch in launches if "heats" in launch]
    chosen = [row for row in ROWS if timed and row.only in ("", mpi["vendor"])]
    shown = [cells(row, nbytes, timed) for row in chosen for nbytes in row.nbytes]
    if shown:
        fewest = min(Counter(launch["kind"] for launch in timed).values())
        held = "over" if fewest >= FEWEST else "hold within the"
        title = f"{mpi['vendor']}, {document['ranks']} ranks, float32; intervals {held} {fewest}"
        yield make(f"{title} launches" + " of a row" * (fewest < FEWEST), COLUMNS, shown)
    yield from (regrets(launch) for launch in launches if "summary" in launch)


OPTIONS = {
    "--launches": about(
        type=at_least(1),
        default=2,
        metavar="N",
        help="how often processes start for a row (%(default)s)",
    )
}
collectives = Contest(
    *("collectives", __doc__, OPTIONS, plan, f"{__package__}.contestants:measure", show),
    file="collectives_{mpi}.json",
    timeout=150.0,
)
