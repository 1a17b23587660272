"""Test the verdict of `nox -s mpi4py`.

It fails if a test ends differently on checked communicators, except for tests that are known to. A
test that fails on plain communicators as well is no error.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from mpi4py_suite import __main__ as command
from mpi4py_suite.results import KINDS, KNOWN, Result, merged

from sp_core.testing.requests import UNCHECKED

FOLDER = Path(command.__file__).parent
KNOWN_TEST = "test_p2p_obj.TestP2PObjWorld.testManyISendAndRecv"


@pytest.mark.parametrize(
    ("words", "word"),
    [
        (("passed", "passed"), "passed"),
        (("passed", "failed"), "failed"),
        (("skipped", "passed"), "passed"),
        (("skipped", "skipped"), "skipped"),
        (("passed", None), "not run"),
        (("failed", None), "failed"),
    ],
)
def test_a_test_has_one_end_for_all_ranks(words: tuple[str | None, ...], word: str) -> None:
    ranks = [[Result("a", each)] if each else [] for each in words]
    assert [result.word for result in merged(ranks).values()] == [word]


def written(out: Path, plain: dict[str, str], checked: dict[str, str], number: int = 2) -> int:
    """Write these results as those of two ranks. Return the exit code of the command."""
    for kind, words in zip(KINDS, (plain, checked), strict=True):
        folder = command.place(out, 2, kind, "messages")
        folder.mkdir(parents=True)
        lines = [
            ["An MPI 1.0", "4.1", number],
            *([name, word, "a reason"] for name, word in words.items()),
        ]
        for rank in range(2):
            text = "".join(f"{json.dumps(line)}\n" for line in lines)
            (folder / f"rank{rank}.jsonl").write_text(text)
        (folder / command.OUTPUT).touch()
    return command.concluded(out)


PASSED = {"test_a": "passed", "test_b": "skipped"}


@pytest.mark.parametrize(
    ("plain", "checked", "code"),
    [
        (PASSED, PASSED, 0),
        (PASSED, {"test_a": "failed", "test_b": "skipped"}, 1),
        (PASSED, {"test_a": "passed", "test_b": "passed"}, 1),
        (PASSED, {"test_a": "passed"}, 1),
        (PASSED | {"test_b": "failed"}, PASSED | {"test_b": "failed"}, 0),
        ({"test_a": "passed", KNOWN_TEST: "passed"}, {"test_a": "passed", KNOWN_TEST: "failed"}, 0),
        ({"test_a": "passed", KNOWN_TEST: "passed"}, {"test_a": "passed"}, 1),
        ({"test_a": "passed"}, {"test_a": "passed"}, 1),
        ({}, {}, 1),
    ],
)
def test_what_ends_otherwise_or_not_at_all_is_red(
    tmp_path: Path, plain: Any, checked: Any, code: int
) -> None:
    assert written(tmp_path, plain, checked) == code
    (row,) = json.loads((tmp_path / "REPORT.json").read_text())
    assert sum(row["checked"].values()) == 2
    assert bool(row["unexplained"]) == bool(code)


def test_the_report_has_both_mpis_and_names_what_is_not_checked() -> None:
    rows, text = (
        json.loads((FOLDER / "REPORT.json").read_text()),
        (FOLDER / "REPORT.md").read_text(),
    )
    assert {row["mpi"].split()[0] for row in rows} == {"Open", "MPICH"}
    assert [row["unexplained"] for row in rows] == [[]] * len(rows)
    assert all(row["checked"]["passed"] > 500 for row in rows)
    assert [name for name in (*UNCHECKED, *KNOWN) if f"`{name}`" not in text] == []
