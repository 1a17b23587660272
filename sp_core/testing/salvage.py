"""What had happened before a launch was lost: rank 0 writes down each report at once, and the launcher makes a JUnit file of them.

Nothing but the standard library is imported.
"""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FILE = "reports.jsonl"
_ORDER = ("passed", "skipped", "failed", "error")


class Ledger:
    """Keeps what a session reports, line by line.

    Args:
        directory: of the launch.
        xml: where the session was to write its JUnit file, if anywhere.
        suite: its name in that file.
    """

    def __init__(self, directory: Path, xml: str | None, suite: str = "pytest") -> None:
        self._path = directory / FILE
        self._path.touch()
        if xml:
            self._add(xml=str(Path(xml).absolute()), suite=suite)

    def start(self, test: str) -> None:
        """A test begins."""
        self._add(test=test, outcome="")

    def add(self, test: str, when: str, outcome: str, seconds: float, text: str) -> None:
        """A phase of a test has ended."""
        self._add(test=test, outcome="error" if outcome == "failed" and when != "call" else outcome, seconds=seconds, text=text)

    def end(self, test: str) -> None:
        """A test has come to its end, with all its phases."""
        self._add(test=test, ended=True)

    def _add(self, **line: Any) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")


@dataclass
class Case:
    """What is known of one test."""

    name: str
    outcome: str = ""
    seconds: float = 0.0
    text: str = ""
    ended: bool = False

    def merge(self, line: dict[str, Any]) -> None:
        """Add a line: the worst outcome of the phases is that of the test."""
        self.ended = self.ended or line.get("ended", False)
        self.seconds += line.get("seconds", 0.0)
        self.text += line.get("text", "")
        if (found := line.get("outcome")) and (not self.outcome or _ORDER.index(found) > _ORDER.index(self.outcome)):
            self.outcome = found


def read(directory: Path) -> tuple[dict[str, Any], list[Case]]:
    """The JUnit file that was to be written and the name of its suite, if any was asked for, and the tests that had begun."""
    path, wanted, cases = directory / FILE, dict[str, Any](), dict[str, Case]()
    text = path.read_text() if path.exists() else ""
    for line in map(json.loads, text[: text.rfind("\n") + 1].splitlines()):
        if "xml" in line:
            wanted = line
        if name := line.get("test"):
            cases.setdefault(name, Case(name)).merge(line)
    return wanted, list(cases.values())


def told(directory: Path) -> list[str]:
    """What the tests before the end have come to, in lines; nothing where none had begun."""
    _, cases = read(directory)
    counts = Counter(case.outcome for case in cases if case.ended)
    lines = [f"tests that had ended: {', '.join(f'{counts[name]} {name}' for name in _ORDER if counts[name]) or 'none'}"]
    lines += [f"  {case.outcome}: {case.name}" for case in cases if case.ended and case.outcome in ("failed", "error")]
    lines += [f"test under way: {case.name}" for case in cases if not case.ended]
    return lines if cases else []


def write_junit(directory: Path, report: str) -> Path | None:
    """Write the JUnit file that the session could not write.

    Args:
        directory: of the launch.
        report: becomes the error of the test that was under way.

    Returns:
        The file; None where none was asked for.
    """
    wanted, cases = read(directory)
    if not wanted:
        return None
    lost = [case for case in cases if not case.ended] or [Case("the launch")]
    for case in lost:
        case.outcome, case.text = "error", f"{case.text}\n{report}".strip()
    everything = [*(case for case in cases if case.ended), *lost]
    kinds = {"failed": "failures", "error": "errors", "skipped": "skipped"}
    counts = {word: str(sum(case.outcome == kind for case in everything)) for kind, word in kinds.items()}
    root = ET.Element("testsuites")
    suite = ET.SubElement(root, "testsuite", {"name": wanted["suite"], "tests": str(len(everything)), **counts})
    for case in everything:
        _element(suite, case)
    file = Path(wanted["xml"])
    file.parent.mkdir(parents=True, exist_ok=True)
    ET.ElementTree(root).write(file, encoding="utf-8", xml_declaration=True)
    return file


def _element(suite: ET.Element, case: Case) -> None:
    parts = case.name.split("::")
    classname = ".".join([parts[0].removesuffix(".py").replace("/", "."), *parts[1:-1]])
    made = ET.SubElement(suite, "testcase", classname=classname, name=parts[-1], time=f"{case.seconds:.3f}")
    tag = {"failed": "failure", "error": "error", "skipped": "skipped"}.get(case.outcome)
    if tag is not None:
        text = "".join(letter for letter in case.text if letter.isprintable() or letter in "\n\t")  # XML knows no others
        ET.SubElement(made, tag, message=text.partition("\n")[0]).text = text
