"""Test that the program in the README runs."""

import os
import re
import sys
from pathlib import Path

import pytest
from studies.commands import ROOT, output_of

pytestmark = [pytest.mark.mpi_skip, pytest.mark.starts_mpi, pytest.mark.every_mpi]


def test_the_program_runs_on_two_ranks(tmp_path: Path) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len(program.strip().splitlines()) <= 25
    (tmp_path / "program.py").write_text(program)
    start = [sys.executable, "-m", "sp_core.testing.launch", "-n", "2", "--timeout", "60", "--"]
    text = output_of([*start, sys.executable, "program.py"], tmp_path, os.environ, 90)
    assert "largest difference from one device" in text
