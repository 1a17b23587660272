"""Time AllGather between ranks that share a GPU: naive, and over each transport for a GPU.

All implementations take turns in the same processes, and each is checked before it is timed. Beside
them stand the rate of the link between host and device, the same gather by MPI in host memory, and
the cost of sharing one GPU for a computation that sends nothing. Exit code: 0 whatever the times, 1
if a result was wrong or a launch failed, 2 for options that cannot be run.
"""

import argparse
import statistics
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

import sp_core as sp
from benchmarks.cases.case import wait_for
from benchmarks.contests.contest import Contest, Entry, Part, at_least
from benchmarks.launching import Record, about, numbers_of_ranks
from benchmarks.machine import device as device_of, facts
from benchmarks.reporting.tables import make
from benchmarks.statistics import WITHIN, Requirement, exact_interval, ratio
from benchmarks.worker import Intracomm, Rank
from sp_core.measuring import interleaved

ON_GPU, ON_CPU = ("staged", "pipelined", "pinned", "ipc", "device"), ("host", "window")
SECONDS, LEAST_ROUNDS = 3.0, 15
SIDE = 2048  # of the matrices of a computation
GATHER = "gather in host memory"
Call = Callable[[], object]


def gathers(
    world: Intracomm, x: Tensor, stack: ExitStack, missing: dict[str, str]
) -> dict[str, Callable[[], Tensor]]:
    """Return calls that gather all ranks' x, by transport; add the absent ones to `missing`."""
    found: dict[str, Callable[[], Tensor]] = {"naive": lambda: naive(world, x)}
    for name in ON_CPU if x.device.type == "cpu" else ON_GPU:
        quick: Any = {"check": "off", "tuning": "off", "all": world.size}
        try:
            mesh = stack.enter_context(sp.Mesh(world, device=x.device, transport=name, **quick))
        except sp.DeviceError as error:
            missing[name] = str(error)
            continue
        if name in ("pinned", "ipc", "window") and mesh["all"].window is None:
            missing[name] = mesh["all"].no_window
        else:
            found[name] = sp.plan("all_gather", x, comm=mesh["all"]).run
    return found


def naive(world: Intracomm, x: Tensor) -> Tensor:
    """Gather without sp_core: copy to the host, gather by MPI, copy back, each into new memory."""
    everything = np.empty(world.size * x.numel(), np.float32)
    world.Allgather(x.cpu().numpy(), everything)
    return torch.from_numpy(everything).to(x.device)


def beside(world: Intracomm, nbytes: int, side: int, device: torch.device) -> dict[str, Call]:
    """Return calls that copy `nbytes` or compute, each on rank 0 alone and on all ranks.

    The copies to the host (down) and back (up) use page-locked memory. The last call gathers
    `nbytes` by MPI, between buffers in host memory.
    """
    there = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    here = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=device.type != "cpu")
    a = torch.ones(side, side, device=device)
    calls: dict[str, Call] = {
        "down": lambda: here.copy_(there, non_blocking=True),
        "up": lambda: there.copy_(here, non_blocking=True),
        "computation": lambda: torch.mm(a, a),
    }
    alone = {f"{n}, one rank": f if world.rank == 0 else int for n, f in calls.items()}
    together = {f"{name}, all ranks": call for name, call in calls.items()}
    piece = np.zeros(nbytes // world.size, np.uint8)
    return {**alone, **together, GATHER: partial(world.Allgather, piece, piece.repeat(world.size))}


def finish(call: Call, device: torch.device) -> None:
    """Run a call, and wait until the device has finished it."""
    call()
    wait_for(device)


def measured(
    world: Intracomm,
    device: torch.device,
    nbytes: int,
    *,
    side: int = SIDE,
    seconds: float = SECONDS,
) -> Record:
    """Return the samples of all gathers and of the calls of `beside`, and the missing transports.

    Args:
        world: all ranks.
        device: this rank's device.
        nbytes: bytes of the gathered vector.
        side: rows and columns of the matrices of the computation.
        seconds: the time for each of the two groups of measurements.
    """
    piece = nbytes // 4 // world.size
    x = torch.full((piece,), float(world.rank), device=device)
    wanted = torch.arange(float(world.size)).repeat_interleave(piece)
    missing: dict[str, str] = {}

    def timed(calls: dict[str, Any]) -> dict[str, list[float]]:
        whole: dict[str, Call] = {n: partial(finish, call, device) for n, call in calls.items()}
        return interleaved(world, whole, seconds, LEAST_ROUNDS)

    with ExitStack() as stack:
        calls = gathers(world, x, stack, missing)
        for name, call in calls.items():
            if not all(world.allgather(torch.equal(call().cpu(), wanted))):
                raise RuntimeError(f"{name}: the gathered numbers are not the ones that were sent")
        samples = timed(calls)
    others = timed(beside(world, nbytes, side, device))
    found = {"samples": samples, "beside": others, "missing": missing}
    return {"nbytes": nbytes, "ranks": world.size, **found}


def measure(setting: Record, rank: Rank) -> Record:
    """Run one launch, and return its record."""
    device = device_of(setting["kind"], rank.world, share_gpu=True)
    found = measured(rank.world, device, int(setting["mib"] * 2**20))
    return {**facts(rank.world, device, "all"), **found}


STAGED = "pipelined"
"""The transport that the requirements call staged: through page-locked memory, in chunks."""

MILLISECONDS, SHARE, TIMES = 1.0, 0.7, 5.0
"""Required of staging: at most these ms at P = 2, and this share of the link's rate at P = 4.

`ipc` must be this many times as fast as staging.
"""

COLUMNS = ("way", "P", "ms", "of the link's rate", "times as quick as pipelined", "")


def rows(launch: Record, *, on_gpu: bool) -> Iterator[tuple[str, ...]]:
    """Yield the cells of each gather; figures are medians over rounds with exact intervals."""
    samples, ranks = launch["samples"], launch["ranks"]
    for name, found in samples.items():
        share, quicker = None, None
        milliseconds = exact_interval([1e3 * seconds for seconds in found])
        if name in ("naive", "staged", STAGED):
            share = exact_interval([link_seconds(launch) / seconds for seconds in found])
        if name != STAGED and STAGED in samples:
            quicker = ratio(samples[STAGED], found)
        relation, bound, value = {
            (2, STAGED): ("<=", MILLISECONDS, milliseconds),
            (4, STAGED): (">=", SHARE, share),
            (ranks, "ipc"): (">=", TIMES, quicker),
        }.get((ranks, name), ("", None, None))
        mark = Requirement(name, relation, bound, value).mark if on_gpu and value else ""
        shown = (str(cell or "-") for cell in (milliseconds, share, quicker))
        yield name, str(ranks), *shown, mark


def link_seconds(launch: Record) -> float:
    """Return the least seconds that a gather needs of the link between host and device.

    All ranks share the link. Each copies its piece to the host, and the other pieces back.
    """
    down, up = (statistics.median(launch["beside"][f"{way}, one rank"]) for way in ("down", "up"))
    return float(max(down, up * (launch["ranks"] - 1)))  # each is of the whole vector


def slicing(launch: Record) -> float:
    """Return the time of a computation by all ranks over P times that of one rank: 1 is fair."""
    together, alone = (
        statistics.median(launch["beside"][f"computation, {who}"])
        for who in ("all ranks", "one rank")
    )
    return float(together / alone / launch["ranks"])


def show(document: Record) -> Iterator[Part]:
    """Yield a line of figures for each launch, and a table of all gathers."""
    launches, on_gpu = document["launches"], document["kind"] != "cpu"
    for launch in launches:
        by_mpi = statistics.median(launch["beside"][GATHER])
        missing = (f"\n  {name}: {reason}" for name, reason in launch["missing"].items())
        yield (
            f"P = {launch['ranks']}: {launch['device']['name']}, {launch['nbytes'] / 2**20:g} MiB; "
            f"by MPI in host memory alone {by_mpi * 1e3:.3f} ms; a computation by all ranks takes "
            f"{slicing(launch):.2f} times as long as its share of the device{''.join(missing)}"
        )
    cells = [row for launch in launches for row in rows(launch, on_gpu=on_gpu)]
    yield make("AllGather", COLUMNS, cells, WITHIN)


def plan(options: argparse.Namespace) -> tuple[Record, list[Entry]]:
    """Return the setting of all launches, and a launch for each number of ranks."""
    setting = {"kind": options.device, "mib": options.mib}
    counts = numbers_of_ranks(options.ranks)
    return setting, [Entry(f"P = {size}", size, setting) for size in counts]


OPTIONS = {
    "--device": about(default="cuda", help="cpu tries the program (default: %(default)s)"),
    "--ranks": about(default="2,4", metavar="P,...", help="default: %(default)s"),
    "--mib": about(
        type=at_least(1, float),
        default=16.0,
        help="size of the gathered vector (default: %(default)g)",
    ),
}
gpu = Contest(
    *("gpu", __doc__, OPTIONS, plan, "benchmarks.contests.gpu:measure", show),
    file="gpu_table.json",
    timeout=150.0,
)
