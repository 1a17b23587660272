"""The rows of the table: what is compared with what, and what must be reached. A row is data; a new one is one line."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.reporting.tables import size
from benchmarks.statistics import Requirement, exact_interval

KIB, MIB = 1 << 10, 1 << 20
OURS = (
    "segmented_ring",
    "rabenseifner",
    "pairwise",
    "ring",
    "recursive_doubling",
    "bruck",
    "binomial",
    "exchange",
)
"""Contestants by messages, among which the quickest stands for us where a row names none."""
WINDOW = (*OURS, "window, staged", "window")
"""And those in shared memory, on an ordinary tensor and on one that lives there."""

Heats = dict[str, dict[str, Any]]
"""What one launch found, by heat: samples by contestant in seconds, round by round; scratch and errors likewise."""


@dataclass(frozen=True)
class Row:
    """One line.

    Args:
        what: what it says.
        op, nbytes: collective, and the sizes of the whole vector (of a piece, in a ring exchange)
            at each of which it must hold.
        ours, other: contestants; the quickest of `ours` counts.
        target: the other's time over ours, at least; None is told and not judged.
        kind: of the launches in which it is judged: "default"; "tuned", in which the C library
            keeps what it is given back; "huge", in which torch asks for huge pages.
        scratch: bytes that ours may use.
        only: the MPI that it is about; both where it is empty.
        microseconds: instead of a ratio, how much longer ours may take.
        error: how many roundings to bfloat16 the result may be off.
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
    error: float | None = None


LARGE, SHARED, SCATTERED = (
    (64 * MIB, 256 * MIB),
    (64 * KIB, MIB, 4 * MIB, 16 * MIB),
    (256 * KIB, 4 * MIB, 64 * MIB),
)
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
    Row(
        "the memory floor over reduce_scatter",
        "reduce_scatter",
        SCATTERED,
        ("window",),
        other="memory floor",
    ),
    Row("ring exchange by messages", "shift", (MIB, 4 * MIB), ("exchange",)),
    Row("ring exchange in a window", "shift", (MIB, 4 * MIB), ("window",), target=3.0),
    Row("the same, of an ordinary tensor", "shift", (MIB, 4 * MIB), ("window, staged",)),
    Row(
        "the memory floor over ring exchange",
        "shift",
        (MIB, 4 * MIB),
        ("window",),
        other="memory floor",
    ),
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
        error=1.0,
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
        Row(f"Plan.run, {op}", op, (64,), ("plan of the library",), microseconds=2.0)
        for op in ("all_reduce", "all_gather")
    ),
)


@dataclass(frozen=True)
class Line:
    """A row at one size, with the best of ours: `required` has a ratio, or microseconds where the row asks for these."""

    row: Row
    nbytes: int
    ours: str
    scratch: int
    required: Requirement

    def cells(self) -> tuple[str, ...]:
        """Return the texts of COLUMNS."""
        must, found, mark = self.required.cells()
        must += " us more" if self.row.microseconds is not None else ""
        scratch = "-" if self.required.found is None else size(self.scratch)
        return self.row.what, size(self.nbytes), self.ours, must, found, scratch, mark


COLUMNS = ("what", "vector", "ours", "must be", "median, interval", "scratch", "")


def heat_of(row: Row, nbytes: int) -> str:
    """The name of the heat of a row at one size.

    Rows do not share heats: contestants push each other's tensors out of the caches, and gloo's
    threads take processor time from whoever comes after them.
    """
    return f"{row.what}, {row.op} {nbytes}"


def heats(kind: str) -> dict[str, tuple[str, int, tuple[str, ...]]]:
    """Collective, bytes and contestants of each heat of a launch."""
    rows = [row for row in ROWS if row.kind == kind]
    return {
        heat_of(row, nbytes): (row.op, nbytes, (row.other, *row.ours))
        for row in rows
        for nbytes in row.nbytes
    }


def lines(launches: Sequence[dict[str, Any]], mpi: str) -> Iterator[Line]:
    """All rows that are about an MPI, from its launches."""
    for row in ROWS:
        if row.only in ("", mpi):
            found = [launch["heats"] for launch in launches if launch["kind"] == row.kind]
            yield from (_line(row, nbytes, found) for nbytes in row.nbytes)


def _line(row: Row, nbytes: int, launches: Sequence[Heats]) -> Line:
    """One size of a row, over the rounds of all launches: two that took turns are compared round by round."""
    if row.microseconds is not None:
        required = Requirement(row.what, "<=", row.microseconds, None)
    else:
        required = Requirement(row.what, ">=", row.target, None)
    heats = [heat for launch in launches if (heat := launch.get(heat_of(row, nbytes))) is not None]
    there = [name for name in row.ours if heats and all(name in heat["samples"] for heat in heats)]
    if not there or any(row.other not in heat["samples"] for heat in heats):
        return Line(row, nbytes, "", 0, required)
    best = min(
        there,
        key=lambda name: statistics.median(x for heat in heats for x in heat["samples"][name]),
    )
    pairs = [
        pair
        for heat in heats
        for pair in zip(heat["samples"][row.other], heat["samples"][best], strict=True)
    ]
    values = [
        (ours - other) * 1e6 if row.microseconds is not None else other / ours
        for other, ours in pairs
    ]
    scratch, error = (max(heat[kind][best] for heat in heats) for kind in ("scratch", "errors"))
    too_much = row.scratch is not None and scratch > row.scratch
    wrong = row.error is not None and error > row.error
    return Line(
        row,
        nbytes,
        best,
        scratch,
        replace(required, found=exact_interval(values), fails=too_much or wrong),
    )
