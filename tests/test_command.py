"""The command line as a whole: its version, and a reader that stops early."""

from __future__ import annotations

import subprocess
import sys

import pytest

import sp_core
from sp_core.__main__ import main

pytestmark = pytest.mark.mpi_skip
PLAN = ("plan", "--seq", "4096", "--ranks", "4", "--heads", "8", "--link", "25gbit,10us")


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"sp_core {sp_core.__version__}\n"


def test_a_reader_may_stop_early() -> None:
    command = subprocess.Popen(
        [sys.executable, "-m", "sp_core", *PLAN], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert command.stdout is not None
    command.stdout.close()
    _, said = command.communicate(timeout=60)
    assert said == b""
