"""Test history and plots: changes are found, noise is not, and plots are right and legible."""

import re
from collections.abc import Iterator, Sequence
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kit import records as made

from benchmarks.compare import rule
from benchmarks.compare.rule import ORDER
from benchmarks.records import Record
from benchmarks.reporting import derive, history, plots
from benchmarks.reporting.history import SIDE, changes
from benchmarks.reporting.page import Picture, styled
from benchmarks.reporting.report import main

pytestmark = pytest.mark.mpi_skip  # nothing here needs ranks


def noise(count: int, seed: int, spread: float = 0.03) -> list[float]:
    """Return random times of code that does not change."""
    return list(map(float, np.exp(np.random.default_rng(seed).normal(0.0, spread, count))))


def runs(count: int, change: int = 99) -> list[Record]:
    """Return the records of one case in `count` runs, slower by 20 % from run `change` onwards."""
    what = made.case("schemes", "ring", "zigzag", 2)
    return [
        made.record(
            what,
            0.1 * seconds * (1.2 if number >= change else 1.0),
            run_id=f"run-{number:03}",
            commit={"sha": f"{number:040x}", "dirty": False},
        )
        for number, seconds in enumerate(noise(count, 0))
    ]


@pytest.mark.parametrize(
    "lengths", [(10, 3), (12, 12), (40, 5), (15, 15, 15)], ids=lambda lengths: str(lengths)
)
@pytest.mark.parametrize("ratio", [0.8, 1.25])
def test_changes_are_found_where_they_were_made(lengths: tuple[int, ...], ratio: float) -> None:
    """The times in each part of the series are `ratio` times those of the part before."""
    parts = [[ratio**n * v for v in noise(count, n)] for n, count in enumerate(lengths, 1)]
    found = changes(list(chain(*parts)))
    assert [one.at for one in found] == list(accumulate(lengths))[:-1]
    assert [one.ratio for one in found] == pytest.approx([ratio] * len(found), rel=0.05)
    assert max(one.p for one in found) <= 0.01


def test_one_series_in_a_hundred_is_marked_by_chance() -> None:
    """With uniform p, 9 or more marks in 300 series would have a probability of 1 in 500."""
    assert sum(bool(changes(noise(14, seed, 0.2))) for seed in range(300)) <= 8


@pytest.mark.parametrize(
    "values",
    [
        [],
        [1.0],
        [1.0] * 30,
        noise(2 * SIDE - 1, 0),
        [*noise(20, 0), 9.0],
        [*noise(10, 0), 9.0, *noise(10, 1)],
        noise(20, 0, 0.002) + [1.03 * value for value in noise(20, 1, 0.002)],  # too small
    ],
)
def test_outliers_and_short_series_are_no_changes(values: list[float]) -> None:
    assert changes(values) == []


@pytest.mark.parametrize("places", [(0,), (10,), (30,), (5, 30)])
def test_one_slow_run_or_two_hide_no_change(places: tuple[int, ...]) -> None:
    values = noise(20, 0, 0.02) + [1.1 * value for value in noise(20, 1, 0.02)]
    for place in places:
        values[place] *= 2
    assert [one.at for one in changes(values)] == [20]


def test_series_hold_the_median_of_each_run_in_the_order_of_recording() -> None:
    records = runs(3)
    again = [made.again(r, timing=made.timing(2, r.seconds * 3)) for r in records]
    records[1] = made.again(records[1], transport={"oversubscribed": True})
    (series,) = history.collect([*records, *again])
    wanted: list[Any] = [((r.commit.sha or "")[:10], pytest.approx(2 * r.seconds)) for r in records]
    assert [(point.commit, point.seconds) for point in series.points] == wanted
    assert [point.doubtful for point in series.points] == [False, True, False]


def test_what_cannot_be_compared_is_kept_apart() -> None:
    paired = {"index": 0, "stage": "screen", "side": "base", "slot": 0, "coin": 0, "seed": 1}
    changes: tuple[dict[str, Any], ...] = (
        {"case": {"shape": {"seq": 7}}},  # the same id with a different size
        {"env": {"fingerprint": "0" * 16}},
        {"harness_sha": "0" * 64},
        {"pair": paired},
        {},
    )
    records = [made.again(one, **change) for one, change in zip(runs(5), changes, strict=True)]
    assert history.collect(records) == []
    assert [len(series.points) for series in history.collect(runs(5))] == [5]


def test_a_change_of_the_harness_is_no_change_of_the_library() -> None:
    records = runs(16, change=12)
    records[12:] = [made.again(one, harness_sha="0" * 64) for one in records[12:]]
    found = history.collect(records)
    assert [(len(one.points), one.changes) for one in found] == [(4, ()), (12, ())]
    assert len({picture.title for picture in history.pictures(found)}) == 2


@pytest.mark.parametrize(
    ("count", "change", "code", "told"),
    [
        (16, 12, 0, f"{12:040x}"[:10]),
        (16, 99, 0, "no change found"),
        (1, 99, 1, "A history needs the records of several runs."),
    ],
)
def test_the_command_prints_the_change_or_that_there_is_none(
    count: int, change: int, code: int, told: str, tmp_path: Path, capsys: Any
) -> None:
    path = made.save(tmp_path / "history.jsonl", *runs(count, change))
    assert main([str(path), "--history", "--out", str(tmp_path)]) == code
    shown = capsys.readouterr()
    assert told in (shown.err if code else shown.out)
    page = (tmp_path / "history.html").read_text()
    assert told in page
    assert ("schemes/<wbr>ring/<wbr>zigzag" in page) == (change == 12)
    assert "level changed" not in page  # text in a plot is drawn as shapes


@pytest.mark.parametrize("lost", [(), (0,), (5, 13), (15, 16, 17), range(0, 18, 4)], ids=str)
def test_every_point_stands_over_its_commit_if_runs_lack_another(lost: Sequence[int]) -> None:
    """P = 2 was not measured in some runs, P = 4 not in the first two."""
    alone = [one for number, one in enumerate(runs(18, change=12)) if number not in lost]
    four = made.case("schemes", "ring", "zigzag", 4)
    others = [made.again(one, case=four, timing=made.timing(4, 0.1)) for one in runs(18)[2:]]
    (drawn,) = history.pictures(history.collect([*alone, *others]))
    axes: Any = drawn.figure.axes[0]
    lines = {line.get_label(): list(line.get_xdata()) for line in axes.get_lines()}
    commits = sorted({one.commit.sha or "" for one in (*alone, *others)})
    for records, label in ((alone, "P = 2"), (others, "P = 4")):
        assert lines[label] == [commits.index(one.commit.sha or "") for one in records]
    first = next(one.commit.sha or "" for one in alone if one.run_id >= "run-012")
    assert lines["level changed"] == [commits.index(first) - 0.5] * 2
    for place, tick in zip(axes.get_xticks(), axes.get_xticklabels(), strict=True):
        assert tick.get_text() == commits[int(place)][:7]


UNIT = re.compile(r"\((ms|%|GB/s|bytes|number|name|in order of recording)\)$")


def pictures() -> list[Picture]:
    """Draw plots of every kind, from the records of several runs, some with odd names."""
    kept = ("zigzag/causal/forward", "mpi/host/1024")
    runs = (one for number in range(3) for one in made.run(number, few=True))
    several = [one for one in runs if one.case.id.endswith(kept)]
    others = ("ulysses", "all_to_all", "shift")  # their plots look like the rest
    rows = [row for row in derive.rows(made.run(2)) if row.case.scheme not in others]
    compared = [made.verdict(v, case=f"schemes/ring/zigzag/causal/backward-{v}") for v in ORDER]
    no_formula = made.verdict("regressed", case="schemes/$\\frac{1}$")  # drawing it would fail
    with styled():
        return [
            *plots.scaling(rows),
            *plots.bandwidth(rows),
            *plots.shares(rows),
            *history.pictures(history.collect(several)),
            *rule.pictures([*compared, no_formula]),
        ]


def texts(figure: Any) -> Iterator[Any]:
    """Yield the labels of the axes, of their visible ticks, and of the legends."""
    for axis in (figure.axes[0].xaxis, figure.axes[0].yaxis):
        low, high = sorted(axis.get_view_interval())
        places = zip(axis.get_majorticklocs(), axis.get_ticklabels(), strict=True)
        yield from (t for x, t in places if low * (1 - 1e-9) <= x <= high * (1 + 1e-9))
        yield axis.label
    yield from (entry for legend in figure.legends for entry in legend.get_texts())


def test_every_plot_has_units_and_no_text_covers_another_or_is_cut() -> None:
    from matplotlib.backends import backend_agg  # slow to import

    for picture in pictures():
        axes = picture.figure.axes[0]
        assert UNIT.search(axes.get_xlabel()), picture.title
        assert UNIT.search(axes.get_ylabel()), picture.title
        with styled():
            canvas: Any = backend_agg.FigureCanvasAgg(picture.figure)
            canvas.draw()
        words = [word for word in texts(picture.figure) if word.get_text()]
        boxes = [word.get_window_extent(canvas.get_renderer()) for word in words]
        assert len(words) > 4
        whole = picture.figure.bbox.padded(1)
        for place, box in enumerate(boxes):
            shown = (picture.title, words[place].get_text())
            assert whole.contains(box.x0, box.y0), shown
            assert whole.contains(box.x1, box.y1), shown
            others = boxes[:place]
            assert not any(box.shrunk(0.9, 0.8).overlaps(other) for other in others), shown


def test_scaling_plots_hold_the_measured_points_and_the_ideal() -> None:
    cases = [made.case("schemes", "ring", "zigzag", p) for p in (1, 2, 4)]
    rows = derive.rows([made.record(case, 0.8 / case["ranks"] ** 0.5) for case in cases])
    efficiencies = [(row.ranks, row.efficiency * 100) for row in rows]
    ideal = [(1, 800.0), (2, 400.0), (4, 200.0)]
    measured = [(row.ranks, row.seconds * 1e3) for row in rows]
    for picture, expected in zip(
        plots.scaling(rows), ([ideal, measured], [efficiencies]), strict=True
    ):
        lines = picture.figure.axes[0].get_lines()
        points = [[*map(tuple, np.asarray(line.get_xydata()))] for line in lines]
        assert [one in points for one in expected] == [True] * len(expected)
        looks = {str(line.get_label()): line.get_color() for line in lines}
        legend: Any = picture.figure.legends[0]
        for handle, name in zip(legend.legend_handles, legend.get_texts(), strict=True):
            assert handle.get_color() == looks[name.get_text()]
