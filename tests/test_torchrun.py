"""Ranks that torchrun has started over gloo, without mpi4py: laws, FSDP2, and the death of a rank.

`nox -s torchrun` runs the whole files on 2, 3 and 4 processes; here is a sample of each.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
from studies.commands import outside, printed

pytestmark = pytest.mark.mpi_skip
TESTS = Path(__file__).parent
KIT = TESTS / "kit"
SECONDS = 120
LAWS = (
    "test_schemes.py::test_a_scheme_gives_what_one_device_gives",
    "test_errors.py",
)
"""Of each a few examples; `kit/case_torchrun.py` has what only such processes have."""


def variables() -> dict[str, str]:
    """The environment of processes that are no ranks of another launch."""
    return outside(PYTHONHASHSEED="0", RES_OPTIONS="timeout:1", SP_PROFILE="brief")


def torchrun(processes: int, *pytest_args: str) -> tuple[int | None, str]:
    """Run pytest on so many processes. Return the exit code and what they have printed."""
    agent = ("-m", "torch.distributed.run", "--nproc-per-node", str(processes))
    plugins = ("-p", "kit.torchrun", "-p", "no:cacheprovider", "-p", "no:benchmark")
    options = ("--hypothesis-seed=1", "-q", "-x", "-c", str(TESTS.parent / "pyproject.toml"))
    command = [sys.executable, *agent, "-m", "pytest", *plugins, *options, *pytest_args]
    return printed(command, TESTS, variables(), SECONDS)


@pytest.mark.parametrize(
    ("processes", "files"), [(4, LAWS), (4, ("kit/case_torchrun.py",))], ids=["laws", "groups"]
)
def test_the_laws_hold_over_gloo_without_mpi4py(processes: int, files: tuple[str, ...]) -> None:
    code, output = torchrun(processes, *files)
    assert (code, output.count(" passed in ")) == (0, processes), output
    assert "skipped" not in output


LOSSES = (("exit", "gloo"), ("kill", "window"), ("error", "ring"), ("error", "fence"))
"""Ways to lose rank 1, and the call in which the others wait for it."""


@pytest.mark.parametrize(("way", "call"), LOSSES)
def test_a_rank_that_is_lost_is_an_error_on_all_others(way: str, call: str, tmp_path: Path) -> None:
    """Nobody ends these processes from outside, and the survivors wait for each other."""
    command = (sys.executable, str(KIT / "case_group_death.py"))
    with ExitStack() as stack:
        ranks = []
        for rank in range(3):
            arguments = (*command, str(rank), "3", str(tmp_path / "store"), way, call)
            process = stack.enter_context(subprocess.Popen(arguments, env=variables()))
            stack.callback(process.kill)
            ranks.append(process)
        codes = [process.wait(timeout=60) for process in ranks]
    assert codes == [0, {"exit": 3, "kill": -signal.SIGKILL, "error": 0}[way], 0]
    told = {path.suffix: path.read_text().split(":")[0] for path in tmp_path.glob("*.[0-9]")}
    lost = {".1": "KeyError"} if way == "error" else {}
    assert told == {".0": "PeerFailed", ".2": "PeerFailed"} | lost
