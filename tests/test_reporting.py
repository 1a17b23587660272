"""Reports: their numbers are those of the records, whatever the records say stays text, and broken files cost only themselves."""

from __future__ import annotations

import io
import json
import os
import re
import statistics
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from kit import records as made
from markdown_it import MarkdownIt
from rich.console import Console

from benchmarks.compare.result import ORDER
from benchmarks.files import ForeignError
from benchmarks.records import Record, append, parse, reason
from benchmarks.reporting import comparison, derive, plots, tables, terminal
from benchmarks.reporting import tables as text
from benchmarks.reporting.__main__ import main, numbered
from benchmarks.reporting.page import Page, Section, code, html, markdown
from benchmarks.reporting.style import styled

pytestmark = pytest.mark.mpi_skip  # nothing here needs ranks

ROOT = Path(__file__).resolve().parent.parent
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


class Seen(HTMLParser):
    """The elements and the text of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: dict[str, list[dict[str, str | None]]] = {}
        self.words: list[str] = []
        self.rows: list[int] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.setdefault(tag, []).append(dict(attrs))
        if tag == "tr":
            self.rows.append(0)
        if tag in ("td", "th"):
            self.rows[-1] += 1

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def save(path: Path, records: list[Any]) -> Path:
    path.write_bytes(b"".join(msgspec.json.encode(record) + b"\n" for record in records))
    return path


def report(folder: Path, *arguments: Path | str) -> dict[str, str]:
    """Markdown and HTML of a report."""
    assert main([*map(str, arguments), "--out", str(folder / "out")]) == 0
    return {kind: (folder / "out" / f"report.{kind}").read_text() for kind in ("md", "html")}


def test_the_records_here_are_valid() -> None:
    every = [*made.run(), made.failed(made.case("schemes", "ring", "x", 2), "oom", "no memory")]
    assert len([parse(msgspec.json.encode(record)) for record in every]) == 130


def test_rows_are_recomputed_from_the_records() -> None:
    what = [made.case("schemes", "ring", "zigzag", ranks) for ranks in (1, 2, 4)]
    times = {1: [0.8, 0.9, 0.7], 2: [0.5, 0.4], 4: [0.32]}
    records = [made.record(case, seconds) for case in what for seconds in times[case["ranks"]]]
    rows = {row.ranks: row for row in derive.rows(reversed(records))}
    for ranks, found in times.items():
        row, median = rows[ranks], statistics.median(found)
        assert (row.seconds, row.speedup, row.efficiency) == (
            median,
            0.8 / median,
            0.8 / median / ranks,
        )
        assert row.tokens_per_s == 2048 / median
        assert row.share == pytest.approx(0.1 * (ranks - 1))
        assert (row.sent, row.algbw, row.flags) == (
            (ranks - 1) << 20,
            None,
            ("oversubscribed",) * (ranks > 2),
        )


@pytest.mark.parametrize(
    ("scheme", "factor"),
    [("all_reduce", 1.5), ("all_gather", 0.75), ("all_to_all", 0.75), ("shift", 1.0)],
)
def test_bandwidths_follow_their_definition(scheme: str, factor: float) -> None:
    (row,) = derive.rows(
        [made.record(made.case("collectives", scheme, "mpi", 4), 0.002, bytes_result=6_000_000)]
    )
    assert (row.algbw, row.busbw) == (pytest.approx(3e9), pytest.approx(factor * 3e9))
    (alone,) = derive.rows([made.record(made.case("collectives", scheme, "mpi", 1), 0.002)])
    assert (alone.algbw, alone.busbw) == (None, None)


def test_the_table_shows_the_numbers_of_the_rows() -> None:
    rows = derive.rows(made.run())
    shown = {
        (t.title, line[0]): dict(zip(t.columns, line, strict=True))
        for t in tables.per_ranks(rows)
        for line in t.rows
    }
    assert len(shown) == len(rows)
    for row in rows:
        line = shown[f"{row.case.layer}, P = {row.ranks}", row.id]
        assert float(line["time (ms)"]) == pytest.approx(row.seconds * 1e3, rel=0.005)
        assert float(line["tokens/s"].replace(",", "")) == pytest.approx(
            2048 / row.seconds, rel=0.005
        )
        if row.case.layer == "schemes":
            assert float(line["speed-up"]) == pytest.approx(row.speedup, abs=0.005)
        elif row.algbw is not None and row.busbw is not None:
            assert float(line["algbw (GB/s)"]) == pytest.approx(row.algbw / 1e9, rel=0.005)
            assert float(line["busbw (GB/s)"]) == pytest.approx(row.busbw / 1e9, rel=0.005)


def test_what_makes_a_row_doubtful_is_said() -> None:
    what = made.case("schemes", "ring", "zigzag", 2)
    good = made.record(what, 0.1)
    skewed = made.again(good, status="skew_limited", timing={"skew_limited": True})
    miscounted = made.again(good, work={"bytes_formula": 1})
    shared = made.again(good, transport={"shared_gpu": True})
    assert [derive.rows([record])[0].flags for record in (good, skewed, miscounted, shared)] == [
        (),
        ("skew-limited",),
        ("bytes differ from formula",),
        ("shared GPU",),
    ]


def test_the_newest_commit_and_the_head_are_shown_in_full() -> None:
    pair = {"index": 0, "stage": "screen", "slot": 0, "coin": 0, "seed": 1}
    what = made.case("schemes", "ring", "zigzag", 1)
    records = [made.record(what, 0.1, pair={**pair, "side": side}) for side in ("head", "base")]
    older = made.record(
        what,
        0.2,
        run_id="20250101T000000Z-a",
        commit={**made.dicts(records[0])["commit"], "sha": "b" * 40},
    )
    assert [(s.commit[:2], s.side) for s in derive.by_setting([*records, older])] == [
        ("bb", ""),
        ("aa", "base"),
        ("aa", "head"),
    ]


@given(st.text() | st.sampled_from(HOSTILE))
def test_foreign_text_is_one_piece_of_code_in_markdown(hostile: str) -> None:
    table = tables.make("t", ("case", "P"), [(hostile, "1"), ("next", "2")])
    page = markdown(Page("title", (hostile,), (Section("s", "", (table,)),)), None)
    shown = Seen(MarkdownIt("commonmark").enable("table").render(page))
    allowed = {
        "h1",
        "h2",
        "h3",
        "p",
        "ul",
        "li",
        "table",
        "thead",
        "tbody",
        "tr",
        "th",
        "td",
        "code",
    }
    assert set(shown.tags) <= allowed
    assert shown.rows == [2, 2, 2]
    assert len(shown.tags["code"]) == 2 + 2 * bool(code(hostile))


def elements(text_: str) -> Seen:
    """A page on which a foreign text is everywhere where one can be."""
    table = tables.make("t", ("case", "P"), [(text_, "1"), ("next", "2")])
    return Seen(html(Page("title", (text_,), (Section("s", text_, (table,)),))))


@given(st.text() | st.sampled_from(HOSTILE))
def test_foreign_text_stays_text_in_html(hostile: str) -> None:
    hostile = text.plain(hostile)
    assume(hostile)
    shown, harmless = elements(hostile), elements("harmless")
    assert {tag: len(found) for tag, found in shown.tags.items() if tag != "wbr"} == {
        t: len(f) for t, f in harmless.tags.items()
    }
    assert not [
        name
        for tags in shown.tags.values()
        for attributes in tags
        for name in attributes
        if name.startswith("on")
    ]
    assert "".join(shown.words).count(hostile) >= 3


def test_hostile_words_in_valid_records_and_files_reach_no_browser(tmp_path: Path) -> None:
    """Everything that a record may say freely says something evil; ids may not."""
    evil = "\u4e2d<script>alert(1)</script>|`@x`$\\frac{1}{0}$"
    what = [
        made.case("schemes", "ring", variant, ranks)
        for variant in ("a.b", "-_=+")
        for ranks in (1, 2)
    ]
    records = [made.record(case, 0.1, bytes_result=1 << 20) for case in what]
    for record in records:
        record.device.name = record.env.platform = record.transport.mpi.vendor = evil
    records.append(made.failed(what[0], "failed", reason("\n".join(HOSTILE))))
    compared = tmp_path / "result.json"
    compared.write_text(
        json.dumps(
            made.result(
                made.verdict(
                    "regressed", reason=evil, flags=[evil], case=evil * 3, explanation=evil
                )
            )
        )
    )
    shown = report(tmp_path, save(tmp_path / "r.jsonl", records), "--compare", compared)
    page = Seen(shown["html"])
    assert not {"script", "img", "iframe", "object", "link", "form"} & set(page.tags)
    assert "alert(1)" in "".join(page.words)
    addresses = [
        v
        for tags in page.tags.values()
        for found in tags
        for n, v in found.items()
        if n in ("href", "src", "xlink:href")
    ]
    assert [address for address in addresses if not (address or "").startswith("#")] == []
    assert not set(Seen(MarkdownIt("commonmark").enable("table").render(shown["md"])).tags) & {
        "script",
        "a",
    }


def keeps(record: Record) -> bool:
    """Few cases that need all kinds of plots."""
    return record.case.id.endswith(("zigzag/causal/forward", "mpi/host/1024", "mpi/host/16384"))


def test_a_report_is_the_same_each_time(tmp_path: Path) -> None:
    path = save(
        tmp_path / "r.jsonl",
        [record for number in (0, 1) for record in made.run(number, few=True) if keeps(record)],
    )
    command = [
        sys.executable,
        "-m",
        "benchmarks.reporting",
        str(path),
        "--out",
        str(tmp_path / "other"),
    ]
    paths = os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))
    environment = {"PYTHONPATH": paths, "PYTHONHASHSEED": "7", "PATH": "/usr/bin:/bin"}
    report(tmp_path, path)
    subprocess.run(
        command, cwd=tmp_path, env=environment, check=True, capture_output=True, timeout=120
    )
    for name in ("report.md", "report.html", "report.png"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "other" / name).read_bytes(), (
            name
        )


def test_what_cannot_be_used_is_named_and_the_rest_is_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = tmp_path / "good.jsonl"
    append(good, made.record(made.case("schemes", "ring", "zigzag", 1), 0.1))
    with good.open("ab") as file:
        file.write(b'{"schema": 1, "run_id": ')  # the writer was killed
    foreign_files = {
        "binary.jsonl": b"\x89PNG\r\n\x00",
        "empty.jsonl": b"",
        "other.jsonl": b'{"name": "a package"}',
        "<b>.jsonl": b"[]",
    }
    for name, content in foreign_files.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "result.json").write_text('{"rows": NaN}')
    names = [tmp_path / name for name in (*foreign_files, "missing.jsonl", "good.jsonl")]
    shown = report(
        tmp_path,
        *names,
        tmp_path,
        "--compare",
        tmp_path / "result.json",
        "--trace",
        tmp_path / "other.jsonl",
    )
    told = capsys.readouterr().err
    for name in (*foreign_files, "missing.jsonl", "result.json", "good.jsonl, line 2"):
        assert name in told, name
        assert name in "".join(Seen(shown["html"]).words), name
    assert "100" in shown["md"]  # ms, of the record that is whole


def test_nothing_to_report_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert main([str(tmp_path / "missing"), "--out", str(tmp_path)]) == 1
    assert "missing" in (tmp_path / "report.md").read_text()
    assert not (tmp_path / "report.png").exists()
    capsys.readouterr()


def test_failures_are_listed_with_their_reason() -> None:
    what = made.case("schemes", "ring", "zigzag", 2)
    table = tables.failures([made.failed(what, "oom", "no memory\nleft"), made.record(what, 0.1)])
    assert table is not None
    assert table.rows == ((what["id"], "2", "oom", "no memory left"),)
    assert tables.failures([made.record(what, 0.1)]) is None


def test_verdicts_are_sorted_by_importance_and_shown_as_they_are(tmp_path: Path) -> None:
    rows = [made.verdict(name) for name in sorted(ORDER)] + [
        made.verdict("regressed", 1.4, case="schemes/worst"),
        made.verdict("missing", None),
    ]
    (tmp_path / "result.json").write_text(json.dumps(made.result(*rows)))
    section = comparison.read(tmp_path / "result.json")
    lines = [
        dict(zip(section.tables[0].columns, line, strict=True)) for line in section.tables[0].rows
    ]
    places = [ORDER.index(line["verdict"]) for line in lines]
    assert places == sorted(places)
    assert (lines[0]["case"], lines[0]["change"], lines[0]["interval"]) == (
        "schemes/worst",
        "+40%",
        "+36% to +43%",
    )
    assert {line["change"] for line in lines if line["verdict"] == "missing"} == {"+10%", "-"}


@pytest.mark.parametrize(
    "change",
    [
        {"format": 2},
        {"rows": [made.verdict("regressed", ratio=-1.0)]},
        {"rows": [made.verdict("splendid")]},
        {"rows": [made.verdict("regressed", ranks="2")]},
        {"rows": "none"},
        {"exit_code": 7},
    ],
)
def test_a_result_of_another_form_is_refused(change: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    path.write_text(json.dumps({**made.result(made.verdict("regressed")), **change}))
    with pytest.raises(ForeignError, match=re.escape(str(path))):
        comparison.read(path)


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (text.significant(0.0123456), "0.0123"),
        (text.significant(1234567.0), "1,234,567"),
        (text.significant(99.96), "100"),
        (text.size(1536), "1.50 KiB"),
        (text.size(0), "0 B"),
        (text.size(None), "-"),
        (text.percent(0.0123), "1.2%"),
        (text.percent(0.5), "50%"),
        (tables.ratio(0.8), "-20%"),
        (text.plain("a\u200bb\u202e\nc  d\x00"), "ab c d"),
        (len(text.plain("x" * 1000)), text.LONGEST),
    ],
)
def test_numbers_and_words_are_written_for_people(shown: str, expected: str) -> None:
    assert shown == expected


def test_no_two_pictures_have_one_title_and_no_bar_passes_the_whole() -> None:
    """Phases overlap or are medians of their own: their sum may be more than the step."""
    what = [
        made.case("schemes", "ring", f"{place}/zigzag/causal/forward", 2) for place in range(30)
    ]
    phases = {"total": {"max_s": 0.1, "mean_s": 0.1}, "attention": {"max_s": 0.09, "mean_s": 0.09}}
    phases["communication"] = {"max_s": 0.05, "mean_s": 0.05}
    with styled():
        pictures = numbered(
            plots.shares(derive.rows([made.record(case, 0.1, phases=phases) for case in what]))
        )
    titles = [picture.title for picture in pictures]
    assert (len(titles), len(set(titles))) == (3, 3)
    assert titles[0].endswith("(1 of 3)")
    for picture in pictures:
        axes = picture.figure.axes[0]
        assert axes.get_xlim() == (0, 100)
        assert max(bar.get_x() + bar.get_width() for bar in axes.patches) == pytest.approx(100)


def test_a_page_shows_little_until_somebody_asks(tmp_path: Path) -> None:
    """A phone shows one plot beside nothing else, and a table of hundreds of rows is many screens."""
    page = Seen(report(tmp_path, save(tmp_path / "r.jsonl", made.run()))["html"])
    assert len(page.tags["details"]) > 3
    assert len([tag for tag in page.tags["details"] if "open" not in tag]) >= 3


def test_a_terminal_of_80_columns_shows_every_column() -> None:
    out = io.StringIO()
    table = next(
        table
        for table in tables.per_ranks(derive.rows(made.run()))
        if table.title == "schemes, P = 2"
    )
    terminal.show(Console(file=out, width=80), table)
    shown = out.getvalue()
    assert max(map(len, shown.splitlines())) <= 80
    assert all(name in shown for name in table.columns)
    assert all(cell in shown for row in table.rows for cell in row)


def test_a_folder_that_cannot_be_written_is_an_error_and_no_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    path = save(tmp_path / "r.jsonl", [made.record(made.case("schemes", "ring", "zigzag", 1), 0.1)])
    assert main([str(path), "--out", str(tmp_path / "file" / "folder")]) == 2
    assert "cannot be written" in capsys.readouterr().err
