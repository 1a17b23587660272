"""Test that an error which leaves a mesh on one rank ends the waits of the other ranks."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from kit.case_leaving import BEGUN, CASES, outcomes, wanted
from studies.commands import ROOT, outside, printed

import sp_core as sp
from sp_core.launch.command import AS_ROOT, ENVIRONMENT, find_mpiexec
from sp_core.testing import run_threads

pytestmark = pytest.mark.mpi_skip


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", sorted(BEGUN))
def test_a_wait_for_a_rank_that_has_left_ends(name: str, size: int) -> None:
    def body(comm: Any) -> None:
        assert [*outcomes(comm, name)] == wanted(comm)

    run_threads(size, body)


def test_a_wait_after_the_end_of_a_mesh_returns_the_result() -> None:
    def body(comm: Any) -> None:
        with sp.Mesh(comm, sp=2) as mesh:
            pending = sp.all_reduce_start(torch.ones(9), comm=mesh["sp"], algorithm="ring")
        assert torch.equal(pending.wait(), torch.full((9,), 2.0))

    run_threads(2, body)


@pytest.mark.every_mpi
def test_a_wait_for_a_process_that_has_left_ends() -> None:
    case = str(ROOT / "tests" / "kit" / "case_leaving.py")
    command = (find_mpiexec(), "-n", "3", sys.executable, case)
    code, text = printed(command, ROOT, ENVIRONMENT | AS_ROOT | outside(), 120)
    assert code == 0, text
    assert all(f"rank {rank}: {len(CASES)} cases" in text for rank in range(3)), text
