"""Test that the example project passes, and that a planted bug is reported as its README shows."""

import importlib
import shutil
import sys
from pathlib import Path

import pytest
from studies.commands import ROOT, output_of, outside

pytestmark = pytest.mark.mpi_skip  # starts a session of its own

PROJECT = ROOT / "tests" / "example_project"
LOOP, SHORT = "range(comm.size - 1)", "range(min(comm.size - 1, 1))"


@pytest.mark.parametrize(
    "name",
    ["every_rank_gets_the_sum", "its_backward_pass_is_itself", "ranks_that_disagree_are_told_so"],
)
def test_the_project_passes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(PROJECT))
    vars(importlib.import_module("test_ring_sum"))[f"test_{name}"]()


def test_a_planted_bug_is_found_and_looks_as_the_readme_says(tmp_path: Path) -> None:
    copy = tmp_path / "project"
    shutil.copytree(PROJECT, copy, ignore=shutil.ignore_patterns("__pycache__"))
    text = (copy / "ring_sum.py").read_text()
    assert text.count(LOOP) == 1
    (copy / "ring_sum.py").write_text(text.replace(LOOP, SHORT))
    options = ("-q", "--color=no", "-p", "no:cacheprovider")
    variables = outside(SP_PROFILE="quick", PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1")
    command = [sys.executable, "-m", "pytest", *options, "-k", "every_rank_gets_the_sum"]
    text = output_of(command, copy, variables, 100, {1})
    assert "@example(nprocs=3, n=1, seed=0)" in text
    said = [
        line.strip()
        for line in (PROJECT / "README.md").read_text().partition(SHORT)[2].splitlines()[1:]
        if line.strip()
    ]
    assert len(said) > 5
    assert [line for line in said if line not in text] == []
