"""One rank of one launch: `mpiexec ... python -m mpi4py -m benchmarks.netlab.worker FOLDER`.

FOLDER holds `setting.json`. Rank 0 writes `record.json`. An exception on any rank ends all of them: `-m mpi4py` calls `MPI_Abort`.
"""

from __future__ import annotations

import gc
import json
import socket
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import sp_core as sp
from benchmarks.machine import environment
from benchmarks.netlab import contests
from benchmarks.netlab.clock import sample
from benchmarks.netlab.setting import Setting
from sp_core.schedules import ALGORITHMS
from tests.oracle.collective_cases import Case

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

STREAM = "stream"


def run(setting: Setting, world: Intracomm) -> dict[str, Any]:
    """What the setting asks for; the same on every rank."""
    make = partial(sp.Mesh, world, hosts=setting.hosts, ranks=setting.per_host)
    carrier = contests.transport(setting)
    usual = "ring" if setting.modelled else "auto"  # the model carries no collective of the library
    with (
        make(transport=carrier) as mesh,
        make(check="off", transport=carrier, algorithm=usual) as quick,
        make(check="off") as idle,
    ):
        if setting.kind == "check":
            return {"checked": check_all(mesh["hosts", "ranks"], library=not setting.modelled)}
        steps = contests.all_reduces(setting, quick) if setting.kind == "all_reduce" else contests.overlaps(world, quick, idle)
        if setting.modelled:
            stream = [contests.STREAM_BYTES * 8 / setting.wire.rate] * setting.rounds
            return {"seconds": {STREAM: stream, **rounds(setting, world, steps)}}
        return {"seconds": rounds(setting, world, {STREAM: contests.Stream(world, _address(world)), **steps})}


def check_all(comm: sp.Communicator, *, library: bool) -> int:
    """Every collective by every algorithm against its definition; how many there were."""
    absent = (*(() if library else ("auto", "mpi")), *(("window",) if comm.window is None else ()))
    chosen = [(op, name) for op, names in ALGORITHMS.items() for name in names if name not in absent]
    for number, (op, algorithm) in enumerate(chosen):
        case = Case(op, 0, 1, "float32", "plain", 1, True, False, number, algorithm)
        inputs = case.inputs(comm.size)
        contests.check(f"{op} by {algorithm}", case.call(inputs[comm.rank], comm), case.expected(inputs, comm.rank, comm.size))
    return len(chosen)


def rounds(setting: Setting, world: Intracomm, steps: dict[str, contests.Step]) -> dict[str, list[float]]:
    """Samples of all contestants, who take turns; the first round only warms up."""
    found: dict[str, list[float]] = {name: [] for name in steps}
    gc.disable()
    for number in range(setting.rounds + 1):
        for name, step in steps.items():
            seconds = sample(world, step)
            if number:
                found[name].append(seconds)
    return found


def _address(world: Intracomm) -> str:
    """Where rank 0 listens."""
    found: str = world.bcast(socket.gethostbyname(socket.gethostname()))
    return found


def main(folder: Path) -> None:
    """One rank, from setting to record."""
    from mpi4py import MPI

    torch.set_num_threads(1)
    setting, world = Setting.load(folder), MPI.COMM_WORLD
    hosts = sorted(set(world.allgather(socket.gethostname())))
    record = {"mpi": MPI.Get_library_version().splitlines()[0].strip("\0 "), "env": environment(), "hosts": hosts}
    record |= run(setting, world)
    if world.rank == 0:
        (folder / "record.json").write_text(json.dumps(record))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
