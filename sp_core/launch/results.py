"""Keep the results of tests when a launch is lost.

Rank 0 writes each report down at once, the launcher makes a JUnit file.

Nothing but the standard library is imported.
"""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path
from typing import Any

FILE = "reports.jsonl"
_ORDER = ("", "passed", "skipped", "failed", "error")
_TAGS = {"failed": "failure", "error": "error", "skipped": "skipped"}


class Ledger:
    """Keep what a session reports, line by line; a plugin of pytest.

    Args:
        directory: of the launch.
        xml: where the session was to write its JUnit file, if anywhere.
        suite: its name in that file.
    """

    def __init__(self, directory: Path, xml: str | None, suite: str = "pytest") -> None:
        self._path = directory / FILE
        self._path.touch()
        self._case: dict[str, Any] = {}
        if xml:
            self._add(xml=str(Path(xml).absolute()), suite=suite)

    def _add(self, **line: Any) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Keep that a test begins."""
        self._case = {"test": nodeid, "outcome": "", "seconds": 0.0, "text": "", "ended": False}
        self._add(**self._case)

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Add a phase of the test: the worst outcome counts."""
        outcome = "error" if report.failed and report.when != "call" else report.outcome
        self._case["outcome"] = max(self._case["outcome"], outcome, key=_ORDER.index)
        self._case["seconds"] += report.duration
        self._case["text"] += report.longreprtext if report.failed else ""

    def pytest_runtest_logfinish(self) -> None:
        """Keep the outcome of a test."""
        self._add(**self._case | {"ended": True})


def read(directory: Path) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Return the JUnit file that was asked for, if any, and the tests by name."""
    path, wanted, cases = directory / FILE, dict[str, Any](), dict[str, dict[str, Any]]()
    text = path.read_text() if path.exists() else ""
    for line in map(json.loads, text[: text.rfind("\n") + 1].splitlines()):
        if "xml" in line:
            wanted = line
        else:
            cases[line["test"]] = line
    return wanted, cases


def told(directory: Path) -> list[str]:
    """Return the outcomes of the tests before the end, in lines; none if no test had begun."""
    _, cases = read(directory)
    ended = {name: case["outcome"] for name, case in cases.items() if case["ended"]}
    counts = Counter(ended.values())
    lines = [
        f"tests that had ended: "
        f"{', '.join(f'{counts[name]} {name}' for name in _ORDER if counts[name]) or 'none'}"
    ]
    lines += [
        f"  {outcome}: {name}" for name, outcome in ended.items() if outcome in ("failed", "error")
    ]
    lines += [f"test under way: {name}" for name in cases if name not in ended]
    return lines if cases else []


def write_junit(directory: Path, report: str) -> Path | None:
    """Write the JUnit file that the session could not write.

    Args:
        directory: of the launch.
        report: becomes the error of the test that was under way.

    Returns:
        The file; None if none was asked for.
    """
    wanted, cases = read(directory)
    if not wanted:
        return None
    if all(case["ended"] for case in cases.values()):
        cases["the launch"] = {"seconds": 0.0, "text": "", "ended": False}
    for case in cases.values():
        if not case["ended"]:
            case.update(outcome="error", text=f"{case['text']}\n{report}".strip())
    outcomes = Counter(case["outcome"] for case in cases.values())
    counts = {
        name: str(outcomes[kind])
        for kind, name in (("failed", "failures"), ("error", "errors"), ("skipped", "skipped"))
    }
    root = ET.Element("testsuites")
    suite = ET.SubElement(
        root, "testsuite", {"name": wanted["suite"], "tests": str(len(cases)), **counts}
    )
    for name, case in sorted(cases.items(), key=lambda item: not item[1]["ended"]):
        _add_case(suite, name, case)
    file = Path(wanted["xml"])
    file.parent.mkdir(parents=True, exist_ok=True)
    ET.ElementTree(root).write(file, encoding="utf-8", xml_declaration=True)
    return file


def _add_case(suite: ET.Element, name: str, case: dict[str, Any]) -> None:
    path, *parts = name.split("::")
    classname = ".".join([path.removesuffix(".py").replace("/", "."), *parts[:-1]])
    made = ET.SubElement(
        suite,
        "testcase",
        classname=classname,
        name=(parts or [path])[-1],
        time=f"{case['seconds']:.3f}",
    )
    if tag := _TAGS.get(case["outcome"]):
        text = "".join(
            letter for letter in case["text"] if letter.isprintable() or letter in "\n\t"
        )  # XML knows no others
        ET.SubElement(made, tag, message=text.partition("\n")[0]).text = text
