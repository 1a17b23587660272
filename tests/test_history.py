"""History and plots: changes are found, noise is not; plots show what was measured, legibly."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kit import records as made
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text

from benchmarks.compare import rule
from benchmarks.compare.rule import ORDER
from benchmarks.reporting import derive, history, plots
from benchmarks.reporting.history import SIDE, changes
from benchmarks.reporting.page import Picture, short, styled, svg
from benchmarks.reporting.report import main

pytestmark = pytest.mark.mpi_skip  # nothing here needs ranks


def noise(count: int, seed: int, spread: float = 0.03) -> list[float]:
    """Times of code that does not change."""
    return list(map(float, np.exp(np.random.default_rng(seed).normal(0.0, spread, count))))


def runs(count: int, change: int | None = None) -> list[Any]:
    """One case over runs, slower by 20 % from one run on."""
    found, what = [], made.case("schemes", "ring", "zigzag", 2)
    for number, seconds in enumerate(noise(count, 0)):
        slower = 1.2 if change is not None and number >= change else 1.0
        commit = {"sha": f"{number:040x}", "dirty": False}
        about: dict[str, Any] = {"run_id": f"run-{number:03}", "commit": commit}
        found.append(made.record(what, 0.1 * seconds * slower, **about))
    return found


def test_two_changes_are_both_found() -> None:
    values = [*noise(15, 1), *(1.3 * v for v in noise(15, 2)), *(0.9 * v for v in noise(15, 3))]
    assert [found.at for found in changes(values)] == [15, 30]


@pytest.mark.parametrize(("before", "after"), [(10, 3), (12, 12), (40, 5)])
@pytest.mark.parametrize("ratio", [0.8, 1.25])
def test_a_change_is_found_where_it_was_made(before: int, after: int, ratio: float) -> None:
    values = noise(before, 1) + [ratio * value for value in noise(after, 2)]
    (found,) = changes(values)
    assert found.at == before
    assert found.ratio == pytest.approx(ratio, rel=0.05)
    assert found.p <= 0.01


def test_one_series_in_a_hundred_is_marked_by_chance() -> None:
    """The p of a shuffled series is uniform: of 300 series 9 or more would be 1 in 500."""
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


def test_series_hold_the_median_of_each_run_in_the_order_of_recording() -> None:
    records = runs(3)
    again = [made.again(r, timing=made.timing(2, r.seconds * 3)) for r in records]
    (series,) = history.collect([*records, *again])
    assert [point.seconds for point in series.points] == pytest.approx(
        [2 * r.seconds for r in records]
    )
    assert [point.commit for point in series.points] == [(r.commit.sha or "")[:10] for r in records]


def test_what_cannot_be_compared_is_kept_apart() -> None:
    records = runs(4)
    paired = {"index": 0, "stage": "screen", "side": "base", "slot": 0, "coin": 0, "seed": 1}
    changes: tuple[dict[str, Any], ...] = (
        {"case": {"shape": {"seq": 7}}},  # another size under the old name
        {"env": {"fingerprint": "0" * 16}},
        {"pair": paired},
    )
    for place, change in enumerate(changes):
        records[place] = made.again(records[place], **change)
    assert history.collect(records) == []
    assert [len(series.points) for series in history.collect(runs(4))] == [4]


def test_the_command_prints_the_change_and_marks_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = made.save(tmp_path / "history.jsonl", *runs(16, change=12))
    assert main([str(path), "--history", "--out", str(tmp_path)]) == 0
    assert f"{12:040x}"[:10] in capsys.readouterr().out
    page = (tmp_path / "history.html").read_text()
    assert "level changed" not in page  # letters of a plot are shapes
    assert "schemes/<wbr>ring/<wbr>zigzag" in page
    (series,) = history.collect(runs(16, change=12))
    (picture,) = history.pictures([series])
    marks = [list(np.asarray(one.get_xdata())) for one in picture.figure.axes[0].get_lines()]
    assert marks.count([11.5, 11.5]) == 1


@pytest.mark.parametrize(
    ("count", "code", "told"),
    [(16, 0, "no change found"), (1, 1, "A history needs the records of several runs.")],
)
def test_a_history_without_change_says_so(
    count: int, code: int, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = made.save(tmp_path / "history.jsonl", *runs(count))
    assert main([str(path), "--history", "--out", str(tmp_path)]) == code
    shown = capsys.readouterr()
    assert told in (shown.err if code else shown.out)
    assert told in (tmp_path / "history.html").read_text()


UNIT = re.compile(r"\((ms|%|GB/s|bytes|number|name|in order of recording)\)$")


def pictures() -> list[Picture]:
    """One of every kind, over all records of several runs, some with odd names."""
    several = [record for number in range(3) for record in made.run(number, few=number < 2)]
    rows = derive.rows(made.run(2))
    compared = [made.verdict(v, case=f"schemes/ring/zigzag/causal/backward-{v}") for v in ORDER]
    compared.append(
        made.verdict("regressed", case="schemes/$\\frac{1}$")
    )  # no formula, or drawing it would fail
    with styled():
        return [
            *plots.scaling(rows),
            *plots.bandwidth(rows),
            *plots.shares(rows),
            *history.pictures(history.collect(several)),
            *rule.pictures(compared),
        ]


def drawn(axis: Axis) -> list[Text]:
    """Labels of the ticks within the axes."""
    low, high = sorted(axis.get_view_interval())
    places = zip(axis.get_majorticklocs(), axis.get_ticklabels(), strict=True)
    return [label for place, label in places if low * (1 - 1e-9) <= place <= high * (1 + 1e-9)]


def texts(figure: Figure) -> list[Text]:
    axes = figure.axes[0]
    legends = [entry for legend in figure.legends for entry in legend.get_texts()]
    axis_labels = [axes.xaxis.label, axes.yaxis.label]
    return [
        t for t in [*drawn(axes.xaxis), *drawn(axes.yaxis), *axis_labels, *legends] if t.get_text()
    ]


def test_every_plot_has_units_and_no_text_covers_another_or_is_cut() -> None:
    for picture in pictures():
        axes = picture.figure.axes[0]
        assert UNIT.search(axes.get_xlabel()), picture.title
        assert UNIT.search(axes.get_ylabel()), picture.title
        with styled():
            canvas: Any = FigureCanvasAgg(picture.figure)
            canvas.draw()
        words = texts(picture.figure)
        boxes = [word.get_window_extent(canvas.get_renderer()) for word in words]
        assert len(words) > 4
        for place, box in enumerate(boxes):
            shown = (picture.title, words[place].get_text())
            assert box.x0 >= -1, shown
            assert box.y0 >= -1, shown
            assert box.x1 <= picture.figure.bbox.x1 + 1, shown
            assert box.y1 <= picture.figure.bbox.y1 + 1, shown
            hit = [
                words[other].get_text()
                for other in range(place)
                if box.shrunk(0.9, 0.8).overlaps(boxes[other])
            ]
            assert hit == [], shown


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


def test_a_name_keeps_its_beginning_and_its_end() -> None:
    name = "collectives/" + "x" * 100 + "/1024"
    assert short(name).startswith("collectives/")
    assert short(name).endswith("x/1024")
    assert short("\u4e2d$x$") == "?$x$"  # a letter that the font lacks


def test_the_ink_of_a_plot_is_that_of_the_page() -> None:
    with styled():
        drawn_once = svg(next(plots.scaling(derive.rows(made.run(few=True)))).figure)
    assert "currentColor" in drawn_once
    assert "#1b1f24" not in drawn_once
    assert "<!--" not in drawn_once
