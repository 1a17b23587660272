"""Plots of one run: time and efficiency against ranks, bandwidth against message size, and where a step's time goes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby, takewhile
from typing import Any, TypeVar

from benchmarks.reporting.derive import CAVEATS, Row, doubtful
from benchmarks.reporting.style import (
    COLOURS,
    GRID,
    Axes,
    Figure,
    Picture,
    blank,
    hollow,
    legend,
    line,
    log_axis,
    plain_ticks,
    ranks_axis,
    short,
)
from benchmarks.reporting.tables import plain, size

LINES = 6  # in one plot; more cannot be told apart
BARS = 12
OTHER = "other"
DIRECTIONS = {"both": "forward and backward"}
MAX_PICTURES = 30  # of one kind
T = TypeVar("T")

Series = dict[str, list[Row]]
"""Rows by what the legend calls them."""


def scaling(rows: Sequence[Row]) -> Iterator[Picture]:
    """Time and efficiency of what ran on several numbers of ranks, its variants as lines.

    Collectives are left out: moving bytes to more ranks is more work, not the same work shared.
    """
    shared = [row for row in rows if row.case.layer != "collectives"]
    for (_, family, direction), group in _grouped(
        shared, lambda row: (_order(row), _family(row), row.case.direction or "")
    ):
        by_case = {case: list(found) for case, found in _grouped(group, lambda row: row.id)}
        series = {case: found for case, found in by_case.items() if len(found) > 1}
        heading = ", ".join(filter(None, (family, DIRECTIONS.get(direction, direction))))
        for part in _parts(list(series), LINES):
            named = {_variant(case, part): series[case] for case in part}
            yield Picture("Scaling", plain(f"{heading}: time"), _scaling_figure(named, times))
            yield Picture(
                "Scaling", plain(f"{heading}: efficiency"), _scaling_figure(named, efficiencies)
            )


def times(axes: Axes, series: Series) -> None:
    """Time of a step against P, with what it would be if every rank added as much as the first."""
    every: list[float] = []
    for number, (name, rows) in enumerate(series.items()):
        ideal = [rows[0].seconds * 1e3 * rows[0].ranks / row.ranks for row in rows]
        axes.plot(
            [row.ranks for row in rows], ideal, color=COLOURS[number], linestyle=":", linewidth=1
        )
        line(
            axes,
            number,
            [(row.ranks, row.seconds * 1e3) for row in rows],
            [doubtful(row) for row in rows],
            name,
        )
        every += [*ideal, *(row.seconds * 1e3 for row in rows)]
    axes.plot([], [], color=GRID, linestyle=":", label="ideal")
    axes.set_ylabel("time of one step (ms)")
    log_axis(axes.yaxis, every)


def efficiencies(axes: Axes, series: Series) -> None:
    """Speed-up over growth in ranks against P."""
    axes.axhline(100, color=GRID, linestyle=":", label="ideal")
    for number, (name, rows) in enumerate(series.items()):
        line(
            axes,
            number,
            [(row.ranks, row.efficiency * 100) for row in rows],
            [doubtful(row) for row in rows],
            name,
        )
    axes.set_ylabel("parallel efficiency (%)")
    axes.set_ylim(
        0, max(110.0, *(row.efficiency * 105 for rows in series.values() for row in rows))
    )


def speedups(axes: Axes, series: Series) -> None:
    """Draw the speed-up against P, with the ideal."""
    for number, (name, rows) in enumerate(series.items()):
        line(
            axes,
            number,
            [(row.ranks, row.speedup) for row in rows],
            [doubtful(row) for row in rows],
            name,
        )
    ideal = sorted(
        {(row.ranks, row.ranks / rows[0].ranks) for rows in series.values() for row in rows}
    )
    axes.plot(*zip(*ideal, strict=True), color=GRID, linestyle=":", label="ideal")
    axes.set_ylabel("speed-up (number)")
    axes.set_ylim(bottom=0)


def _scaling_figure(series: Series, draw: Callable[[Axes, Series], None]) -> Figure:
    figure, axes = blank()
    draw_scaling(axes, series, draw)
    legend(axes)
    return figure


def draw_scaling(axes: Axes, series: Series, draw: Callable[[Axes, Series], None]) -> None:
    """`times` or `efficiencies`, with the axis of ranks and a word on hollow markers."""
    every = [row for rows in series.values() for row in rows]
    draw(axes, series)
    ranks_axis(axes, [row.ranks for row in every])
    hollow(axes, _caveats(every))


def bandwidth(rows: Sequence[Row]) -> Iterator[Picture]:
    """Bus and algorithm bandwidth of every collective against the size of its largest buffer, for each P."""
    timed = [row for row in rows if row.algbw is not None]
    for (_, scheme, ranks), group in _grouped(
        timed, lambda row: (doubtful(row), row.case.scheme, row.ranks)
    ):
        series = {name: sorted(found, key=buffer_bytes) for name, found in _grouped(group, _way)}
        for part in _parts(list(series), LINES):
            figure, axes = blank()
            draw_bandwidth(axes, {name: series[name] for name in part})
            legend(axes)
            yield Picture(
                "Bandwidth", plain(f"{scheme}, P = {ranks}: bandwidth against message size"), figure
            )


def draw_bandwidth(axes: Axes, series: Series) -> None:
    """Bus bandwidth as lines with markers, algorithm bandwidth dashed."""
    every = [row for rows in series.values() for row in rows]
    for number, (name, rows) in enumerate(series.items()):
        dashed = [(row.algbw or 0.0) / 1e9 for row in rows]
        axes.plot(
            [buffer_bytes(row) for row in rows],
            dashed,
            color=COLOURS[number],
            linestyle="--",
            linewidth=1,
        )
        if all(row.busbw is not None for row in rows):
            points = [(buffer_bytes(row), (row.busbw or 0.0) / 1e9) for row in rows]
            line(axes, number, points, [doubtful(row) for row in rows], f"{name}, busbw")
    axes.plot([], [], color=GRID, linestyle="--", label="algbw")
    hollow(axes, _caveats(every))
    axes.set_xscale("log", base=2)
    axes.set_xlabel("largest buffer of a rank (bytes)")
    axes.set_ylabel("bandwidth (GB/s)")
    axes.set_ylim(bottom=0)
    places = sorted({buffer_bytes(row) for row in every})
    shown = places[:: math.ceil(len(places) / 5)]
    plain_ticks(axes.xaxis, shown, [size(place).replace(".00 ", " ") for place in shown])


def buffer_bytes(row: Row) -> float:
    """Size of the message: what is divided by the time in algbw."""
    return round((row.algbw or 0.0) * row.seconds)


def shares(rows: Sequence[Row]) -> Iterator[Picture]:
    """How the time of a step divides into phases, for each layer and P."""
    timed = [
        row
        for row in rows
        if row.phases.get("total", 0) > 0
        and len(row.phases) > 1
        and row.case.layer != "collectives"
    ]
    for (_, _, least, family), group in _grouped(
        timed, lambda row: (doubtful(row), _order(row), -row.ranks, _family(row))
    ):
        ranks = -least
        for part in _parts(list(group), BARS):
            figure, axes = blank(height=1.6 + 0.24 * len(part))
            draw_shares(axes, part)
            legend(axes)
            yield Picture(
                "Communication", plain(f"{family}, P = {ranks}: where a step's time goes"), figure
            )


def draw_shares(axes: Axes, rows: Sequence[Row]) -> None:
    """A bar of 100 % for each case, cut by phase; the rest is "other"."""
    names = sorted(
        {name for row in rows for name in row.phases} - {"total", OTHER},
        key=lambda name: (name != "communication", name),
    )
    reached = [0.0] * len(rows)
    for number, name in enumerate([*names[: LINES - 1], OTHER]):
        parts = [_part(row, name) for row in rows]
        colour = GRID if name == OTHER else COLOURS[number]
        axes.barh(
            range(len(rows)),
            parts,
            left=reached,
            color=colour,
            height=0.7,
            label=short(name),
            hatch="///" * (not number),
        )
        reached = [before + part for before, part in zip(reached, parts, strict=True)]
    common = _common([row.id for row in rows])
    plain_ticks(
        axes.yaxis, range(len(rows)), [short(row.id[len(common) :] or row.id) for row in rows]
    )
    axes.invert_yaxis()
    axes.set_ylabel("case (name)")
    axes.set_xlabel("share of a step (%)")
    axes.set_xlim(0, 100)


def _family(row: Row) -> str:
    """What shares a plot: the variants of a scheme, all layers."""
    layer = row.case.layer
    return f"{layer}/{row.case.scheme}" if layer == "schemes" else str(layer)


def _order(row: Row) -> int:
    """Schemes are what this is about; they come first."""
    return int(row.case.layer != "schemes")


def _part(row: Row, phase: str) -> float:
    """Percent of the step; phases that overlap leave nothing for the rest."""
    known = sum(seconds for name, seconds in row.phases.items() if name not in ("total", OTHER))
    whole = max(
        row.phases["total"], known
    )  # medians of phases may add up to more than the median of the step
    seconds = whole - known if phase == OTHER else row.phases.get(phase, 0.0)
    return 100 * seconds / whole


def _way(row: Row) -> str:
    """How the bytes of a collective travelled."""
    names = (row.case.algorithm, row.case.transport, row.case.dtype)
    return ", ".join(plain(name) for name in names if name)


def _caveats(rows: Iterable[Row]) -> list[str]:
    found = {flag for row in rows for flag in row.flags}
    return [flag for flag in CAVEATS if flag in found]


def _variant(case: str, among: Sequence[str]) -> str:
    return case[len(_common(among)) :] or case


def _common(names: Sequence[str]) -> str:
    """The folders that all names begin with."""
    folders = [name.split("/")[:-1] for name in names]
    shared = takewhile(lambda parts: len(set(parts)) == 1, zip(*folders, strict=False))
    return "".join(f"{parts[0]}/" for parts in shared)


def _grouped(rows: Iterable[Row], name: Callable[[Row], Any]) -> Iterator[tuple[Any, list[Row]]]:
    for key, group in groupby(sorted(rows, key=name), key=name):
        yield key, list(group)


def _parts(things: Sequence[T], most: int) -> Iterator[Sequence[T]]:
    for start in range(0, len(things), most):
        yield things[start : start + most]
