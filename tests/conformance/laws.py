"""Test the property of every capability, for the libraries of one adapter under mpiexec.

`conformance.launching` starts it. SP_CONFORMANCE names a file with the setting. The verdict of each
cell of the report becomes a line of JSON. Before, the cell and the problem that is tried next stand
in a file: the runner then knows the cell that a launch died of.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from studies.records import add_line

from conformance.gloo import Gloo
from conformance.libraries import named
from conformance.planted import FAULTS
from conformance.trial import CELL_SECONDS, Trial, judged

SETTING: dict[str, Any] = json.loads(Path(os.environ["SP_CONFORMANCE"]).read_text())
FOLDER = Path(SETTING["folder"])
RIGHT_GRADIENTS: set[str] = set(SETTING["right_gradients"])


@pytest.fixture(scope="module")
def gloo() -> Gloo:
    """The process group of this launch."""
    from mpi4py import MPI

    torch.set_num_threads(1)
    longest = max(named(name).patience for name, _ in SETTING["cells"])
    return Gloo(FOLDER, MPI.COMM_WORLD, longest * SETTING["patience"])


@pytest.mark.ranks
@pytest.mark.parametrize(("name", "capability"), SETTING["cells"])
def test_cell(gloo: Gloo, name: str, capability: str) -> None:
    """Ask for gradients if the plain ones are right: a fault of backward shows in one cell."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    library = named(name)
    subject = library.subject
    gradients = capability == "backward" or (
        name in RIGHT_GRADIENTS and capability not in subject.FORWARD_ONLY
    )
    cell = {"library": name, "capability": capability, "ranks": world.size, "gradients": gradients}

    def announce(problem: dict[str, Any]) -> None:
        told = cell | {"problem": problem} if problem else cell
        (FOLDER / "in_flight.json").write_text(json.dumps(told))

    if world.rank == 0:
        announce({})
    adapter = library.module()
    for number in SETTING["planted"]:
        FAULTS[number].plant()
    gloo.serve(lambda comm: adapter.prepare(comm, library.variant))
    masked = "full" in library.excluded()
    strategy = subject.problems(capability, world.size, library.needs, gradients, not masked)
    trial = Trial(
        subject, adapter, library.variant, gloo.renew, announce, CELL_SECONDS * SETTING["patience"]
    )
    found = judged(trial, strategy, world.size, SETTING["examples"])
    if capability == "backward" and found["verdict"] == "pass":
        RIGHT_GRADIENTS.add(name)
    if world.rank == 0:
        add_line(FOLDER / "verdicts.jsonl", {**cell, **found})
