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
_COUNTS = {"failed": "failures", "error": "errors", "skipped": "skipped"}


class Ledger:
    """Keep what a session reports, line by line; a plugin of pytest.

    The first line says where the JUnit file was to be written. A test has one line when it begins,
    without an outcome, and another one when it ends.

    Args:
        directory: of the launch.
        xml: where the session was to write its JUnit file, if anywhere.
        suite: its name in that file.
    """

    def __init__(self, directory: Path, xml: str | None, suite: str = "pytest") -> None:
        self._path = directory / FILE
        self._case: dict[str, Any] = {"xml": xml and str(Path(xml).absolute()), "suite": suite}
        self._write()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Keep that a test begins."""
        self._case = {"test": nodeid, "outcome": "", "seconds": 0.0, "text": ""}
        self._write()

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Add a phase of the test: the worst outcome counts."""
        outcome = "error" if report.failed and report.when != "call" else report.outcome
        self._case["outcome"] = max(self._case["outcome"], outcome, key=_ORDER.index)
        self._case["seconds"] += report.duration
        self._case["text"] += report.longreprtext if report.failed else ""

    def pytest_runtest_logfinish(self) -> None:
        """Keep that a test has ended."""
        self._write()

    def _write(self) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(self._case) + "\n")


def read(directory: Path) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Return what is known of the JUnit file, and the tests by name."""
    path = directory / FILE
    text = path.read_text() if path.exists() else ""
    wanted, *cases = map(json.loads, text[: text.rfind("\n") + 1].splitlines() or ['{"xml": null}'])
    return wanted, {case["test"]: case for case in cases}


def told(directory: Path) -> list[str]:
    """Return the outcomes of the tests before the end, in lines; none if no test had begun."""
    _, cases = read(directory)
    counts = Counter(case["outcome"] for case in cases.values())
    known = [f"{counts[name]} {name}" for name in _ORDER[1:] if counts[name]]
    lines = [f"tests that had ended: {', '.join(known) or 'none'}"]
    lines += [
        f"  {case['outcome']}: {name}"
        for name, case in cases.items()
        if case["outcome"] in ("failed", "error")
    ]
    lines += [f"test under way: {name}" for name, case in cases.items() if not case["outcome"]]
    return lines if cases else []


def write_junit(directory: Path, report: str) -> None:
    """Write the JUnit file that the session could not write, if one was asked for.

    Args:
        directory: of the launch.
        report: becomes the error of the test that was under way.
    """
    wanted, cases = read(directory)
    if not wanted["xml"]:
        return
    if all(case["outcome"] for case in cases.values()):
        cases["the launch"] = {"outcome": "", "seconds": 0.0}
    for case in cases.values():
        if not case["outcome"]:
            case.update(outcome="error", text=report)
    outcomes = Counter(case["outcome"] for case in cases.values())
    counts = {name: str(outcomes[outcome]) for outcome, name in _COUNTS.items()}
    root = ET.Element("testsuites")
    head = {"name": wanted["suite"], "tests": str(len(cases)), **counts}
    suite = ET.SubElement(root, "testsuite", head)
    for name, case in cases.items():
        _add_case(suite, name, case)
    file = Path(wanted["xml"])
    file.parent.mkdir(parents=True, exist_ok=True)
    ET.ElementTree(root).write(file, encoding="utf-8", xml_declaration=True)


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
