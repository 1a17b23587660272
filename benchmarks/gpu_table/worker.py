"""One rank of one launch: `mpiexec -n 2 python -m mpi4py -m benchmarks.gpu_table.worker FOLDER KIND MIB`.

All ways to gather take turns in the same processes, and each is checked before it is timed. Beside them stand the rate of the link
between host and device, and what one GPU that several processes share does to a computation that has nothing to send. Rank 0
writes `record.json` into FOLDER.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

import sp_core as sp
from benchmarks.ranks import device as device_of
from benchmarks.ranks import facts
from sp_core.measuring import interleaved

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

TRANSPORTS = {"cuda": ("staged", "pipelined", "ipc", "device"), "cpu": ("host", "window")}
SECONDS, LEAST_ROUNDS = 3.0, 15
SIDE = 2048  # of the matrices of a computation
Call = Callable[[], object]


class WrongResult(RuntimeError):
    """A way to gather whose result is not the right one."""


def gathers(world: Intracomm, x: Tensor, stack: ExitStack, missing: dict[str, str]) -> dict[str, Callable[[], Tensor]]:
    """Ways to gather x of all ranks, and in `missing` why others are not here."""
    found: dict[str, Callable[[], Tensor]] = {"naive": lambda: naive(world, x)}
    for name in TRANSPORTS[x.device.type]:
        try:
            mesh = stack.enter_context(sp.Mesh(world, device=x.device, transport=name, check="off", tuning="off", all=world.size))
        except sp.DeviceError as error:
            missing[name] = str(error)
            continue
        if name in ("ipc", "window") and mesh["all"].window is None:
            missing[name] = mesh["all"].no_window
        else:
            found[name] = sp.plan("all_gather", x, comm=mesh["all"]).run
    return found


def naive(world: Intracomm, x: Tensor) -> Tensor:
    """What a program does that knows of no transport: down, gather, up, each in memory made for it."""
    everything = np.empty(world.size * x.numel(), np.float32)
    world.Allgather(x.cpu().numpy(), everything)
    return torch.from_numpy(everything).to(x.device)


def settled(call: Call, device: torch.device) -> Call:
    """The call, and the device's part of it."""

    def run() -> None:
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return run


def copies(nbytes: int, device: torch.device) -> dict[str, Call]:
    """A copy of so many bytes down and up, through page-locked memory."""
    there = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    here = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    return {"down": lambda: here.copy_(there, non_blocking=True), "up": lambda: there.copy_(here, non_blocking=True)}


def computation(device: torch.device, side: int) -> Call:
    """Something to compute."""
    a = torch.ones(side, side, device=device)
    out = torch.empty_like(a)
    return lambda: torch.mm(a, a, out=out)


def by_one_and_by_all(world: Intracomm, calls: dict[str, Call], seconds: float) -> dict[str, list[float]]:
    """Samples of each call made by rank 0 alone and by all ranks at once."""

    def nothing() -> None:
        pass

    alone = {f"{name}, one rank": call if world.rank == 0 else nothing for name, call in calls.items()}
    return interleaved(world, {**alone, **{f"{name}, all ranks": call for name, call in calls.items()}}, seconds, LEAST_ROUNDS)


def measure(world: Intracomm, device: torch.device, nbytes: int, *, side: int = SIDE, seconds: float = SECONDS) -> dict[str, Any]:
    """Everything that one launch finds.

    Args:
        world: the ranks.
        device: this rank's.
        nbytes: of the gathered vector.
        side: of the matrices of the computation.
        seconds: for each of the two groups of measurements.
    """
    piece = nbytes // 4 // world.size
    x = torch.full((piece,), float(world.rank), device=device)
    wanted = torch.arange(float(world.size)).repeat_interleave(piece)
    missing: dict[str, str] = {}
    with ExitStack() as stack:
        calls = gathers(world, x, stack, missing)
        for name, call in calls.items():
            if not all(world.allgather(torch.equal(call().cpu(), wanted))):
                raise WrongResult(f"{name}: the gathered numbers are not the ones that were sent")
        samples = interleaved(world, dict(_settled(calls.items(), device)), seconds, LEAST_ROUNDS)
    others = {**copies(nbytes, device), "computation": computation(device, side)}
    beside = by_one_and_by_all(world, dict(_settled(others.items(), device)), seconds)
    return {"nbytes": nbytes, "ranks": world.size, "samples": samples, "beside": beside, "missing": missing}


def _settled(calls: Any, device: torch.device) -> Iterator[tuple[str, Call]]:
    for name, call in calls:
        yield name, settled(call, device)


def main(arguments: Sequence[str]) -> None:
    """Carry out one launch."""
    from mpi4py import MPI

    folder, kind, mib = Path(arguments[0]), arguments[1], float(arguments[2])
    torch.set_num_threads(1)
    device = device_of(kind, MPI.COMM_WORLD, share_gpu=True)
    record = {**facts(MPI.COMM_WORLD, device, "all"), **measure(MPI.COMM_WORLD, device, int(mib * 2**20))}
    if MPI.COMM_WORLD.rank == 0:
        (folder / "record.json").write_text(json.dumps(record, allow_nan=False))


if __name__ == "__main__":
    main(sys.argv[1:])
