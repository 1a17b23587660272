"""Plots: every axis has its unit, no text covers another, points are the records' numbers."""

from __future__ import annotations

import re

import msgspec
import pytest
from kit import records as made
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text

from benchmarks.compare.result import ORDER, Row
from benchmarks.reporting import comparison, derive, history, plots
from benchmarks.reporting.style import Picture, short, styled, svg

pytestmark = pytest.mark.mpi_skip  # nothing here needs ranks

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
            *comparison.pictures(msgspec.convert(compared, list[Row])),
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
    every = pictures()
    assert {picture.kind for picture in every} == {
        "Scaling",
        "Bandwidth",
        "Communication",
        "History",
        "Comparison",
    }
    for picture in every:
        axes = picture.figure.axes[0]
        assert UNIT.search(axes.get_xlabel()), picture.title
        assert UNIT.search(axes.get_ylabel()), picture.title
        with styled():
            canvas = FigureCanvasAgg(picture.figure)
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
    rows = derive.rows(
        [made.record(made.case("schemes", "ring", "zigzag", p), 0.8 / p**0.5) for p in (1, 2, 4)]
    )
    time, efficiency = plots.scaling(rows)
    lines = [
        [tuple(map(float, point)) for point in line.get_xydata()]
        for line in time.figure.axes[0].get_lines()
    ]
    assert [(1.0, 800.0), (2.0, 400.0), (4.0, 200.0)] in lines
    assert [(float(row.ranks), row.seconds * 1e3) for row in rows] in lines
    drawn_lines = efficiency.figure.axes[0].get_lines()
    lines = [[tuple(map(float, point)) for point in line.get_xydata()] for line in drawn_lines]
    assert [(float(row.ranks), row.efficiency * 100) for row in rows] in lines
    (legend,) = efficiency.figure.legends
    looks = {str(line.get_label()): line.get_color() for line in drawn_lines}
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
