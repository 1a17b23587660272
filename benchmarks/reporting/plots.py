"""Draw one run: time and efficiency against ranks, bandwidth, and where a step's time goes."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from benchmarks.reporting.derive import Row, T, grouped
from benchmarks.reporting.page import (
    COLOURS,
    GRID,
    PRETENDED,
    SIZE,
    Axes,
    Picture,
    case_rows,
    hollow,
    line,
    log_axis,
    picture,
    plain_ticks,
    short,
)
from benchmarks.reporting.tables import plain, size

LINES = 6  # in one plot; more cannot be told apart
BARS = 12  # in one plot
OTHER = "other"
DIRECTIONS = {"both": "forward and backward"}
MAX_PICTURES = 30  # of one kind
CARE = ", to be read with care"

Series = dict[str, list[Row]]
"""The rows of each line of a plot, by its name in the legend."""


@dataclass(frozen=True)
class Scaled:
    """A quantity that is drawn against P.

    Args:
        name: the quantity's name in the title.
        label: the label of its axis.
        value: computes the quantity of a row.
        ideal: computes its ideal value, from the first row of the series and a row.
        is_log: whether its axis is logarithmic.
    """

    name: str
    label: str
    value: Callable[[Row], float]
    ideal: Callable[[Row, Row], float]
    is_log: bool = False


TIMES = Scaled(
    "time",
    "time of one step (ms)",
    lambda row: row.seconds * 1e3,
    lambda first, row: first.seconds * 1e3 * first.ranks / row.ranks,
    is_log=True,
)
EFFICIENCIES = Scaled(
    "efficiency", "parallel efficiency (%)", lambda row: row.efficiency * 100, lambda *_: 100.0
)
SPEEDUPS = Scaled(
    "speed-up",
    "speed-up (number)",
    lambda row: row.speedup,
    lambda first, row: row.ranks / first.ranks,
)


def scaling(rows: Sequence[Row]) -> Iterator[Picture]:
    """Draw time and efficiency of the cases that ran on several numbers of ranks, a line for each.

    Collectives are left out: moving bytes to more ranks is more work, not the same work shared.
    """
    shared = [row for row in rows if row.case.layer != "collectives"]
    for (_, family, direction), group in grouped(
        shared, lambda row: (row.case.layer != "schemes", _family(row), row.case.direction or "")
    ):
        series = {
            case: found for case, found in grouped(group, lambda r: r.case.id) if len(found) > 1
        }
        heading = ", ".join(filter(None, (family, DIRECTIONS.get(direction, direction))))
        for name, part in parts(heading, list(series), LINES):
            common = len(_common(part))
            named = {case[common:] or case: series[case] for case in part}
            for what in (TIMES, EFFICIENCIES):
                yield picture(f"{name}: {what.name}", draw_scaling, named, what)


def draw_scaling(axes: Axes, series: Series, what: Scaled) -> None:
    """Draw a quantity and its ideal against P, and explain hollow markers in the legend."""
    every = [row for rows in series.values() for row in rows]
    for number, (name, rows) in enumerate(series.items()):
        colour = COLOURS[number] if what.is_log else GRID
        ideal = [what.ideal(rows[0], row) for row in rows]
        axes.plot([row.ranks for row in rows], ideal, color=colour, **PRETENDED)
        points = [(row.ranks, what.value(row)) for row in rows]
        line(axes, number, points, [bool(row.flags) for row in rows], name)
    if what.is_log:
        log_axis(axes.yaxis)
    else:
        axes.set_ylim(bottom=0)
    axes.plot([], color=GRID, label="ideal", **PRETENDED)
    axes.set_xscale("log", base=2)
    axes.set(xlabel="ranks P (number)", ylabel=what.label)
    plain_ticks(axes.xaxis, sorted({row.ranks for row in every}))
    hollow(axes, [flag for row in every for flag in row.flags])


def bandwidth(rows: Sequence[Row]) -> Iterator[Picture]:
    """Draw the bandwidths of every collective against its largest buffer, for each P."""
    timed = [row for row in rows if row.algbw is not None]
    for (doubtful, scheme, ranks), group in grouped(
        timed, lambda row: (bool(row.flags), row.case.scheme, row.ranks)
    ):
        title = f"{scheme}, P = {ranks}: bandwidth against message size{CARE * doubtful}"
        for name, part in parts(title, list(grouped(group, _way)), LINES):
            yield picture(name, draw_bandwidth, dict(part))


def draw_bandwidth(axes: Axes, series: Series) -> None:
    """Draw bus bandwidth as lines with markers, algorithm bandwidth dashed."""
    every = [row for rows in series.values() for row in rows]
    for number, (name, unordered) in enumerate(series.items()):
        rows = sorted(unordered, key=buffer_bytes)
        places = [buffer_bytes(row) for row in rows]
        algbw, busbw = ([(getattr(r, bw) or 0.0) / 1e9 for r in rows] for bw in ("algbw", "busbw"))
        axes.plot(places, algbw, color=COLOURS[number], linestyle="--", linewidth=1)
        points = list(zip(places, busbw, strict=True))
        line(axes, number, points, [bool(row.flags) for row in rows], f"{name}, busbw")
    axes.plot([], color=GRID, linestyle="--", label="algbw")
    hollow(axes, [flag for row in every for flag in row.flags])
    axes.set_xscale("log", base=2)
    axes.set(xlabel="largest buffer of a rank (bytes)", ylabel="bandwidth (GB/s)", ylim=(0, None))
    places = sorted({buffer_bytes(row) for row in every})
    shown = places[:: math.ceil(len(places) / 5)]
    plain_ticks(axes.xaxis, shown, [size(place).replace(".00 ", " ") for place in shown])


def buffer_bytes(row: Row) -> float:
    """Return the bytes of the largest buffer: algbw times the time."""
    return round((row.algbw or 0.0) * row.seconds)


def shares(rows: Sequence[Row]) -> Iterator[Picture]:
    """Draw how the time of a step divides into phases, for each layer and P."""
    timed = [
        row
        for row in rows
        if row.phases.get("total", 0) > 0
        and len(row.phases) > 1
        and row.case.layer != "collectives"
    ]
    for (doubtful, _, least, family), group in grouped(
        timed, lambda row: (bool(row.flags), row.case.layer != "schemes", -row.ranks, _family(row))
    ):
        title = f"{family}, P = {-least}: where a step's time goes{CARE * doubtful}"
        for name, part in parts(title, group, BARS):
            yield picture(name, draw_shares, part, size=(SIZE[0], 1.6 + 0.24 * len(part)))


def draw_shares(axes: Axes, rows: Sequence[Row]) -> None:
    """Draw a bar of 100 % for each case, cut by phase; the rest is "other"."""
    names = sorted(
        {name for row in rows for name in row.phases} - {"total", OTHER},
        key=lambda name: (name != "communication", name),
    )
    wholes = [  # medians of phases may add up to more than the step's
        max(row.phases["total"], sum(row.phases.get(name, 0.0) for name in names)) for row in rows
    ]
    reached = [0.0] * len(rows)
    for number, name in enumerate([*names[: LINES - 1], OTHER]):
        percents = [
            100 / whole * row.phases.get(name, 0.0) if name != OTHER else 100 - before
            for row, whole, before in zip(rows, wholes, reached, strict=True)
        ]
        colour, hatch = GRID if name == OTHER else COLOURS[number], "///" * (not number)
        looks: Any = {"color": colour, "hatch": hatch, "label": short(name)}
        axes.barh(range(len(rows)), percents, 0.7, reached, **looks)
        reached = [before + more for before, more in zip(reached, percents, strict=True)]
    common = len(_common([row.case.id for row in rows]))
    case_rows(axes, [short(row.case.id[common:] or row.case.id) for row in rows], "case (name)")
    axes.set(xlabel="share of a step (%)", xlim=(0, 100))


def _family(row: Row) -> str:
    """Return the name that rows of one plot share: the scheme of attention, or the suite."""
    layer = row.case.layer
    return f"{layer}/{row.case.scheme}" if layer == "schemes" else str(layer)


def _way(row: Row) -> str:
    """Return the algorithm, transport and dtype of a collective as text."""
    names = (row.case.algorithm, row.case.transport, row.case.dtype)
    return ", ".join(plain(name) for name in names if name)


def _common(names: Sequence[str]) -> str:
    """Return the folders that all names begin with."""
    folders = [name.split("/")[:-1] for name in names]
    shared = takewhile(lambda parts: len(set(parts)) == 1, zip(*folders, strict=False))
    return "".join(f"{parts[0]}/" for parts in shared)


def parts(title: str, things: Sequence[T], most: int) -> Iterator[tuple[str, Sequence[T]]]:
    """Cut a sequence into parts of at most `most` items, with a title for each part."""
    count = -(-len(things) // most)
    for number in range(count):
        name = f"{title} ({number + 1} of {count})" if count > 1 else title
        yield name, things[number * most : (number + 1) * most]
