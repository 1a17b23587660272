"""One rank of one launch: `mpiexec -n 2 python -m mpi4py -m benchmarks.collectives_table.worker FOLDER KIND`.

KIND is "regret", or that of a row. Every contestant is checked before it is
timed, and one that is wrong ends the launch. Rank 0 writes `record.json` into FOLDER.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

import sp_core as sp
from benchmarks.collectives_table import regret
from benchmarks.collectives_table.contestants import CONTESTANTS, Field, Runner, error_of, expected
from benchmarks.collectives_table.rows import heats
from benchmarks.ranks import facts
from sp_core.measuring import interleaved

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

SHARE = 0.3  # seconds for each heat, beside the least number of rounds
LEAST_ROUNDS = 7
EXACT = 2**-16  # of a rounding to bfloat16: float32 sums of two are exact to one rounding of their own


class WrongResult(RuntimeError):
    """A contestant whose result is not the right one."""


def heat(world: Intracomm, mesh: sp.Mesh, op: str, nbytes: int, names: Iterable[str]) -> dict[str, Any]:
    """Check and time contestants."""
    count = nbytes // 4 // (world.size if op == "all_gather" else 1)
    x = torch.randn(count, generator=torch.Generator().manual_seed(world.rank)).bfloat16().float()  # what bf16 is given too
    field = Field(world, mesh, op, x)
    runners: dict[str, Runner] = {}
    for name in names:
        mesh["all"].counters.reset()
        made = CONTESTANTS[name](field)
        if made is not None:
            runners[name] = made
    wanted, errors, scratch = expected(field), {}, {}
    for name, runner in runners.items():
        mesh["all"].counters.reset()
        runner.call()
        errors[name] = max(world.allgather(error_of(runner.result(), wanted)))
        scratch[name] = max(world.allgather(runner.scratch()))
        if errors[name] > (1.0 if name.startswith("bf16") else EXACT):
            raise WrongResult(f"{name}: {op} of {nbytes} bytes is off by {errors[name]:g} roundings to bfloat16")
    gc.collect()
    samples = interleaved(world, {name: runner.call for name, runner in runners.items()}, SHARE, LEAST_ROUNDS)
    return {"samples": samples, "errors": errors, "scratch": scratch}


@contextlib.contextmanager
def gloo(world: Intracomm, folder: Path) -> Iterator[None]:
    """torch.distributed over the same ranks."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{folder / 'gloo'}", rank=world.rank, world_size=world.size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def run(world: Intracomm, folder: Path, kind: str) -> dict[str, Any]:
    """What one launch finds."""
    with sp.Mesh(world, transport="window", tuning="off", check="off", all=world.size) as mesh:
        record = {"kind": kind, **facts(world, mesh.device, mesh["all"].transport.name)}
        if kind == "regret":
            measured = regret.measure(world, mesh["all"])
            cases = regret.judged(measured["bare"], measured["samples"])
            return {**record, "cases": [asdict(case) for case in cases], "summary": regret.summary(cases)}
        with gloo(world, folder) if kind == "default" else contextlib.nullcontext():
            found = {name: heat(world, mesh, *contest) for name, contest in heats(kind).items()}
        return {**record, "heats": found}


def main(folder: Path, kind: str) -> None:
    """Carry out one launch."""
    from mpi4py import MPI

    torch.set_num_threads(1)
    record = run(MPI.COMM_WORLD, folder, kind)
    if MPI.COMM_WORLD.rank == 0:
        (folder / "record.json").write_text(json.dumps(record, allow_nan=False))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
