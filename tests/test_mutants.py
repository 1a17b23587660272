"""The catalogue answers for every documented bug, and the end of a suite tells of each."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from mutants import __main__ as command, catalogue, generic, trial
from mutants.catalogue import Exclusion, Mutant
from mutants.trial import Ending, Outcome, Stale, judged
from studies.commands import ROOT

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
    files = [name.partition("::")[0] for name in mutant.tests]
    assert [name for name in files if not (ROOT / "tests" / name).exists()] == []


def test_every_known_bug_is_planted_or_excluded() -> None:
    planted, excluded = {mutant.bug for mutant in CATALOGUE}, {x.id for x in EXCLUDED}
    assert planted | excluded == set(catalogue.known())
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
        (Ending(-8, {}, ""), "killed", "the process died"),
        (Ending(1, {}, "worst error over bound: 0.7"), "killed", "the session"),
        (Ending(1, {}, f"{trial.UNENDED}01:00)!"), "killed", "the session"),
        (Ending(2, {}, "ERROR collecting"), "broken", ""),
        (Ending(4, {}, f"ImportError in {SMALL.file}"), "killed", "the session"),
        (Ending(4, {}, "no such option"), "broken", ""),
        (Ending(0, {}, SMALL.file), "survived", ""),
        (Ending(5, {}, ""), "survived", ""),
    ],
)
def test_the_end_of_a_stage_says_what_became_of_the_mutant(
    ending: Ending, verdict: str, law: str
) -> None:
    """A runner that cannot start any test says nothing, unless it names the edited file."""
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
    assert "1 of 2 killed, median time to a kill 7.0 s" in text
    assert "| LSE | 1 of 2 |" in text
    assert "| LSE-9 a title | a source | survived |" in text
    assert "test_mask.py::test_x | 3 | 7 |" in text
    assert all(x.reason in text for x in EXCLUDED)


def test_programs_of_a_copy_run_what_is_planted_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "__main__", generic)
    trial.copy_package(tmp_path)
    place = tmp_path / "tests/test_place.py"
    place.write_text(
        "import __main__\nfrom pathlib import Path\n\n"
        "from studies.commands import ROOT, outside\n\n\n"
        "def test_place():\n    assert __main__\n"
        "    assert Path.cwd() == ROOT\n"
        "    assert outside()['PYTHONPATH'].startswith(str(ROOT / 'tests'))\n"
    )
    ending = trial.run_stage(tmp_path, trial.Stage("near", ["tests/test_place.py"], 60.0))
    assert ending.code == 0, ending.printed
