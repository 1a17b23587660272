"""What the ranks of mpi4py's tests have written: differences, and the report."""

from __future__ import annotations

import fnmatch
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from sp_core.testing.requests import UNCHECKED

KINDS = ("plain", "checked")
WORDS = ("passed", "skipped", "failed", "not run")
KNOWN = {
    "test_comm.TestComm*.testPickle": "A checked communicator cannot be pickled: it holds "
    "requests that are under way.",
    "test_p2p_obj.*.testManyISendAndRecv": (
        "Of six messages to itself the test receives three, and counts on each `isend` being "
        "complete by then. "
        "MPI does not promise that, and under the kit a send is synchronous: it is complete when "
        "MPI has been told of the receive."
    ),
}
"""Tests that fail on checked communicators, and why."""

ADAPTED = {
    "test_comm_topo: checkHandle": "what is made from a handle (`MPI.Comm.fromint`) is mpi4py's "
    "own, so its class is not compared"
}
"""What is left out of a test on checked communicators, and why."""

HEAD = """# mpi4py's own tests through the checked communicator

`nox -s mpi4py`: the tests of communication of the mpi4py that is installed, once as they are and
once with checked communicators in the place of `MPI.COMM_WORLD` and `MPI.COMM_SELF`. A test counts
as failed, or as not run, where it is so on any rank.
"""


class Result(NamedTuple):
    """How one test ended on one rank."""

    name: str
    word: str
    problem: str = ""


def is_known(name: str) -> bool:
    """Whether a test may fail on checked communicators."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in KNOWN)


@dataclass
class Run:
    """One launch, or several with the same ranks and communicators.

    Attributes:
        tests: what became of each test, all ranks together.
        library: the MPI library, and the version of mpi4py.
    """

    tests: dict[str, Result] = field(default_factory=dict)
    library: tuple[str, str] = ("", "")

    @property
    def modules(self) -> list[str]:
        """The modules of mpi4py's tests that have run."""
        return sorted({name.partition(".")[0] for name in self.tests if name.startswith("test_")})

    @property
    def counts(self) -> Counter[str]:
        """How many tests ended in each way."""
        return Counter(result.word for result in self.tests.values())


def merged(ranks: Sequence[Sequence[Result]]) -> dict[str, Result]:
    """One result for each test.

    Failed or not run where it is on any rank, skipped where it is on all.
    """
    seen = {
        result.name: [{r.name: r for r in rank}.get(result.name) for rank in ranks]
        for rank in ranks
        for result in rank
    }
    return {name: _one(name, results) for name, results in seen.items()}


def _one(name: str, results: Sequence[Result | None]) -> Result:
    known = [result for result in results if result is not None]
    failed = next((result for result in known if result.word == "failed"), None)
    if failed is not None:
        return failed
    if len(known) < len(results):
        return Result(name, "not run")
    return next((result for result in known if result.word == "passed"), known[0])


def read(folders: Sequence[Path]) -> Run:
    """What launches have left in their folders.

    Tests that a rank did not come to are counted, without a name.
    """
    run = Run()
    for folder in folders:
        lines = [
            [json.loads(line) for line in file.read_text().splitlines()]
            for file in sorted(folder.glob("rank*.jsonl"))
        ]
        for name, version, number in [rank[0] for rank in lines][:1]:
            tests = merged([[Result(*line) for line in rank[1:]] for rank in lines])
            run.library = (name, version)
            run.tests |= tests | {
                f"{folder.name} {n}": Result("", "not run") for n in range(number - len(tests))
            }
    return run


Runs = Mapping[tuple[str, int], tuple[Run, Run]]
"""By library and number of ranks a plain and a checked run."""


def differences(plain: Run, checked: Run) -> list[tuple[Result, Result]]:
    """The tests that do not end in the same way."""
    missing = Result("", "not run")
    names = sorted(plain.tests.keys() | checked.tests.keys())
    pairs = [(plain.tests.get(name, missing), checked.tests.get(name, missing)) for name in names]
    return [pair for pair in pairs if pair[0].word != pair[1].word]


def unexplained(plain: Run, checked: Run) -> list[tuple[Result, Result]]:
    """The differences that no known reason explains, and what was not run on checked ones."""
    missing = [
        (plain.tests.get(name, result), result)
        for name, result in checked.tests.items()
        if result.word == "not run"
    ]
    differing = [
        pair
        for pair in differences(plain, checked)
        if not is_known(pair[1].name) or pair[1].word != "failed"
    ]
    return [*missing, *(pair for pair in differing if pair not in missing)]


def rows(runs: Runs) -> list[dict[str, Any]]:
    """What became of each pair of runs.

    How many tests ended in each way, and why those that did not pass.
    """
    return [
        _row(library, ranks, plain, checked)
        for (library, ranks), (plain, checked) in sorted(runs.items())
    ]


def _row(library: str, ranks: int, plain: Run, checked: Run) -> dict[str, Any]:
    results = checked.tests.values()
    skipped = Counter(result.problem for result in results if result.word == "skipped")
    return {
        "mpi": library,
        "mpi4py": checked.library[1],
        "ranks": ranks,
        "modules": checked.modules,
        **{
            kind: {word: run.counts[word] for word in WORDS}
            for kind, run in zip(KINDS, (plain, checked), strict=True)
        },
        "skipped because": dict(sorted(skipped.items())),
        "failed because": {one.name: one.problem for one in results if one.word == "failed"},
        "differences": [
            [after.name or before.name, before.word, after.word]
            for before, after in differences(plain, checked)
        ],
        "unexplained": [after.name or before.name for before, after in unexplained(plain, checked)],
    }


def report(found: list[dict[str, Any]]) -> str:
    """The report as Markdown, from the rows."""
    table = ["| MPI | ranks | communicators | passed | skipped | failed | not run |"]
    table.append("| --- " * 7 + "|")
    for row in found:
        for kind in KINDS:
            cells = (row["mpi"], row["ranks"], kind, *(row[kind][word] for word in WORDS))
            table.append(f"| {' | '.join(map(str, cells))} |")
    told = [(f"{row['mpi']}, {row['ranks']} ranks", row) for row in found]
    differing = [f"{where}: {name}" for where, row in told for name in row["unexplained"]]
    sections = {
        "## Modules that have run": [
            f"{where}: {', '.join(row['modules'])}." for where, row in told
        ],
        "## Failed on checked communicators": _listed(told, "failed because", "`"),
        "Why, where it passes on plain ones:": [f"`{name}`: {why}" for name, why in KNOWN.items()],
        "Differences that none of these explains:": differing,
        "## Skipped by mpi4py's tests themselves, on checked communicators": _listed(
            told, "skipped because"
        ),
        "## Left out of tests on checked communicators": [
            f"{what}: {why}." for what, why in ADAPTED.items()
        ],
        "## Not checked between ranks\n\n"
        "Each is said at run time, once in a process, and at the end of a session.": [
            f"`{name}`: {why}." for name, why in sorted(UNCHECKED.items())
        ],
    }
    lines = [HEAD, *table]
    for head, items in sections.items():
        lines += ["", head, "", *([f"- {item}" for item in items] or ["None."])]
    return "\n".join(lines) + "\n"


def _listed(told: list[tuple[str, dict[str, Any]]], what: str, mark: str = "") -> list[str]:
    """Each name that rows have under a heading, with the runs and their counts."""
    places: dict[str, list[str]] = {}
    for where, row in told:
        for name, value in row[what].items():
            count = f": {value}" if isinstance(value, int) else ""
            places.setdefault(name, []).append(where + count)
    return [f"{mark}{name}{mark} ({'; '.join(runs)})" for name, runs in sorted(places.items())]
