"""Test ranks that torchrun has started over gloo, without mpi4py: laws, FSDP2, death of a rank.

`nox -s torchrun` runs the whole files on 2, 3 and 4 processes. This file runs a sample of each.
"""

import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
from studies.commands import outside, printed

pytestmark = pytest.mark.mpi_skip
TESTS = Path(__file__).parent
FILES = (
    "test_schemes.py::test_a_scheme_gives_what_one_device_gives",
    "test_errors.py::test_what_is_wrong_on_one_rank_of_a_grid_is_raised_on_all",
    "test_errors.py::test_a_freed_communicator",
    "test_mesh.py::test_lengths_and_nodes_are_those_of_ranks_in_another_order_of_axes",
    "kit/case_torchrun.py",
)
"""Tests of laws, with few examples, and tests of features that only these processes have."""


def variables() -> dict[str, str]:
    """Return the environment of new processes, which are not ranks of this process's launch."""
    return outside(PYTHONHASHSEED="0", RES_OPTIONS="timeout:1", SP_PROFILE="brief")


def test_the_laws_hold_over_gloo_without_mpi4py() -> None:
    agent = ("-m", "torch.distributed.run", "--nproc-per-node", "4")
    plugins = ("-p", "kit.torchrun", "-p", "no:cacheprovider", "-p", "no:benchmark")
    options = ("--hypothesis-seed=1", "-q", "-x", "-c", str(TESTS.parent / "pyproject.toml"))
    command = [sys.executable, *agent, "-m", "pytest", *plugins, *options, *FILES]
    code, output = printed(command, TESTS, variables(), 240)
    assert (code, output.count(" passed in ")) == (0, 4), output
    assert "skipped" not in output


def test_a_rank_that_is_lost_is_an_error_on_all_others(tmp_path: Path) -> None:
    """No launcher ends these processes. The survivors get the error in a call that waits."""
    command = (sys.executable, str(TESTS / "kit" / "case_group_death.py"))
    (tmp_path / "store").mkdir()
    with ExitStack() as stack:
        processes = [
            stack.enter_context(
                subprocess.Popen([*command, number, "4", tmp_path], env=variables())
            )
            for number in "0123"
        ]
        for process in processes:
            stack.callback(process.kill)
        codes = [process.wait(timeout=120) for process in processes]
    assert codes == [0, 3, -signal.SIGKILL, 0]  # process 2 is rank 1 of the last group
    ranks = {"ring": "0123", "fence": "0123", "gloo": "023", "window": "03"}
    expected = {f"{name}.{number}": "PeerFailed" for name in ranks for number in ranks[name]}
    expected |= {"ring.1": "KeyError", "fence.1": "KeyError"}
    assert {path.name: path.read_text() for path in tmp_path.glob("*.[0-9]")} == expected
