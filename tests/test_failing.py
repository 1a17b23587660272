"""An error that ends the program of one rank ends all ranks; the report names rank and cause."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from sp_core.launch.command import AS_ROOT, ENVIRONMENT, find_mpiexec

pytestmark = [pytest.mark.mpi_skip, pytest.mark.starts_mpi]
ROOT = Path(__file__).parents[1]
CASE = str(ROOT / "tests" / "kit" / "case_failing.py")
SECONDS = 40
"""A bound for the whole launch on a loaded machine; without the hook a launch never ends."""


def ended(*command: str) -> tuple[int, str]:
    """Run a launch to its end. After the bound it is killed, which is an error."""
    names = [name for name in os.environ if name.startswith(("SP_", "PYTEST_"))]
    kept = {name: value for name, value in os.environ.items() if name not in names}
    environment = ENVIRONMENT | AS_ROOT | kept | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        printed, _ = process.communicate(timeout=SECONDS)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, printed


def on_three_ranks(way: str) -> tuple[int, str]:
    """Let rank 1 of three fail in some way under plain mpiexec."""
    return ended(find_mpiexec(), "-n", "3", sys.executable, CASE, way)


@pytest.mark.parametrize("way", ["before", "backward", "started", "thread", "behind"])
def test_an_error_on_one_rank_ends_all(way: str) -> None:
    code, printed = on_three_ranks(way)
    assert code != 0
    assert "rank 1 of 3: this error ends all ranks." in printed
    assert printed.count("LookupError: this rank is lost\n") == 1, printed


def test_the_exit_code_of_one_rank_is_that_of_the_job() -> None:
    code, printed = on_three_ranks("exit")
    assert (code, "sys.exit(3) has left a mesh: it ends all ranks." in printed) == (3, True), (
        printed
    )


def test_an_error_that_all_ranks_raise_is_printed_by_one() -> None:
    code, printed = on_three_ranks("agreed")
    assert code != 0
    assert printed.count("Traceback (most recent call last)") == 1, printed
    for rank in (1, 2):
        assert f"rank {rank} of 3: CollectiveMismatch: the ranks disagree" in printed


def test_an_error_that_is_caught_ends_nothing() -> None:
    assert on_three_ranks("caught")[0] == 0
