"""One rank of one launch: `mpiexec -n P python -m mpi4py -m benchmarks.worker FOLDER`.

`job.json` in FOLDER names the function that measures, its setting, and the checkout whose sp_core
is measured. Rank 0 writes `record.json`. An exception on any rank ends all of them: `-m mpi4py`
calls `MPI_Abort`.
"""

import importlib
import json
import os
import pkgutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm as Intracomm
else:
    # mpi4py starts MPI when it is imported, which programs that only start ranks must not do
    Intracomm = object

THREADS = 1  # per rank: if one rank used every core, more ranks could not be faster


@dataclass(frozen=True)
class Rank:
    """One rank of a launch: the communicator of all ranks, and the folder where rank 0 reports."""

    world: Intracomm
    folder: Path

    def tell(self, phase: str, done: int = 0, total: int = 0, **more: Any) -> None:
        """Report progress, on rank 0 only; the program that started the ranks shows it."""
        if self.world.rank == 0:
            (self.folder / "progress").write_text(
                json.dumps({"phase": phase, "done": done, "total": total, **more})
            )


def take_library(root: Path) -> None:
    """Import `sp_core` from a checkout; later imports in this process get the same one.

    Raises:
        SystemExit: a different sp_core was imported before, or the folder has none.
    """
    sys.path.insert(0, str(root))
    found = importlib.import_module("sp_core").__file__
    sys.path.pop(0)
    if found is None or Path(found).resolve().parent.parent != root.resolve():
        raise SystemExit(
            f"sp_core of {root} was asked for, {found} was imported. "
            f"Is there a folder sp_core in {root}?"
        )


def main(folder: Path) -> None:
    """Run the job that a folder describes; rank 0 writes the record."""
    job = json.loads((folder / "job.json").read_text())
    take_library(Path(job["root"]))
    os.environ["SP_TUNING"] = "off"  # results must not depend on earlier measurements
    import torch
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    if world.size != job["ranks"]:
        raise SystemExit(
            f"this MPI job has {world.size} ranks, {job['ranks']} were launched: "
            "the launcher belongs to another MPI than mpi4py's."
            " Use the mpiexec beside this Python, or tell srun which one it is (srun --mpi=list)."
        )
    torch.set_num_threads(THREADS)
    torch.set_float32_matmul_precision("highest")  # no TF32
    record = pkgutil.resolve_name(job["measure"])(job["setting"], Rank(world, folder))
    if world.rank == 0:
        (folder / "record.json").write_text(json.dumps(record, allow_nan=False))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
