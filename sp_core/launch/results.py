"""Keep the results of tests when a launch ends before pytest can write them.

`Ledger` runs in rank 0 and appends each result to the file FILE in the launch's directory. In the
launcher, `told` lists these results and `write_junit` makes a JUnit file of them. Only the standard
library and `watch` are imported.
"""

import json
import os
import sys
import xml.etree.ElementTree as ET
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

from sp_core.launch.watch import RESULT

FILE = "reports.jsonl"
_ORDER = ("", "passed", "skipped", "failed", "error")
_TAGS = {"failed": "failure", "error": "error", "skipped": "skipped"}
_COUNTS = {"failed": "failures", "error": "errors", "skipped": "skipped"}


class Ledger:
    """A pytest plugin that appends the results of a session to a file, one JSON object per line.

    Results of an earlier session of the same launch are removed: pytest has written them.
    The first line has the path of the JUnit file (or null) and the name of its test suite. Each
    test has a line when it begins, with an empty outcome, and another line when it ends.

    Args:
        directory: the launch's directory, in which the file is made.
        xml: path at which pytest was told to write a JUnit file; None or "" if it was not. As in
            pytest, `~` and variables of the environment are expanded.
        suite: name of the test suite in the JUnit file.
    """

    def __init__(self, directory: Path, xml: str | None, suite: str = "pytest") -> None:
        self._path = directory / FILE
        self._path.write_text("")
        path = xml and os.path.expanduser(os.path.expandvars(xml))  # noqa: PTH111  # never raises
        self._case: dict[str, Any] = {"xml": path and str(Path(path).absolute()), "suite": suite}
        self.pytest_runtest_logfinish()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Write a line with an empty outcome for a test that begins."""
        self._case = {"test": nodeid, "outcome": "", "seconds": 0.0, "text": ""}
        self.pytest_runtest_logfinish()

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Add the report of a test's setup, call or teardown to the result of the test.

        The worst outcome counts; seconds and texts of errors add up.
        """
        outcome = "error" if report.failed and report.when != "call" else report.outcome
        if outcome in _ORDER:  # a plugin that runs tests again also reports "rerun"
            self._case["outcome"] = max(self._case["outcome"], outcome, key=_ORDER.index)
        self._case["seconds"] += report.duration
        self._case["text"] += report.longreprtext if report.failed else ""

    def pytest_runtest_logfinish(self) -> None:
        """Write a line with the result of the test that has ended."""
        with self._path.open("a") as file:
            file.write(json.dumps(self._case) + "\n")


def read(directory: Path) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Read the ledger's file. A last line that is incomplete is left out.

    Returns:
        (first, tests): `first` is the object of the first line, with "xml" (the path of the JUnit
        file; None or "" if none is wanted) and "suite". It is {"xml": None} if no line is complete.
        `tests` has by test name its latest object, with "test", "outcome", "seconds" and "text".
        The outcome is "" if the test has not ended.
    """
    path = directory / FILE
    text = path.read_text() if path.exists() else ""
    wanted, *cases = map(json.loads, text[: text.rfind("\n") + 1].splitlines() or ['{"xml": null}'])
    return wanted, {case["test"]: case for case in cases}


def told(directory: Path) -> list[str]:
    """Return a summary to print: counts of outcomes, and the tests that failed or had not ended.

    Args:
        directory: where the ranks have written their results.

    Returns:
        Its lines; none if no test had begun.
    """
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
    """Write the JUnit file in place of pytest. Do nothing if none was asked for.

    Args:
        directory: the launch's directory, with the ledger's file.
        report: text of the error of the test that had not ended. If all had ended, it is the error
            of an additional test case named "the launch".
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
        path, _, rest = name.partition("::")  # a folder's name may have brackets, too
        address, *parameters = rest.partition("[")
        parts = address.split("::")
        classname = ".".join([path.removesuffix(".py").replace("/", "."), *parts[:-1]])
        told = {"classname": classname, "name": "".join([parts[-1] or path, *parameters])}
        made = ET.SubElement(suite, "testcase", told, time=f"{case['seconds']:.3f}")
        if tag := _TAGS.get(case["outcome"]):
            # XML allows no other characters
            text = "".join(c for c in case["text"] if c.isprintable() or c in "\n\t")
            ET.SubElement(made, tag, message=text.partition("\n")[0]).text = text
    Path(wanted["xml"]).parent.mkdir(parents=True, exist_ok=True)
    ET.ElementTree(root).write(wanted["xml"], encoding="utf-8", xml_declaration=True)


def tell_interrupted(directory: Path) -> None:
    """Print the results of a test session that an interruption ends, and write the JUnit file.

    Do nothing if no test had begun, or if the session has ended.

    Args:
        directory: the launch's directory.
    """
    if (directory / RESULT).exists() or not (lines := told(directory)):
        return
    text = "\n".join(["the launch was interrupted", *lines])
    with suppress(OSError):  # a terminal that was closed
        write_junit(directory, text)
        print(text, file=sys.stderr, flush=True)
