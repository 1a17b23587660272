"""Test the repeated suite: it names the seed of a failure, also if it is interrupted."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from soak import __main__ as command, runs as runs_module
from soak.laws import FILES, LEFT_OUT
from soak.runs import Run, carried_out, load
from studies.commands import RANKS, ROOT
from studies.records import junit

CASE = "tests/kit/case_soak.py"
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
    ended = carried_out(Run("idle", 0, 7), [CASE], ["threads"], tmp_path)
    (failure,) = ended["failures"]
    assert ended["verdict"] == "failed"
    assert failure["test"] == f"{CASE}::test_likes_its_seed"
    assert "not this seed" in failure["words"]
    assert (
        failure["command"]
        == f'SP_PROFILE=soak python -m pytest --hypothesis-seed=7 "{CASE}::test_likes_its_seed"'
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

    monkeypatch.setattr(command, "carried_out", run)
    return asked


def test_the_report_of_a_soak_names_what_failed_even_if_it_is_interrupted(
    tmp_path: Path, made_up: list[Run], capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--runs", "3", "--loaded", "2", "--seed", "11", "--out", str(tmp_path)]
    with pytest.raises(KeyboardInterrupt):
        command.main(arguments)
    assert "1 of 1 runs passed with a busy" in (tmp_path / "soak.md").read_text()
    assert command.main(arguments) == 1
    assert [run[:2] for run in made_up[5:]] == [
        *(("idle", n) for n in range(3)),
        *(("loaded", n) for n in range(2)),
    ]
    assert len({run.seed for run in made_up}) == 5
    text = (tmp_path / "soak.md").read_text()
    assert "2 of 3 runs passed with nothing of their own beside them; median 61 s" in text
    assert "2 of 2 runs passed with a busy process on each core" in text
    assert f"seed {made_up[2].seed}, {BAD['test']}: {BAD['words']}" in text
    assert BAD["command"] in text
    assert f"  ranks: {BAD['test']}: {BAD['words']}" in capsys.readouterr().out
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
    ended = carried_out(Run("idle", 0, 7), [CASE], ["ranks"], tmp_path)
    assert ended["verdict"] == "failed"
    (failure,) = ended["failures"]
    launch = f"python -m sp_core.testing.launch -n {RANKS} -- python -m pytest"
    assert failure["command"] == f'SP_PROFILE=soak {launch} --only-mpi --hypothesis-seed=7 "{CASE}"'


JUNIT = """
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
    (xml := tmp_path / "junit.xml").write_text(JUNIT)
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
