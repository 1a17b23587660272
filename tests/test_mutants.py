"""Test the catalogue of planted faults: it covers every known bug, and each trial has a verdict."""

import re
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
from kit.failing import assert_told
from mutants import __main__ as command, catalogue, trial
from mutants.catalogue import Exclusion, Mutant
from mutants.trial import Ending, Outcome, Stale, judged
from studies import commands
from studies.commands import ROOT, copied, refused

from benchmarks.launching import INTERRUPTED

CATALOGUE = catalogue.mutants()
EXCLUDED = catalogue.exclusions()
SMALL = Mutant(
    "LSE-0/x",
    "a title",
    "a source",
    "a symptom",
    "sp_core/errors.py",
    "abc",
    "d",
    ("test_errors.py",),
    "LSE",
)
TOLD = {"law": "tests/test_mask.py::test_x", "examples": 3, "words": "it is wrong"}
TEXTS = {
    path.relative_to(ROOT).as_posix(): path.read_text() for path in (ROOT / "sp_core").rglob("*.py")
}


@pytest.mark.parametrize("mutant", CATALOGUE, ids=lambda mutant: mutant.id)
def test_a_mutant_has_its_place_and_is_a_program(mutant: Mutant) -> None:
    compile(mutant.planted(TEXTS[mutant.file]), mutant.file, "exec")
    assert mutant.old != mutant.new
    assert mutant.tests
    for name in mutant.tests:
        file, _, test = name.partition("[")[0].partition("::")
        text = (ROOT / "tests" / file).read_text()
        assert not test or f"def {test}(" in text, f"{name} is not there: name the test of today"


def test_every_known_bug_is_planted_or_excluded() -> None:
    planted, excluded = {mutant.bug for mutant in CATALOGUE}, {x.id for x in EXCLUDED}
    what_to_do = "write each number of a bug into mutants/known.txt, or plant or exclude it"
    assert planted | excluded == set(catalogue.known()), what_to_do
    assert not planted & excluded
    assert len({mutant.id for mutant in CATALOGUE}) == len(CATALOGUE)
    assert len(set(catalogue.known())) == len(catalogue.known())


@pytest.mark.parametrize("exclusion", EXCLUDED, ids=lambda exclusion: exclusion.id)
def test_what_is_excluded_is_not_there(exclusion: Exclusion) -> None:
    assert exclusion.absent
    assert {
        path
        for path, text in TEXTS.items()
        for x in exclusion.absent
        if re.search(x, text, re.IGNORECASE)
    } == set()


def test_a_text_that_is_not_there_once_is_stale() -> None:
    assert SMALL.planted("1 abc 2") == "1 d 2"
    for text in ("", "abc abc"):
        with pytest.raises(Stale, match="LSE-0/x"):
            SMALL.planted(text)


@pytest.mark.parametrize(
    ("ending", "verdict", "law"),
    [
        (Ending(1, TOLD, ""), "killed", TOLD["law"]),
        (Ending(None, TOLD, trial.TIME_IS_UP), "killed", TOLD["law"]),
        (Ending(None, {}, ""), "hung", ""),
        (Ending(1, {}, f"{trial.ENDED}{trial.TIME_IS_UP} after 9 s ====\n"), "hung", ""),
        (Ending(1, {}, f"==== {trial.ENDED}a rank ... ====\n"), "killed", "the launcher"),
        (Ending(136, {}, ""), "killed", "the process died"),
        *((Ending(code, {}, ""), "broken", "") for code in (128, 160, 255)),  # of no signal
        (Ending(255, {}, SMALL.file), "killed", "the session"),
        (Ending(1, {}, "worst error over bound: 0.7"), "killed", "the session"),
        (Ending(1, {}, f"{trial.UNENDED}01:00)!"), "killed", "the session"),
        (Ending(2, {}, "ERROR collecting"), "broken", ""),
        (Ending(3, {}, "the ranks are at different points"), "killed", "the session"),
        (Ending(4, {}, f"ImportError in {SMALL.file}"), "killed", "the session"),
        (Ending(4, {}, "no such option"), "broken", ""),
        (Ending(0, {}, SMALL.file), "survived", ""),
        (Ending(5, {}, ""), "survived", ""),
    ],
)
def test_the_end_of_a_stage_says_what_became_of_the_mutant(
    ending: Ending, verdict: str, law: str
) -> None:
    """If no test can start, the verdict is "broken", unless the output names the edited file."""
    outcome = judged("threads", ending, SMALL.file)
    assert (outcome.verdict, outcome.stage, outcome.law) == (verdict, "threads", law)


def test_mutants_are_chosen_by_class_bug_and_id() -> None:
    some = [SMALL, replace(SMALL, id="MASK-1")]
    assert command.selected(some, []) == some
    for name in ("LSE", "LSE-0", "LSE-0/x"):
        assert command.selected(some, [name]) == some[:1]
    assert command.selected(some, ["LS"]) == []


def test_a_report_counts_by_class_and_names_survivors() -> None:
    killed = Outcome("killed", "chosen", str(TOLD["law"]), 3, 7.0, "wrong")
    survived = Outcome("survived", "chosen", seconds=99.0)
    results = [(SMALL, killed), (replace(SMALL, id="LSE-9"), survived)]
    text = "\n".join(command.markdown(results, EXCLUDED))
    assert_told(
        text,
        "1 of 2 killed, median time to a kill 7.0 s",
        "| LSE | 1 of 2 |",
        "| LSE-9 a title | a source | survived |",
        "test_mask.py::test_x | 3 | 7 |",
        *(x.reason for x in EXCLUDED),
    )


@pytest.mark.parametrize(
    ("apart", "told"),
    [
        (("sh", "-c", "echo unshare failed; exit 1"), "unshare failed"),
        (("no-such-program",), "[Errno 2] No such file or directory: 'no-such-program'"),
        (("false",), "false: exit code 1, no output"),
    ],
)
def test_nothing_is_tried_where_no_process_can_be_started_apart(
    apart: tuple[str, ...],
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    """Otherwise each mutant would count as killed, because its tests end with an error."""
    monkeypatch.setattr(commands, "APART", apart)
    monkeypatch.setattr(command, "tried", pytest.fail)
    assert command.main(["--only", "LSE", "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith(f"nox -s mutants --: {told}\nTo try mutants")
    assert [*tmp_path.iterdir()] == []


def test_the_report_of_an_interrupted_run_has_what_was_tried(
    substitute: Callable[..., None], tmp_path: Path
) -> None:
    """An interruption before the first result leaves the last report as it was."""
    ended = [*[Outcome("survived")] * 2, KeyboardInterrupt]
    one, other = SMALL, replace(SMALL, id="LSE-1/x", title="another title")
    for results in ended, ended[1:]:
        tried = Mock(side_effect=results)
        substitute(command, refused=str, mutants=lambda: [one, other], tried=tried)
        assert command.main(["--out", str(tmp_path)]) == INTERRUPTED
    text = (tmp_path / "mutants.md").read_text()
    assert (one.title in text, other.title in text) == (True, False)


BODIES = """
import os, time
from pathlib import Path
from studies.commands import ROOT, outside
def test_alone(): assert len([*filter(str.isdigit, os.listdir("/proc"))]) == 2  # with the shell
def test_place():
    assert Path.cwd() == ROOT
    assert outside()["PYTHONPATH"].startswith(str(ROOT / "tests"))
def test_red(): assert False
def test_dead(): os.abort()
def test_stuck(): time.sleep(99)
"""


def test_tests_run_in_a_copy_apart_and_in_order_until_one_is_red_dead_or_stuck(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if problem := refused():
        pytest.skip(problem)
    monkeypatch.setattr(trial, "MORE_SECONDS", 9.0)
    file, found = "tests/test_order.py", []
    with copied() as copy:
        (copy / file).write_text(BODIES)
        for names in ("place", "gone", "alone", "red", "dead"), ("dead", "red"), ("stuck",):
            tests = [f"{file}::test_{name}" for name in names]
            seconds = 0.0 if names == ("stuck",) else 60.0
            ending = trial.run_stage(copy, trial.Stage("near", [file], seconds, tests))
            found.append((ending.code, ending.told.get("law")))
            (copy / "near.json").unlink(missing_ok=True)
    assert found == [(1, f"{file}::test_red"), (128 + signal.SIGABRT, None), (None, None)]
