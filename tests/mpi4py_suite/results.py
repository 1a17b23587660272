"""Merge the results that ranks wrote of mpi4py's tests, and report their differences."""

import fnmatch
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from studies.records import read_lines, table

from sp_core.testing.unchecked import UNCHECKED

KINDS = ("plain", "checked")
WORDS = ("passed", "skipped", "failed", "not run")
WORST = ("failed", "not run", "passed", "skipped")
"""The result of a test on all ranks together is the first of these words that any rank has."""
KNOWN = {
    "test_comm.TestComm*.testPickle": "A checked communicator cannot be pickled: it holds "
    "requests that are under way.",
    "test_p2p_obj.*.testCommLock": "It looks into mpi4py's own table of locks, which the messages "
    "of a checked communicator do not use.",
    "test_p2p_obj.*.testManyISendAndRecv": (
        "Of six messages to itself the test receives three, and counts on each `isend` being "
        "complete by then. "
        "MPI does not promise that, and under the kit a send is synchronous: it is complete when "
        "MPI has been told of the receive."
    ),
}
"""Tests that may fail on checked communicators, each with the reason."""

ADAPTED = {
    "test_comm_topo: checkHandle": "what is made from a handle (`MPI.Comm.fromint`) is mpi4py's "
    "own, so its class is not compared"
}
"""Checks that tests leave out on checked communicators, each with the reason."""

HEAD = """# mpi4py's own tests through the checked communicator

`nox -s mpi4py`: the tests of communication of the mpi4py that is installed, once as they are and
once with checked communicators in the place of `MPI.COMM_WORLD` and `MPI.COMM_SELF`. A test counts
as failed, or as not run, where it is so on any rank.
"""


class Result(NamedTuple):
    """Hold how one test ended on one rank."""

    name: str
    word: str
    problem: str = ""


def is_known(name: str) -> bool:
    """Return whether a test may fail on checked communicators."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in KNOWN)


Tests = dict[str, Result]
"""The result of each test on all ranks together, by name."""


def merged(ranks: Sequence[Sequence[Result]]) -> Tests:
    """Return one result for each test that at least one rank has run."""
    by_rank = [{result.name: result for result in rank} for rank in ranks]
    return {
        name: min(
            (known.get(name, Result(name, "not run")) for known in by_rank),
            key=lambda result: WORST.index(result.word),
        )
        for name in dict.fromkeys(result.name for rank in ranks for result in rank)
    }


def read(folders: Iterable[Path]) -> tuple[list[str], Tests]:
    """Return the MPI library and the version of mpi4py, and the results of launches in folders.

    A test that no rank has run is named by its folder and a number.
    """
    about, found = ["", ""], Tests()
    for folder in sorted(folders):
        ranks: list[Any] = [read_lines(file) for file in sorted(folder.glob("rank*.jsonl"))]
        if ranks:
            *about, number = ranks[0][0]
            tests = merged([[Result(*line) for line in rank[1:]] for rank in ranks])
            unknown = [f"{folder.name} {n}" for n in range(number - len(tests))]
            found |= tests | {name: Result(name, "not run") for name in unknown}
    return about, found


def row(about: list[str], ranks: int, plain: Tests, checked: Tests) -> dict[str, Any]:
    """Return the results of a plain and a checked run as a row of the report.

    It has the number of tests with each result, and the reasons of those that did not pass.
    """
    words = {
        name: [tests.get(name, Result(name, "not run")).word for tests in (plain, checked)]
        for name in sorted({*plain, *checked})
    }
    differing = [(name, *each) for name, each in words.items() if each[0] != each[1]]
    explained = {name for name, _, after in differing if is_known(name) and after == "failed"}
    red = {name for name, *_ in differing} | {name for name in words if "not run" in words[name]}
    skipped = Counter(one.problem for one in checked.values() if one.word == "skipped")
    counts = [Counter(one.word for one in tests.values()) for tests in (plain, checked)]
    return {
        "mpi": about[0],
        "mpi4py": about[1],
        "ranks": ranks,
        "modules": sorted({name.split(".")[0] for name in checked if name.startswith("test_")}),
        **{kind: {word: n[word] for word in WORDS} for kind, n in zip(KINDS, counts, strict=True)},
        "skipped because": dict(sorted(skipped.items())),
        "failed because": {n: one.problem for n, one in checked.items() if one.word == "failed"},
        "differences": differing,
        "unexplained": sorted(red - explained),
    }


def report(found: list[dict[str, Any]]) -> list[str]:
    """Return the lines of the report, from the rows."""
    head = ("MPI", "ranks", "communicators", *WORDS)
    cells = [
        (row["mpi"], row["ranks"], kind, *(row[kind][word] for word in WORDS))
        for row in found
        for kind in KINDS
    ]
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
    lines = [HEAD, *table(head, cells)]
    for title, items in sections.items():
        lines += ["", title, "", *([f"- {item}" for item in items] or ["None."])]
    return lines


def _listed(told: list[tuple[str, dict[str, Any]]], what: str, mark: str = "") -> list[str]:
    """Return each name that rows have under the key `what`, with the runs and their counts."""
    places: dict[str, list[str]] = {}
    for where, row in told:
        for name, value in row[what].items():
            count = f": {value}" if isinstance(value, int) else ""
            places.setdefault(name, []).append(where + count)
    return [f"{mark}{name}{mark} ({'; '.join(runs)})" for name, runs in sorted(places.items())]
