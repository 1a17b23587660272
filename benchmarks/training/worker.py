"""One launch: `mpiexec -n P python -m mpi4py -m benchmarks.training.worker FOLDER`, with `job.json` in the folder.

Rank 0 writes `progress` while it works, and a file for each mesh as soon as that is done, also where all ranks have raised the same
error; any other exception ends all ranks. A job without meshes is that of one rank: each does it in one of the dtypes.
"""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.training.alone import run_alone
from benchmarks.training.faults import planted
from benchmarks.training.runs import keep, run_place
from benchmarks.training.setting import Place, Setting
from sp_core.agreement import ERRORS


def main(folder: Path) -> None:
    """Do the job that a folder describes."""
    from mpi4py import MPI

    torch.set_num_threads(1)
    job = json.loads((folder / "job.json").read_text())
    setting, out, world = Setting(**job["setting"]), Path(job["out"]), MPI.COMM_WORLD
    if world.size != job["ranks"]:
        raise SystemExit(
            f"this MPI job has {world.size} ranks, {job['ranks']} were launched: another MPI than mpi4py's started it."
        )

    def tell(what: str, done: int, total: int) -> None:
        if world.rank == 0:
            (folder / "progress").write_text(json.dumps({"phase": what, "done": done, "total": total}))

    if not job["places"]:  # each rank by itself
        run_alone(MPI.COMM_SELF, job["dtypes"][world.rank], setting, out, tell)
        return
    for dtype in job["dtypes"]:
        for values in job["places"]:
            place = Place(**values)
            with planted(job["fault"]) if job["fault"] else contextlib.nullcontext():
                record = attempt(world, place, dtype, setting, out, tell)
            if world.rank == 0:
                keep(folder / f"{dtype}-{place.name}.json", record)


def attempt(world: Any, place: Place, *arguments: Any) -> dict[str, Any]:
    """The record of a mesh, also of one that was refused or whose numbers overflowed."""
    try:
        return run_place(world, place, *arguments)
    except ERRORS as error:  # the same one on every rank
        return {"place": place.name, "ranks": world.size, "dtype": arguments[0], "reason": str(error)}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
