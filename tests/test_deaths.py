"""Test the checks of `nox -s deaths` on simulated launches.

A launch that ended as it should has no fault. Everything that is missing is a fault.
"""

import json
import os
import random
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from deaths import trial
from deaths.report import add
from deaths.trial import AFTER, BEFORE, CASE, END, Death, judged, left
from deaths.ways import PLACES, RAISED, SILENT, STUCK, WAYS
from kit.faults import CRASHES, FAULTS

KILLED = Death("SIGKILL", "inside", 1, 5)
RAISING = Death("exception", "tear-down", 2, 1)
EXAMPLE = f"example in flight: {CASE}::{END}\n  {END}(nprocs=3, n=5)\n"
PRINTED = f"rank 1 died first: killed by SIGKILL; last place: in Allreduce\n{EXAMPLE}"
JUNIT = (
    f'<testsuite><testcase name="{BEFORE}"/><testcase name="{END}"><error/></testcase></testsuite>'
)


def faults_of(
    folder: Path,
    death: Death = KILLED,
    code: int | None = 1,
    seconds: float = 3.0,
    junit: str | None = JUNIT,
    printed: str = PRINTED,
) -> list[str]:
    """Return the faults that the study finds in a simulated launch."""
    if junit is not None:
        (folder / "junit.xml").write_text(junit)
    return judged(death, code, seconds, printed, folder)


RAISED_TEXT = f'{CASE}::{END}\nfailed on rank 2 of 3\n  File "case_death.py", line 5\n'
RAISED_TEST = {"death": RAISING, "printed": RAISED_TEXT}
WENT_ON = JUNIT.replace("</testsuite>", f'<testcase name="{AFTER}"/></testsuite>')


@pytest.mark.parametrize(
    ("changes", "faults"),
    [
        ({}, []),
        ({**RAISED_TEST, "junit": WENT_ON}, []),
        (RAISED_TEST, ["the session did not go on"]),
        ({"printed": PRINTED.replace("rank 1 died first", "rank 2 died first")}, ["no rank"]),
        ({"printed": PRINTED.replace(f"{CASE}::{END}", "")}, ["no test"]),
        ({"printed": PRINTED.replace("nprocs=3, n=5", "")}, ["no example"]),
        ({"printed": PRINTED.replace("last place", "")}, ["no stack"]),
        ({"code": 0}, ["exit code 0"]),
        ({"code": None}, ["it had to be shot"]),
        ({"seconds": KILLED.bound + 1}, ["21 s to the end"]),
        ({"seconds": float("nan")}, ["nan s to the end"]),
        ({"junit": JUNIT.replace("<error/>", "")}, ["the test is not red in the JUnit file"]),
        ({"junit": JUNIT.replace(BEFORE, "x")}, ["the test before is not in the JUnit file"]),
        ({"junit": None}, ["no JUnit file"]),
    ],
)
def test_each_thing_that_is_missing_is_a_fault_and_nothing_else(
    tmp_path: Path, changes: Any, faults: list[str]
) -> None:
    assert faults_of(tmp_path, **changes) == faults


def test_what_is_left_is_found(tmp_path: Path) -> None:
    file = tmp_path / "segment"
    file.touch()
    (tmp_path / "mapped-0").write_text(f"{file}\n{tmp_path / 'gone'}")
    alive = subprocess.Popen(
        [sys.executable, "-c", "input()"],
        stdin=subprocess.PIPE,
        env={**os.environ, "SP_DEATH": "a mark"},
    )
    try:
        assert sorted(left(tmp_path, "a mark")) == [
            f"{file} is left",
            f"process {alive.pid} is left: {sys.executable} -c input()",
        ]
    finally:
        alive.communicate(b"\n", timeout=30)
    assert list(left(tmp_path, "a mark")) == [f"{file} is left"]


def test_the_report_keeps_the_rows_of_both_mpis_and_counts_faults(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for library, found in (("Open MPI", []), ("MPICH", ["no rank"])):
        death = {**asdict(KILLED), "bound": KILLED.bound, "seconds": 2.5, "faults": found}
        fault = {"fault": "segv", "minimum": "n=7", "launches": 5, "seconds": 40.0, "faults": []}
        program = {"place": "thread", "start": "torchrun", "seconds": 3.0, "faults": found}
        rows = {"deaths": death, "faults": fault, "programs": program}
        faults = [add(tmp_path, library, kind, row, "why") for kind, row in rows.items()]
        assert sum(faults) == 2 * len(found)
        assert ("why" in capsys.readouterr().out) == bool(found)
    assert list(json.loads((tmp_path / "deaths.json").read_text())) == ["Open MPI", "MPICH"]
    text = (tmp_path / "deaths.md").read_text()
    assert "| SIGKILL | 2.5 (≤ 20) |" in text
    assert "| SIGKILL | 2.5 (≤ 20) **no rank** |" in text
    assert "| place | torchrun |" in text
    assert "| thread | 3.0 |" in text
    assert "| segv | n=7 | 5 | 40 | as expected |" in text


def test_every_way_is_of_one_kind_and_every_fault_has_its_command() -> None:
    assert set(SILENT) | set(RAISED) | set(STUCK) < set(WAYS)
    assert len({*SILENT, *RAISED, *STUCK}) == len(SILENT) + len(RAISED) + len(STUCK)
    assert {trial.drawn("abort", place, random.Random(place)).in_body for place in PLACES} == {
        True,
        False,
    }
    for fault in (*(one.fault for one in FAULTS), *CRASHES):
        assert ("sp_core.testing.shrink_crash" in trial.command_of(fault)) == (fault in CRASHES)
