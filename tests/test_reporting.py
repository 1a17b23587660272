"""Test reports: numbers come from records, foreign text stays text, broken files are named."""

import io
import statistics
import sys
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st
from kit import records as made
from markdown_it import MarkdownIt
from rich.console import Console
from studies.commands import output_of, outside

from benchmarks.compare.pairs import importance
from benchmarks.compare.rule import ORDER, section
from benchmarks.records import append, read, reason
from benchmarks.reporting import derive, plots, tables
from benchmarks.reporting.page import (
    INK,
    PLOTS,
    Page,
    Section,
    code,
    html,
    markdown,
    picture,
    short,
    styled,
    write,
)
from benchmarks.reporting.report import main, newest
from benchmarks.reporting.tables import Table

pytestmark = pytest.mark.mpi_skip  # nothing here needs ranks

HOSTILE = (
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "{{ 7 * 7 }}{% raw %}",
    "a | b \\| c",
    "``x` `y``",
    "# title\n\n- list\r\n| cell |",
    "[click](https://example.com) ![x](y) @someone #1 https://example.com",
    "$\\frac{1}{0}$ \u202edesrever \u200bhidden \x1b[31m red \x00",
    "&lt;b&gt; &#124; <!-- ",
    "very long " * 200,
    "`",
)
RING = made.case("schemes", "ring", "zigzag", 2)


class Seen(HTMLParser):
    """Collect the elements, attributes and text of an HTML page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: Counter[str] = Counter()
        self.attributes: list[tuple[str, str | None]] = []
        self.words = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        self.words += data


def rendered(text: str) -> Seen:
    return Seen(MarkdownIt("commonmark").enable("table").render(text))


def report(folder: Path, *arguments: Path | str) -> tuple[Seen, Seen]:
    """Write a report; return what its Markdown and its HTML show."""
    assert main([*map(str, arguments), "--out", str(folder)]) == 0
    shown, page = ((folder / f"report.{kind}").read_text() for kind in ("md", "html"))
    return rendered(shown), Seen(page)


def lines(table: Table) -> list[dict[str, str]]:
    return [dict(zip(table.columns, line, strict=True)) for line in table.rows]


def test_rows_are_recomputed_from_the_records() -> None:
    times = {1: [0.8, 0.9, 0.7], 2: [0.5, 0.4], 4: [0.32]}
    records = [
        made.record(made.case("schemes", "ring", "zigzag", ranks), seconds)
        for ranks, found in times.items()
        for seconds in found
    ]
    rows = derive.rows(reversed(records))
    assert [row.ranks for row in rows] == [1, 2, 4]
    for row in rows:
        ranks, median = row.ranks, statistics.median(times[row.ranks])
        speedup = 0.8 / median
        assert (row.seconds, row.speedup, row.efficiency) == (median, speedup, speedup / ranks)
        assert [row.tokens_per_s, row.share] == [2048 / median, pytest.approx(0.1 * (ranks - 1))]
        assert (row.sent, row.algbw) == ((ranks - 1) << 20, None)
        assert row.flags == ("oversubscribed",) * (ranks > 2)


@pytest.mark.parametrize(
    ("scheme", "factor"),
    [("all_reduce", 1.5), ("all_gather", 0.75), ("all_to_all", 0.75), ("shift", 1.0)],
)
def test_bandwidths_follow_their_definition(scheme: str, factor: float) -> None:
    four, one = (made.case("collectives", scheme, "mpi", ranks) for ranks in (4, 1))
    (row,) = derive.rows([made.record(four, 0.002, bytes_result=6_000_000)])
    assert [row.algbw, row.busbw] == pytest.approx([3e9, factor * 3e9])
    (alone,) = derive.rows([made.record(one, 0.002)])
    assert (alone.algbw, alone.busbw) == (None, None)


@pytest.mark.parametrize(
    ("layer", "scheme", "seconds", "cells"),
    [
        (
            *("schemes", "ring", {1: 0.8, 2: 0.5}),
            ("500", "1.60", "80%", "-", "-", "10%", "5.72 MiB", "4,096", "2.00"),
        ),
        (
            *("collectives", "all_reduce", {2: 0.001, 4: 0.002}),
            ("2.00", "-", "-", "3.00", "4.50", "30%", "17.2 MiB", "1,024,000", "500"),
        ),
    ],
)
def test_the_table_shows_the_numbers_of_the_rows(
    layer: str, scheme: str, seconds: dict[int, float], cells: tuple[str, ...]
) -> None:
    what = {ranks: made.case(layer, scheme, "zigzag", ranks) for ranks in seconds}
    rows = derive.rows(
        made.record(what[ranks], took, bytes_result=6_000_000) for ranks, took in seconds.items()
    )
    flags = "oversubscribed" if layer == "collectives" else ""
    whole = (f"{layer}/{scheme}/zigzag", *cells, "3.00 MiB", "1.00", flags)
    assert tables.cells(rows[-1]) == whole
    table = tables.per_ranks(rows)[-1]
    assert table.title == f"{layer}, P = {rows[-1].ranks}"
    assert lines(table) == [
        {name: text for name, text in zip(tables.COLUMNS, whole, strict=True) if text.strip("-")}
    ]


@pytest.mark.parametrize(
    ("change", "flags"),
    [
        ({}, ()),
        ({"status": "skew_limited", "timing": {"skew_limited": True}}, ("skew-limited",)),
        ({"transport": {"shared_gpu": True}}, ("shared GPU",)),
    ],
)
def test_what_makes_a_row_doubtful_is_said(change: dict[str, Any], flags: tuple[str]) -> None:
    assert derive.rows([made.again(made.record(RING, 0.1), **change)])[0].flags == flags


def test_the_newest_commit_and_the_head_are_shown_in_full() -> None:
    pair = {"index": 0, "stage": "screen", "slot": 0, "coin": 0, "seed": 1}
    records = [made.record(RING, 0.1, pair={**pair, "side": side}) for side in ("head", "base")]
    older = made.again(made.record(RING, 0.2), run_id="2025", commit={"sha": "b" * 40})
    found = [(s.commit[:2], s.side) for s in derive.by_setting([*records, older])]
    assert found == [("bb", ""), ("aa", "base"), ("aa", "head")]


@pytest.mark.parametrize(("digit", "kept"), [("0", (0, 1)), ("f", (0, 1, 2, 3)), ("f", (2,))])
def test_all_that_the_newest_run_was_to_measure_is_shown(digit: str, kept: tuple[int, ...]) -> None:
    """Transports differ in the fingerprint; what failed has none. Run 2027 has no times at all."""
    old, *what = (made.case("schemes", "ring", name, 2) for name in "oablr")
    other = made.again(made.record(what[1], 0.1), env={"fingerprint": digit * 16})
    lost = made.failed(what[2], "missing", "it died")
    later = made.again(lost, run_id="2027", case=what[3])
    every = [made.record(what[0], 0.1), other, lost, later]
    past: Any = {"run_id": "2025", "commit": {"sha": "b" * 40, "dirty": False}}
    ago = [made.again(one, **past) for one in (made.record(old, 0.2), made.failed(old, "oom", "-"))]
    shown = list(newest(derive.by_setting([*ago, *(every[place] for place in kept)])))
    rows = [row[0] for one in shown for table in one.tables for row in table.rows]
    assert {row for row in rows if "/" in row} == {every[place].case.id for place in kept}
    assert shown[0].text == f"Below: commit {'a' * 10}."


def everywhere(foreign: str, text: str = "") -> Page:
    """Return a page with a foreign text in every place that can hold one."""
    table = tables.make("t", ("case", "P"), [(foreign, "1"), ("next", "2")])
    return Page("title", (foreign,), (Section("s", text, (table,)),))


@given(st.text() | st.sampled_from(HOSTILE))
def test_foreign_text_stays_text(hostile: str) -> None:
    """In Markdown the text stays inside one code span. In HTML it adds no element."""
    shown = rendered(markdown(everywhere(hostile), None))
    lists, table = {"p", "ul", "li"}, {"table", "thead", "tbody", "tr", "th", "td"}
    assert set(shown.tags) <= {"h1", "h2", "h3", "code", *lists, *table}
    assert (shown.tags["tr"], shown.tags["code"]) == (3, 2 + 2 * bool(code(hostile)))
    hostile = tables.plain(hostile)
    page, harmless = (Seen(html(everywhere(x, f"s {x}"))) for x in (hostile, "harmless"))
    del page.tags["wbr"]
    assert page.tags == harmless.tags
    assert not [name for name, _ in page.attributes if name.startswith("on")]
    assert page.words.count(hostile) >= 3


def test_hostile_words_in_valid_records_and_files_reach_no_browser(tmp_path: Path) -> None:
    """All texts that a record may choose freely are hostile. Ids may hold only some characters."""
    evil = "\u4e2d<script>alert(1)</script>|`@x`$\\frac{1}{0}$"
    what = [made.case("schemes", "ring", variant, n) for variant in ("a.b", "-_=+") for n in (1, 2)]
    records: list[Any] = [made.record(case, 0.1, bytes_result=1 << 20) for case in what]
    for record in records:
        record.device.name = record.env.platform = record.transport.mpi.vendor = evil
    records.append(made.failed(what[0], "failed", reason("\n".join(HOSTILE))))
    read_again = read(made.save(tmp_path / "r.jsonl", *records)).records
    result = made.result(made.verdict("regressed", case=evil * 3, remarks=(evil,)))
    compared = section(replace(result, base=replace(result.base, ref=evil)))
    with styled():
        every = Page("title", (evil,), (compared, *newest(derive.by_setting(read_again))))
        write(every, tmp_path, "report")
    shown = rendered((tmp_path / "report.md").read_text())
    page = Seen((tmp_path / "report.html").read_text())
    assert page.tags["script"] == 1  # our own, which the page's policy allows by its digest
    assert not {"img", "iframe", "object", "link", "form"} & set(page.tags)
    assert "alert(1)" in page.words
    links = [to or "" for name, to in page.attributes if name in ("href", "src", "xlink:href")]
    assert all(to.startswith("#") for to in links)
    assert not {"script", "a"} & set(shown.tags)


def test_a_report_is_the_same_each_time(tmp_path: Path) -> None:
    few = ("zigzag/causal/forward", "mpi/host/1024")  # all kinds of plots
    every = [record for number in (0, 1) for record in made.run(number, few=True)]
    path = made.save(tmp_path / "r.jsonl", *(one for one in every if one.case.id.endswith(few)))
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    report(ours, path)
    command = [sys.executable, "-m", "benchmarks", "report", str(path), "--out", str(theirs)]
    output_of(command, tmp_path, outside(PYTHONHASHSEED="7"), 120)
    for name in ("report.md", "report.html", "report.png"):
        assert (ours / name).read_bytes() == (theirs / name).read_bytes(), name


def test_what_cannot_be_used_is_named_and_the_rest_is_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = tmp_path / "good.jsonl"
    append(good, made.record(made.case("schemes", "ring", "zigzag", 1), 0.1))
    with good.open("ab") as file:
        file.write(b'{"schema": 1, "run_id": ')  # the writer was killed
    foreign = {
        "binary.jsonl": b"\x89PNG\r\n\x00",
        "empty.jsonl": b"",
        "other.jsonl": b'{"name": "a package"}',
        "<b>.jsonl": b"[]",
        "latin.jsonl": b'{"traceEvents": [{"ph": "\xff"}]}',
    }
    for name, content in foreign.items():
        (tmp_path / name).write_bytes(content)
    names = [tmp_path / name for name in (*foreign, "missing.jsonl", "good.jsonl")]
    shown, page = report(tmp_path, *names, tmp_path, "--trace", tmp_path / "latin.jsonl")
    told = capsys.readouterr().err
    for name in (*foreign, "missing.jsonl", "good.jsonl, line 2"):
        assert name in told
        assert name in page.words
    assert "100" in shown.words  # milliseconds of the good record


def test_other_sizes_and_other_harnesses_are_not_mixed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Older records of another size or mesh are left out and named, in whatever order they are.

    One number of ranks is enough: speed-up compares the numbers of ranks.
    """
    small = {"shape": {"batch": 1, "seq": 64}}
    old = [
        made.record(made.case("schemes", "ring", "zigzag", p, **what), 1e-4, run_id=f"2025-{n}")
        for n, (p, what) in enumerate([(2, {"mesh": {"ring": 2}}), (1, small), (2, small)])
    ]
    new = [made.record(made.case("schemes", "ring", "zigzag", p), 0.2 / p) for p in (2, 4)]
    kept, told = derive.comparable([*new, *old])
    assert kept == new
    assert told == [
        "schemes/ring/zigzag: 3 records of another problem than in the newest run are left out."
    ]
    other = [made.again(record, harness_sha="0" * 64) for record in new]
    groups = derive.by_setting([*new, *other])
    assert [len(group) for group in groups.values()] == [2, 2]
    assert len({line["harness"] for line in lines(tables.settings(groups))}) == 2
    path = made.save(tmp_path / "mixed.jsonl", *new, *old)
    assert main([str(path), "--out", str(tmp_path)]) == 0
    assert told[0] in capsys.readouterr().err


def test_nothing_to_report_is_an_error_and_no_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path / "missing"), "--out", str(tmp_path)]) == 1
    assert "missing" in (tmp_path / "report.md").read_text()
    assert not (tmp_path / "report.png").exists()
    path = made.save(tmp_path / "r.jsonl", made.record(RING, 0.1))
    assert main([str(path), "--out", str(path / "folder")]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_failures_are_listed_with_their_reason() -> None:
    good = made.record(RING, 0.1)
    (table,) = tables.failures([made.failed(RING, "oom", "no memory\nleft"), good])
    assert table.rows == ((RING["id"], "2", "oom", "no memory left"),)
    assert tables.failures([good]) == []


def test_verdicts_are_sorted_by_importance_and_shown_as_they_are() -> None:
    rows = [made.verdict(name) for name in sorted(ORDER)]
    rows += [made.verdict("regressed", 1.4, case="worst"), made.verdict("missing", None)]
    shown = lines(section(made.result(*sorted(rows, key=importance))).tables[0])
    assert list(dict.fromkeys(line["verdict"] for line in shown)) == ORDER
    worst = (shown[0]["case"], shown[0]["change"], shown[0]["interval"])
    assert worst == ("worst", "+40%", "+36% to +43%")
    assert {line["change"] for line in shown if line["verdict"] == "missing"} == {"+10%", "-"}


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (tables.significant(0.0123456), "0.0123"),
        (tables.significant(1234567.0), "1,234,567"),
        (tables.significant(99.96), "100"),
        (tables.size(1536), "1.50 KiB"),
        (tables.size(0), "0 B"),
        (tables.size(None), "-"),
        (tables.percent(0.0123), "1.2%"),
        (tables.percent(0.5), "50%"),
        (tables.ratio(0.8), "-20%"),
        (tables.plain("a\u200bb\u202e\nc  d\x00"), "ab c d"),
        (len(tables.plain("x" * 1000)), tables.LONGEST),
        (short(f"collectives/{'x' * 100}/1024"), f"collectives/xx…{'x' * 24}/1024"),
        (short("\u4e2d$x$"), "?$x$"),  # a letter that the font lacks
    ],
)
def test_numbers_and_words_are_written_for_people(shown: str, expected: str) -> None:
    assert shown == expected


@pytest.mark.parametrize(
    "shares",
    [
        {"total": 0.1, "attention": 0.09, "communication": 0.05},
        {"total": 1.0, **dict.fromkeys("abcdefgh", 0.1)},  # more phases than colours
    ],
)
def test_no_two_pictures_have_one_title_and_no_bar_passes_the_whole(
    shares: dict[str, float],
) -> None:
    """The sum of a row's phases may exceed its step, because phases overlap or are medians.

    Rows that must be read with care, as on a shared GPU, have a picture of their own.
    """
    phases = {name: {"max_s": share, "mean_s": share} for name, share in shares.items()}
    what = [made.case("schemes", "ring", f"{place}/zigzag/forward", 2) for place in range(31)]
    every = [made.record(case, 0.1, phases=phases) for case in what]
    every[0] = made.again(every[0], transport={"shared_gpu": True})
    pictures = list(plots.shares(derive.rows(every)))
    titles = [*(f" ({number} of 3)" for number in (1, 2, 3)), "with care"]
    assert [one.title[-9:] for one in pictures] == titles
    ends = list[float]()
    for one in pictures:
        axes: Any = one.figure.axes[0]
        assert axes.get_xlim() == (0, 100)
        rights = [(bar.get_y(), bar.get_x() + bar.get_width()) for bar in axes.patches]
        ends += dict(sorted(rights)).values()  # the right end of each row
    assert ends == pytest.approx([100.0] * 31)


def test_a_page_shows_little_until_somebody_asks() -> None:
    """Long tables and further plots are folded, since a phone shows little more than one plot.

    Plots take the text colour of the page, which names the colour once.
    """
    folded = tables.per_ranks([row for row in derive.rows(made.run()) if row.algbw is not None])
    drawn = [picture(f"plot {n}", lambda axes: axes.set_xlabel("x")) for n in range(PLOTS + 1)]
    shown = html(Page("", (), (Section("s", "", tuple(folded), tuple(drawn)),)))
    assert "currentColor" in shown
    assert (shown.count(INK), shown.count("<!--")) == (1, 0)
    page = Seen(shown)
    assert page.tags["details"] - page.attributes.count(("open", None)) == len(folded) + 1 == 3
    assert "Not everything" not in page.words


def test_a_terminal_of_80_columns_shows_every_column(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    monkeypatch.setattr(tables, "console", lambda: Console(file=out, width=80))
    every = tables.per_ranks(derive.rows(made.run()))
    table = next(table for table in every if table.title == "schemes, P = 2")
    for one in (table, replace(table, rows=()), tables.make("no row", ("case",), ())):
        tables.show(one)
    shown = out.getvalue()
    assert max(map(len, shown.splitlines())) <= 80
    assert all(word in shown for row in (table.columns, *table.rows) for word in row)
