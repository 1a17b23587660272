"""Ranks that torchrun has started over gloo, without mpi4py: laws, FSDP2, and the death of a rank.

`nox -s torchrun` runs the whole files on 2, 3 and 4 processes; here is a sample of each.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from studies.commands import outside, printed
from torch import distributed
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import DeviceMesh

from sp_core.errors import PeerFailed, RankError
from sp_core.transport import groups
from sp_core.transport.groups import GroupComm, communicator_of, over_ranks

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


def test_whatever_torch_calls_a_group_is_a_communicator_of_its_ranks() -> None:
    assert communicator_of(None) is None
    limit, made = timedelta(seconds=33), list[Any]()
    distributed.init_process_group("gloo", timeout=limit, store=HashStore(), rank=0, world_size=1)
    try:
        for given in (None, distributed.group.WORLD, DeviceMesh("cpu", torch.tensor([[0]]))):
            made.append(communicator_of(given))
            assert (made[-1].rank, made[-1].size, made[-1].allgather(7)) == (0, 1, [7])
        assert communicator_of(object()) is None
        with pytest.raises(RankError, match=r"rank 0 is not one of the ranks \[1\] of"):
            over_ranks([1], limit)
    finally:
        distributed.destroy_process_group()
    assert [comm._limit for comm in made] == [limit, limit, distributed.default_pg_timeout]
    assert len({comm._name for comm in made}) == 3


def test_a_rank_that_waits_looks_ten_times_a_second_for_one_that_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, states = [5.0], {11: ["S", "1"], 12: ["R"]}
    monkeypatch.setattr(groups, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(groups, "stat", states.__getitem__)
    comm = GroupComm(HashStore(), "all", 0, 1, timedelta(seconds=30))
    vars(comm)["_near"] = {1: 11, 2: 12}
    comm.watch("a call")
    for state in (["Z", "1"], ["X"], []):
        states[12] = state
        now[0] += 0.09
        comm.watch("a call")
        now[0] += 0.02
        with pytest.raises(PeerFailed, match="a call cannot end: rank 2 has died"):
            comm.watch("a call")
    for comm.rank in (3, 4):
        comm.abandoned()
    now[0] += 0.11
    with pytest.raises(PeerFailed, match="a call cannot end: rank 3 has left"):
        comm.watch("a call")


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
