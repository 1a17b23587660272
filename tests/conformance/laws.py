"""Test the property of every capability, for the libraries of one adapter under mpiexec.

`conformance.launching` starts this file. SP_CONFORMANCE is the path of a JSON file with the
settings. Each test tries one cell of the report, which is one capability of one library, and adds
its verdict as a line of JSON. Before a problem is tried, a file gets the cell and the problem. If
the launch dies, the runner reads there which cell was tried last.
"""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from mpi4py import MPI
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
    """Return the process group of this launch."""
    torch.set_num_threads(1)
    longest = max(named(name).patience for name, _ in SETTING["cells"])
    return Gloo(FOLDER, MPI.COMM_WORLD, longest * SETTING["patience"])


@pytest.mark.ranks
@pytest.mark.parametrize(("name", "capability"), SETTING["cells"])
def test_cell(gloo: Gloo, name: str, capability: str) -> None:
    """Compute gradients only if "backward" passed, so that its fault shows in one cell alone."""
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

    def renew(comm: Any) -> None:
        gloo.renew(comm)
        adapter.prepare(comm, library.variant)

    if world.rank == 0:
        announce({})
    adapter = library.module()
    for number in SETTING["planted"]:
        FAULTS[number].plant()
    adapter.prepare(world, library.variant)
    masked = "full" in library.excluded()
    strategy = subject.problems(capability, world.size, library.needs, gradients, not masked)
    trial = Trial(
        subject, adapter, library.variant, renew, announce, CELL_SECONDS * SETTING["patience"]
    )
    found = judged(trial, strategy, world.size, SETTING["examples"])
    if capability == "backward" and found["verdict"] == "pass":
        RIGHT_GRADIENTS.add(name)
    if world.rank == 0:
        add_line(FOLDER / "verdicts.jsonl", {**cell, **found})
