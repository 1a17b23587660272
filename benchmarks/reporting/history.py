"""Times over commits: a line for each case and P, with the places where its level changed.

The series of logarithms is split where the means before and after differ most, in units of the
spread on both sides (the statistic of the two-sample t test, with three values or more on each
side). The two lowest and the two highest values first get the value of the third, so that one slow
run, or two, hide no change. How large that maximum is by chance is found by shuffling the series,
so that nothing is assumed about its distribution. A split that chance matches in at most one of a
hundred shuffles, and that moves the median by 5 % or more, is a change; then each side is searched
in the same way (binary segmentation). A run counts once, however many launches it has: what was
measured in one hour on one machine is not independent.

A change is found if about ten runs precede it and three follow. With fewer runs, shuffled series
have as large a maximum too often. If runs are independent, about one of a hundred series without a
change is marked; if the machine's speed drifts over several runs, more are. A mark is an alert to
look at, never a gate.
"""

import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from benchmarks.records import Record
from benchmarks.reporting.derive import comparable, flags, grouped, setting_of
from benchmarks.reporting.page import (
    INK,
    Axes,
    Picture,
    hollow,
    line,
    log_axis,
    picture,
    plain_ticks,
)
from benchmarks.reporting.plots import LINES, parts
from benchmarks.reporting.tables import Table, make, milliseconds, plain, ratio

LABELS = 8  # commits that are named on an axis


@dataclass(frozen=True)
class Point:
    """One run of one case.

    Args:
        run: the run's id, which orders the runs.
        commit: short name of the commit.
        seconds: median over the launches of the run.
        doubtful: whether a launch had a flag that makes its time doubtful.
    """

    run: str
    commit: str
    seconds: float
    doubtful: bool


@dataclass(frozen=True)
class Change:
    """A change of level.

    Args:
        at: index of the first value of the new level.
        before, after: medians of the two levels.
        p: share of shuffled series with as large a difference.
    """

    at: int
    before: float
    after: float
    p: float

    @property
    def ratio(self) -> float:
        """The median after the change over the median before it."""
        return self.after / self.before


@dataclass(frozen=True)
class Series:
    """One case on P ranks of one machine, measured by one harness, in the order of the runs.

    Args:
        case: the case's id.
        ranks: P, the number of ranks.
        fingerprint: the name of machine and software.
        harness: the hash of the files that decide how something is measured.
        points: one for each run.
        changes: the changes of level; `at` is an index into the points.
    """

    case: str
    ranks: int
    fingerprint: str
    harness: str
    points: tuple[Point, ...]
    changes: tuple[Change, ...]


def collect(records: Iterable[Record]) -> list[Series]:
    """Return all series with more than one run.

    Launches of a comparison (with a pair) are left out. So are the records that `comparable` does.
    """
    timed = (record for record in records if record.pair is None and record.seconds)
    found: dict[tuple[str, int, str, str], dict[tuple[str, str], list[Record]]] = {}
    for record in comparable(timed)[0]:
        setting = setting_of(record)
        place = (*record.key, setting.fingerprint, setting.harness)
        found.setdefault(place, {}).setdefault((record.run_id, setting.commit), []).append(record)
    return [_series(place, runs) for place, runs in sorted(found.items()) if len(runs) > 1]


def _series(place: tuple[str, int, str, str], runs: dict[tuple[str, str], list[Record]]) -> Series:
    points = tuple(
        Point(*run, statistics.median(one.seconds for one in group), any(map(flags, group)))
        for run, group in runs.items()
    )
    return Series(*place, points, tuple(changes([point.seconds for point in points])))


def alerts(series: Sequence[Series]) -> list[Table]:
    """Return a table of all changes, the largest first; an empty list if there are no series."""
    found = [(one, change) for one in series for change in one.changes]
    found.sort(key=lambda pair: -abs(math.log(pair[1].ratio)))
    note = (
        f"{len(series)} series were searched. If runs are independent, about one in a hundred is "
        "marked by chance. An alert, not a verdict."
    )
    columns = ("case", "P", "commit", "before (ms)", "after (ms)", "change", "p")
    lines = [
        (
            plain(one.case),
            str(one.ranks),
            plain(one.points[change.at].commit),
            milliseconds(change.before),
            milliseconds(change.after),
            ratio(change.ratio),
            f"{change.p:.4f}",
        )
        for one, change in found
    ]
    nothing = ("no change found", *[""] * 6)
    return [make("Changes of level", columns, lines or [nothing], note)] if series else []


def pictures(series: Sequence[Series]) -> Iterator[Picture]:
    """Draw a plot for each case, machine and harness; those with changes first."""
    same = grouped(series, lambda one: (one.case, one.fingerprint, one.harness))
    groups = [group for _, group in same]
    for group in sorted(groups, key=lambda group: not any(one.changes for one in group)):
        one = group[0]
        where = f"machine {one.fingerprint[:6]}, harness {one.harness[:6]}"
        title = f"{one.case}: time over commits, {where}"
        for name, part in parts(title, group, LINES):
            yield picture(name, draw, part)


def draw(axes: Axes, group: Sequence[Series]) -> None:
    """Draw time against commits, a line for each P; mark where a level changed."""
    runs = sorted({(point.run, point.commit) for one in group for point in one.points})
    places = {run: float(place) for place, run in enumerate(runs)}
    for number, one in enumerate(group):
        points = [(places[point.run, point.commit], point.seconds * 1e3) for point in one.points]
        line(axes, number, points, [point.doubtful for point in one.points], f"P = {one.ranks}")
    log_axis(axes.yaxis)
    for one in group:
        for change in one.changes:
            first = one.points[change.at]
            at = places[first.run, first.commit] - 0.5
            axes.axvline(at, color=INK, linestyle="--", linewidth=1, label="level changed")
    hollow(axes, ["doubtful"] * any(point.doubtful for one in group for point in one.points))
    axes.set(xlabel="commit (in order of recording)", ylabel="time of one step (ms)")
    step = math.ceil(len(runs) / LABELS)  # name as many commits as fit, and the last one
    named = range(len(runs) - 1, -1, -step)[::-1]
    plain_ticks(axes.xaxis, list(named), [plain(runs[place][1])[:7] for place in named])
    axes.tick_params("x", rotation=90)


ALPHA = 0.01
LEAST = 1.05  # least ratio of the medians of a change
SIDE = 3  # values on each side of a change; fewer may be outliers
SHUFFLES = 1999
MOST = 1000  # only so many of the newest values of a series are searched

Values = NDArray[np.float64]


def changes(values: Sequence[float]) -> list[Change]:
    """Find where the level of a series moved.

    Args:
        values: positive numbers in the order in which they were measured.

    Returns:
        Changes in the order of the series; each is judged against the values between its
        neighbours.
    """
    start = max(0, len(values) - MOST)
    recent = values[start:]
    splits = sorted(_splits(np.log(recent), 0, np.random.default_rng(0)))
    edges = [0, *(at for at, _ in splits), len(recent)]
    levels = pairwise(statistics.median(recent[a:b]) for a, b in pairwise(edges) if a < b)
    return [
        Change(start + at, before, after, p)
        for (at, p), (before, after) in zip(splits, levels, strict=True)
    ]


def _splits(logs: Values, first: int, chance: np.random.Generator) -> Iterator[tuple[int, float]]:
    """Yield (index, p) of every change in a part of a series whose first index is `first`."""
    if len(logs) < 2 * SIDE:
        return
    ordered = np.sort(logs)
    near = logs.clip(ordered[SIDE - 1], ordered[-SIDE])
    scores = _scores(near[None])
    at = int(scores.argmax()) + SIDE
    if abs(np.median(logs[at:]) - np.median(logs[:at])) < math.log(LEAST):
        return
    shuffled = chance.permuted(np.tile(near, (SHUFFLES, 1)), axis=1)
    as_large = _scores(shuffled).max(1) >= scores.max() * (1 - 1e-9)
    p = float((1 + as_large.sum()) / (1 + SHUFFLES))
    if p <= ALPHA:
        yield first + at, p
        yield from _splits(logs[:at], first, chance)
        yield from _splits(logs[at:], first + at, chance)


def _scores(series: Values) -> Values:
    """Return for each series (a row) and split the share of the spread that the split explains.

    The share grows with the squared t statistic.
    """
    n = series.shape[1]
    centred = series - series.mean(1, keepdims=True)
    before = np.arange(1, n)[SIDE - 1 : n - SIDE]
    sums = np.cumsum(centred, 1)[:, SIDE - 1 : n - SIDE]
    spread = np.maximum((centred**2).sum(1, keepdims=True), 1e-300)
    scores: Values = sums**2 * n / (before * (n - before)) / spread
    return scores
