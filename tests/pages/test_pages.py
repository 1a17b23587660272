"""Test report and history pages in Chromium at three widths: reading, sorting, filtering, folding.

Pages must not use the network. Every check is also given a page with a fault that it must find.
"""

import shutil
from base64 import b64encode
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from kit import records as made
from playwright.sync_api import Page, sync_playwright

from benchmarks.compare import rule
from benchmarks.reporting import derive, page as pages
from benchmarks.reporting.page import styled, write
from benchmarks.reporting.report import main, newest
from benchmarks.reporting.tables import COLUMNS, cells

SIZES = {"phone": (390, 844), "tablet": (820, 1180), "desktop": (1400, 900)}
QUIET = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update"),
)
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
NAMES = ("report", "history", "empty")
EVERY = {"rules": {"target-size": {"enabled": True}}}
RECORDS = made.run(3, few=True)
TITLE = "collectives, P = 2"
WIDE = f"details:has(> summary:text('{TITLE}')) table"
SHOWN = "table => [...table.tBodies[0].rows].filter(row => row.checkVisibility()).length"
CELLS = "(table, at) => [...table.tBodies[0].rows].map(row => row.cells[at].textContent)"


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write report.html, history.html, and empty.html, which is the history of a single run."""
    folder = tmp_path_factory.mktemp("pages")
    verdicts = [
        made.verdict(name, case="schemes/" + "long/" * 20) for name in ("regressed", "improved")
    ]
    made.save(folder / "one.jsonl", *RECORDS)
    slower = [
        record for run in range(16) for record in made.run(run, few=True, speed=1 + run // 12)
    ]
    made.save(folder / "many.jsonl", *slower)
    assert main([str(folder / "one.jsonl"), "--history", "--out", str(folder)]) == 1
    (folder / "history.html").rename(folder / "empty.html")
    assert main([str(folder / "many.jsonl"), "--history", "--out", str(folder)]) == 0
    with styled():
        sections = (rule.section(made.result(*verdicts)), *newest(derive.by_setting(RECORDS)))
        write(pages.Page("Comparison of two commits", (), sections), folder, "report")
    return folder


@pytest.fixture(scope="module", params=SIZES)
def browser(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Iterator[Any]:
    """Return a browser whose window has one of the sizes."""
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    assert found, f"install one of {', '.join(BROWSERS)}: apt-get install chromium"
    width, height = SIZES[request.param]
    with sync_playwright() as playwright:
        context = playwright.chromium.launch_persistent_context(
            tmp_path_factory.mktemp("user-data"),
            executable_path=found,
            args=QUIET,
            viewport={"width": width, "height": height},
            is_mobile=request.param == "phone",
        )
        context.set_default_timeout(30_000)
        yield context
        context.close()


@pytest.fixture
def page(browser: Any) -> Iterator[Page]:
    """Return a browser tab; check at the end that it loaded only files and logged nothing."""
    tab, noticed = browser.new_page(), list[str]()
    tab.on("request", lambda request: noticed.append(request.url))
    tab.on("console", lambda message: noticed.append(message.text))
    tab.on("pageerror", lambda error: noticed.append(str(error)))
    yield tab
    tab.close()
    assert [text for text in noticed if not text.startswith("file:")] == []


def show(page: Page, path: Path, fault: tuple[str, str] | None = None) -> None:
    """Show a page, or a copy of it with a fault and the script digest that lets the copy run."""
    if fault:
        text, before = path.read_text().replace(*fault), path.read_text()
        assert text != before
        path = path.with_name("faulty.html")
        path.write_text(text.replace(digest(before), digest(text)))
    page.goto(path.as_uri())


def digest(text: str) -> str:
    script = text.rpartition("<script>")[2].partition("</script>")[0]
    return b64encode(sha256(script.encode()).digest()).decode()


def unfold(page: Page) -> None:
    page.eval_on_selector_all("details", "all => all.forEach(one => { one.open = true; })")


def phone(page: Page) -> bool:
    return bool(page.viewport_size and page.viewport_size["width"] == SIZES["phone"][0])


def broken_rules(page: Page) -> list[str]:
    """Return the violations that axe finds in light and dark mode, with all sections unfolded."""
    unfold(page)
    page.eval_on_selector_all("svg", "all => all.forEach(one => one.replaceChildren())")
    found = []  # the shapes of the plots are removed: they are slow to check and hold no text
    for colours in ("light", "dark"):
        page.emulate_media(color_scheme=colours)  # type: ignore[arg-type]
        answer = Axe().run(page, options=EVERY).response
        assert answer["passes"]
        found += [f"{one['id']}: {one['nodes'][0]['html']}" for one in answer["violations"]]
    return found


def too_wide(page: Page) -> list[str]:
    """Return the elements that extend beyond the window, unless their box scrolls or hides them."""
    unfold(page)
    found: list[str] = page.evaluate(
        """width => {
        const scrolls = one => getComputedStyle(one).overflowX === "auto";
        const kept = one => one.closest("svg") || scrolls(one.closest(".wide, .broad") ?? one);
        return [...document.querySelectorAll("body *")].filter(one =>
            one.checkVisibility() && !kept(one.parentElement)
            && one.getBoundingClientRect().right > width + 1
        ).map(one => one.outerHTML.slice(0, 100));
    }""",
        page.viewport_size and page.viewport_size["width"],
    )
    return found


def unsorted(page: Page) -> list[str]:
    """Return the columns that do not sort by the numbers behind their cells."""
    unfold(page)
    rows = [
        row for row in derive.rows(RECORDS) if (row.case.layer, row.ranks) == ("collectives", 2)
    ]
    numbers: dict[str, Callable[[derive.Row], Any]] = {
        "case": lambda row: tuple(int(p) if p.isdigit() else p for p in row.case.id.split("/")),
        "time (ms)": lambda row: row.seconds,
        "busbw (GB/s)": lambda row: row.busbw,
        "bytes sent": lambda row: row.sent,
    }
    table, wrong = page.locator(WIDE), []
    heads = table.locator("th").all_inner_texts()
    for name, number in numbers.items():
        head = table.locator("th").nth(heads.index(name))
        for order in ("ascending", "descending"):
            head.get_by_role("button").click()
            texts = table.evaluate(CELLS, heads.index(name))
            expected = sorted(rows, key=number, reverse=order == "descending")
            in_order = [cells(row)[COLUMNS.index(name)] for row in expected]
            if texts != in_order or head.get_attribute("aria-sort") != order:
                wrong.append(name)
    return wrong


def unfiltered(page: Page) -> list[str]:
    """Return the filter words for which the shown rows are not those that contain them."""
    unfold(page)
    table, wrong = page.locator(WIDE), []
    field = page.get_by_label("Show only rows with these words")
    for words, shown in (("RING 1024", 1), ("ring", 4), ("nowhere", 0), ("", 8)):
        field.fill(words)
        told = page.locator(f"summary:text('{TITLE}') output").inner_text()
        if table.evaluate(SHOWN) != shown or told != f"{shown} of 8 rows" * (shown < 8):
            wrong.append(words)
    return wrong


def unfoldable(page: Page) -> list[str]:
    """Return the sections that do not fold, or that are wrongly open or closed at first."""
    sections = page.locator("section > details").all()
    wrong = []
    for place, section in enumerate(sections):
        heading = section.locator("> summary")
        if section.evaluate("one => one.open") != (place == 0 or not phone(page)):
            wrong.append(f"{heading.inner_text()}: open or not at first")
        for _ in range(2):
            before = section.evaluate("one => one.open")
            heading.click(position={"x": 10, "y": 10})
            if section.evaluate("one => one.open") == before:
                wrong.append(f"{heading.inner_text()}: does not fold")
    page.get_by_role("navigation").get_by_role("link").last.click()
    if not sections[-1].evaluate("one => one.open"):
        wrong.append("a link does not open its section")
    return wrong


@pytest.mark.parametrize("name", NAMES)
def test_axe_finds_nothing_and_nothing_sticks_out(name: str, folder: Path, page: Page) -> None:
    show(page, folder / f"{name}.html")
    assert broken_rules(page) == []
    assert too_wide(page) == []


@pytest.mark.parametrize("check", [unsorted, unfiltered])
def test_tables_sort_by_their_numbers_and_rows_are_filtered_by_words(
    check: Callable[[Page], list[str]], folder: Path, page: Page
) -> None:
    show(page, folder / "report.html")
    assert check(page) == []


@pytest.mark.parametrize("name", ["report", "history"])
def test_every_section_folds(name: str, folder: Path, page: Page) -> None:
    show(page, folder / f"{name}.html")
    if phone(page):
        assert page.evaluate("document.documentElement.scrollHeight") < 4 * SIZES["phone"][1]
    assert unfoldable(page) == []


def test_an_empty_history_says_what_it_needs(folder: Path, page: Page) -> None:
    show(page, folder / "empty.html")
    text = page.locator("body").inner_text()
    assert "There is nothing to show" in text
    assert "A history needs the records of several runs." in text
    assert page.get_by_role("navigation").count() == 0


@pytest.mark.parametrize(
    ("check", "right", "wrong"),
    [
        (broken_rules, '"Show only rows with these words", input', "input"),
        (broken_rules, "<main>", "<div>"),
        (broken_rules, "--soft: #5a6270", "--soft: #b0b6c0"),
        (broken_rules, ' role="img" aria-label=', ' role="img" data-label='),
        (too_wide, "overflow-x: auto; border", "border"),
        (too_wide, "minmax(min(100%, 350px), 1fr)", "1500px"),
        (unsorted, "return sign * (a - b)", "return sign * one.localeCompare(other)"),
        (unsorted, '"KiB", "MiB"', '"MiB", "KiB"'),
        (unfiltered, ".every(", ".some("),
        (unfiltered, "wanted = text.toLowerCase()", "wanted = text"),
        (unfoldable, "section.open = place === 0", "section.open = place > 0"),
        (unfoldable, "section.firstElementChild.open = true", "section"),
    ],
)
@pytest.mark.parametrize("browser", ["phone"], indirect=True)
def test_a_fault_is_seen(
    check: Callable[[Page], list[str]], right: str, wrong: str, folder: Path, page: Page
) -> None:
    show(page, folder / "report.html", (right, wrong))
    assert check(page) != []


def test_no_other_script_runs(folder: Path, browser: Any) -> None:
    page = browser.new_page()
    show(page, folder / "report.html")
    page.evaluate("""() => {
        const other = document.createElement("script");
        other.textContent = "window.ran = true";
        document.body.append(other);
    }""")
    assert page.evaluate("window.ran") is None
