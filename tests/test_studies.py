"""Test what studies of whole suites say: `nox -s soak`, `nox -s deaths` and `nox -s mpi4py`.

The repeated suite names the seed of a failure, also if it is interrupted. A simulated launch that
ended as it should has no fault; everything that is missing is a fault. mpi4py's own tests end on
checked communicators as on plain ones, except for those that are known to differ.
"""

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from deaths import trial
from deaths.report import add
from deaths.trial import AFTER, BEFORE, CASE, END, Death, judged, left
from deaths.ways import PLACES, RAISED, SILENT, WAYS
from kit.failing import assert_told
from kit.faults import CRASHES, FAULTS
from mpi4py_suite import __main__ as suite_command
from mpi4py_suite.results import KINDS, KNOWN, Result, merged
from soak import __main__ as soak_command, runs as runs_module
from soak.laws import FILES, LEFT_OUT, THREADS_ONLY
from soak.runs import Run, carried_out, load
from studies.commands import RANKS, ROOT
from studies.records import junit

from benchmarks.launching import INTERRUPTED
from sp_core.testing.unchecked import UNCHECKED

SEEDED = "tests/kit/case_soak.py"
BAD = {
    "stage": "ranks",
    "test": "tests/test_x.py::test_y",
    "words": "it is wrong",
    "command": "a command",
}


def test_the_seed_that_fails_is_told_with_the_test_and_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run a real session of pytest."""
    monkeypatch.setenv("CASE_SEED", "7")
    ended = carried_out(Run("idle", 0, 7), [SEEDED], ["threads"], tmp_path)
    (failure,) = ended["failures"]
    assert ended["verdict"] == "failed"
    assert failure["test"] == f"{SEEDED}::test_likes_its_seed"
    assert "not this seed" in failure["words"]
    assert (
        failure["command"]
        == f'SP_PROFILE=soak python -m pytest --hypothesis-seed=7 "{SEEDED}::test_likes_its_seed"'
    )
    assert (tmp_path / "idle-0-threads.txt").exists()


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> list[Run]:
    """Record the runs that the command asks for. The third fails, the fifth is interrupted."""
    asked: list[Run] = []

    def run(wanted: Run, files: Any, stages: Any, folder: Path) -> dict[str, Any]:
        asked.append(wanted)
        if len(asked) == 5:
            raise KeyboardInterrupt
        failures = [BAD] if wanted[:2] == ("idle", 2) else []
        return {
            **wanted._asdict(),
            "verdict": "failed" if failures else "passed",
            "seconds": {"threads": 30.0, "ranks": 31.0},
            "tests": {"threads": 10, "ranks": 9},
            "failures": failures,
            "load": 1.5,
        }

    monkeypatch.setattr(soak_command, "carried_out", run)
    return asked


def test_the_report_of_a_soak_names_what_failed_even_if_it_is_interrupted(
    tmp_path: Path, made_up: list[Run], capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--runs", "3", "--loaded", "2", "--seed", "11", "--out", str(tmp_path)]
    assert soak_command.main(arguments) == INTERRUPTED
    assert "1 of 1 runs passed with a busy" in (tmp_path / "soak.md").read_text()
    assert soak_command.main(arguments) == 1
    assert [run[:2] for run in made_up[5:]] == [
        *(("idle", n) for n in range(3)),
        *(("loaded", n) for n in range(2)),
    ]
    assert len({run.seed for run in made_up}) == 5
    text = (tmp_path / "soak.md").read_text()
    assert_told(
        text,
        "2 of 3 runs passed with nothing of their own beside them; median 61 s",
        "2 of 2 runs passed with a busy process on each core",
        f"seed {made_up[2].seed}, {BAD['test']}: {BAD['words']}",
        BAD["command"],
    )
    out, err = capsys.readouterr()
    assert f"  ranks: {BAD['test']}: {BAD['words']}" in out
    assert "Traceback" not in err
    runs = json.loads((tmp_path / "soak.json").read_text())["runs"]
    assert [run["verdict"] for run in runs] == ["passed", "passed", "failed", "passed", "passed"]


@pytest.mark.parametrize(
    ("code", "xml"),
    [(5, ""), (0, ""), (139, ""), (None, ""), (1, "<testsuite><testcase/></testsuite>")],
)
def test_a_stage_without_a_result_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int | None, xml: str
) -> None:
    def ends(*_: Any) -> tuple[int | None, str]:
        if xml:
            (tmp_path / "idle-0-ranks.xml").write_text(xml)
        return code, ""

    monkeypatch.setattr(runs_module, "printed", ends)
    ended = carried_out(Run("idle", 0, 7), [SEEDED], ["ranks"], tmp_path)
    assert ended["verdict"] == "failed"
    (failure,) = ended["failures"]
    launch = f"python -m sp_core.testing.launch -n {RANKS} -- python -m pytest"
    assert (
        failure["command"] == f'SP_PROFILE=soak {launch} --only-mpi --hypothesis-seed=7 "{SEEDED}"'
    )


def test_a_stage_without_files_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Otherwise pytest would run the whole suite."""
    begun = Mock(return_value=(1, []))
    monkeypatch.setattr(runs_module, "run_stage", begun)
    once = ["--runs", "1", "--loaded", "0", "--out", str(tmp_path), "--tests", THREADS_ONLY[0]]
    assert soak_command.main(once) == 0
    assert [call.args[0] for call in begun.mock_calls] == ["threads"]
    assert soak_command.main([*once, "--stages", "ranks"]) == 2
    assert "run as threads only" in capsys.readouterr().err


TWO_FAILED = """
<testsuites><testsuite>
<testcase file="tests/test_x.py" classname="tests.test_x" name="test_a[1]">
<failure>no</failure>
</testcase>
<testcase file="tests/test_x.py" classname="tests.test_x.TestC" name="test_b">
<failure>no</failure>
</testcase>
<testcase/>
</testsuite></testsuites>
"""


def test_ids_of_tests_are_those_of_the_command_line(tmp_path: Path) -> None:
    (xml := tmp_path / "junit.xml").write_text(TWO_FAILED)
    assert junit(xml) == [
        ("tests/test_x.py::test_a[1]", "no"),
        ("tests/test_x.py::TestC::test_b", "no"),
        ("", None),
    ]


def test_load_lasts_as_long_as_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    started: Any = []
    real = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda *a: started.append(real(*a)) or started[-1])
    with load(2):
        assert [one.poll() for one in started] == [None, None]
    assert all(one.poll() is not None for one in started)


def test_the_files_of_the_short_profile_exist() -> None:
    assert len(FILES) > 10
    assert [name for name in FILES if not (ROOT / name).exists()] == []
    for file, _, test in (name.partition("::") for name in LEFT_OUT):
        assert file in FILES
        assert f"def {test}(" in (ROOT / file).read_text()


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
    xml: str | None = JUNIT,
    printed: str = PRINTED,
) -> list[str]:
    """Return the faults that the study finds in a simulated launch."""
    if xml is not None:
        (folder / "junit.xml").write_text(xml)
    return judged(death, code, seconds, printed, folder)


RAISED_TEXT = f'{CASE}::{END}\nfailed on rank 2 of 3\n  File "case_death.py", line 5\n'
RAISED_TEST = {"death": RAISING, "printed": RAISED_TEXT}
WENT_ON = JUNIT.replace("</testsuite>", f'<testcase name="{AFTER}"/></testsuite>')


@pytest.mark.parametrize(
    ("changes", "faults"),
    [
        ({}, []),
        ({**RAISED_TEST, "xml": WENT_ON}, []),
        (RAISED_TEST, ["the session did not go on"]),
        ({"printed": PRINTED.replace("rank 1 died first", "rank 2 died first")}, ["no rank"]),
        ({"printed": PRINTED.replace(f"{CASE}::{END}", "")}, ["no test"]),
        ({"printed": PRINTED.replace("nprocs=3, n=5", "")}, ["no example"]),
        ({"printed": PRINTED.replace("last place", "")}, ["no stack"]),
        ({"code": 0}, ["exit code 0"]),
        ({"code": None}, ["it had to be shot"]),
        ({"seconds": KILLED.bound + 1}, ["21 s to the end"]),
        ({"seconds": float("nan")}, ["nan s to the end"]),
        ({"xml": JUNIT.replace("<error/>", "")}, ["the test is not red in the JUnit file"]),
        ({"xml": JUNIT.replace(BEFORE, "x")}, ["the test before is not in the JUnit file"]),
        ({"xml": None}, ["no JUnit file"]),
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
    assert_told(
        text,
        "| SIGKILL | 2.5 (≤ 20) |",
        "| SIGKILL | 2.5 (≤ 20) **no rank** |",
        "| place | torchrun |",
        "| thread | 3.0 |",
        "| segv | n=7 | 5 | 40 | as expected |",
    )


def test_every_way_is_of_one_kind_and_every_fault_has_its_command() -> None:
    assert set(SILENT) | set(RAISED) < set(WAYS)
    assert len({*SILENT, *RAISED}) == len(SILENT) + len(RAISED)
    assert {trial.drawn("abort", place, random.Random(place)).in_body for place in PLACES} == {
        True,
        False,
    }
    for fault in (*(one.fault for one in FAULTS), *CRASHES):
        assert ("sp_core.testing.shrink_crash" in trial.command_of(fault)) == (fault in CRASHES)


SUITE = Path(suite_command.__file__).parent
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
        folder = suite_command.place(out, 2, kind, "messages")
        folder.mkdir(parents=True)
        lines = [
            ["An MPI 1.0", "4.1", number],
            *([name, word, "a reason"] for name, word in words.items()),
        ]
        for rank in range(2):
            text = "".join(f"{json.dumps(line)}\n" for line in lines)
            (folder / f"rank{rank}.jsonl").write_text(text)
        (folder / suite_command.ENDED).write_text("this code 0")
    return suite_command.concluded(out, "this code")


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


@pytest.mark.parametrize(
    ("code", "ended", "again"),
    [("this code", 0, 0), ("this code", 1, 20), ("old code", 0, 20)],
)
def test_a_launch_that_ended_well_is_repeated_for_other_code_only(
    tmp_path: Path, substitute: Callable[..., None], code: str, ended: int, again: int
) -> None:
    """The folder has the ranks' results of an earlier launch. They count for this code only."""
    begun = Mock(return_value=(ended, ""))
    substitute(suite_command, fetched=Path, printed=begun, present=lambda: code)
    suite_command.main(["--out", str(tmp_path)])
    first = next(tmp_path.rglob(suite_command.ENDED)).with_name("rank0.old")
    first.touch()
    substitute(suite_command, present=lambda: "this code")
    begun.reset_mock()
    suite_command.main(["--out", str(tmp_path)])
    assert (begun.call_count, first.exists()) == (again, not again)
    assert suite_command.concluded(tmp_path, "other code") == 1
    assert json.loads((tmp_path / "REPORT.json").read_text()) == []


def test_the_digest_of_the_code_is_of_the_library_and_of_the_suite(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(suite_command, "ROOT", tmp_path)
    found = [suite_command.present()]
    for folder in "sp_core/collectives", "tests/mpi4py_suite":
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "a.py").touch()
        found.append(suite_command.present())
        (tmp_path / folder / "a.py").write_text("x = 1")
        found.append(suite_command.present())
    assert len({*found}) == 5


def test_the_report_has_both_mpis_and_names_what_is_not_checked() -> None:
    rows, text = (
        json.loads((SUITE / "REPORT.json").read_text()),
        (SUITE / "REPORT.md").read_text(),
    )
    assert {row["mpi"].split()[0] for row in rows} == {"Open", "MPICH"}
    assert [row["unexplained"] for row in rows] == [[]] * len(rows)
    assert all(row["checked"]["passed"] > 500 for row in rows)
    assert [name for name in (*UNCHECKED, *KNOWN) if f"`{name}`" not in text] == []
