"""AllGather between ranks that share a GPU: naive, staged, pipelined, device memory (ipc), and an MPI that reads it.

All ways to gather take turns in the same processes, and each is checked before it is timed. Beside
them stand the rate of the link between host and device, and the cost of sharing one GPU for a
computation that sends nothing. Exit code: 0 whatever the times, 1 if a result was wrong or a launch
failed, 2 for options that cannot be run.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import sp_core as sp
from benchmarks.contests.contest import Entry, compete, new_document, refused
from benchmarks.launching import (
    ROOT,
    Launch,
    Options,
    Record,
    UsageError,
    about,
    main,
    numbers_of_ranks,
    parse,
    writable,
)
from benchmarks.machine import device as device_of
from benchmarks.machine import facts
from benchmarks.reporting import terminal
from benchmarks.reporting.tables import make
from benchmarks.reporting.terminal import Console
from benchmarks.statistics import Requirement, exact_interval
from benchmarks.worker import Intracomm, Rank
from sp_core.measuring import interleaved

TRANSPORTS = {"cuda": ("staged", "pipelined", "ipc", "device"), "cpu": ("host", "window")}
SECONDS, LEAST_ROUNDS = 3.0, 15
SIDE = 2048  # of the matrices of a computation
Call = Callable[[], object]
OPTIONS: Options = {
    "--device": about(
        choices=("cuda", "cpu"), default="cuda", help="cpu tries the program (default: %(default)s)"
    ),
    "--ranks": about(default="2,4", metavar="P,...", help="default: %(default)s"),
    "--mib": about(
        type=float, default=16.0, help="size of the gathered vector (default: %(default)g)"
    ),
    "--out": about(type=Path, default=ROOT / "reports" / "gpu_table.json", metavar="FILE"),
    "--timeout": about(
        type=float, default=150.0, metavar="S", help="limit of a launch (default: %(default)g)"
    ),
    "--show": about(
        type=Path, metavar="FILE", help="show a record that is there, and measure nothing"
    ),
}


class WrongResult(RuntimeError):
    """A way to gather whose result is not the right one."""


def gathers(
    world: Intracomm, x: Tensor, stack: ExitStack, missing: dict[str, str]
) -> dict[str, Callable[[], Tensor]]:
    """Ways to gather x of all ranks, and in `missing` why others are not here."""
    found: dict[str, Callable[[], Tensor]] = {"naive": lambda: naive(world, x)}
    for name in TRANSPORTS[x.device.type]:
        try:
            mesh = stack.enter_context(
                sp.Mesh(
                    world,
                    device=x.device,
                    transport=name,
                    check="off",
                    tuning="off",
                    all=world.size,
                )
            )
        except sp.DeviceError as error:
            missing[name] = str(error)
            continue
        if name in ("ipc", "window") and mesh["all"].window is None:
            missing[name] = mesh["all"].no_window
        else:
            found[name] = sp.plan("all_gather", x, comm=mesh["all"]).run
    return found


def naive(world: Intracomm, x: Tensor) -> Tensor:
    """Gather as a program that knows no transport does: down, gather, up, each in memory made for it."""
    everything = np.empty(world.size * x.numel(), np.float32)
    world.Allgather(x.cpu().numpy(), everything)
    return torch.from_numpy(everything).to(x.device)


def _settled(calls: Mapping[str, Call], device: torch.device) -> dict[str, Call]:
    """The calls, each followed by a wait for the device."""

    def settled(call: Call) -> Call:
        def run() -> None:
            call()
            if device.type == "cuda":
                torch.cuda.synchronize(device)

        return run

    return {name: settled(call) for name, call in calls.items()}


def copies(nbytes: int, device: torch.device) -> dict[str, Call]:
    """A copy of so many bytes down and up, through page-locked memory."""
    there = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    here = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    return {
        "down": lambda: here.copy_(there, non_blocking=True),
        "up": lambda: there.copy_(here, non_blocking=True),
    }


def by_one_and_by_all(
    world: Intracomm, calls: dict[str, Call], seconds: float
) -> dict[str, list[float]]:
    """Samples of each call made by rank 0 alone and by all ranks at once."""

    def nothing() -> None:
        pass

    alone = {
        f"{name}, one rank": call if world.rank == 0 else nothing for name, call in calls.items()
    }
    return interleaved(
        world,
        {**alone, **{f"{name}, all ranks": call for name, call in calls.items()}},
        seconds,
        LEAST_ROUNDS,
    )


def measured(
    world: Intracomm,
    device: torch.device,
    nbytes: int,
    *,
    side: int = SIDE,
    seconds: float = SECONDS,
) -> dict[str, Any]:
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
        samples = interleaved(world, _settled(calls, device), seconds, LEAST_ROUNDS)
    a = torch.ones(side, side, device=device)
    others: dict[str, Call] = {**copies(nbytes, device), "computation": lambda: torch.mm(a, a)}
    beside = by_one_and_by_all(world, _settled(others, device), seconds)
    return {
        "nbytes": nbytes,
        "ranks": world.size,
        "samples": samples,
        "beside": beside,
        "missing": missing,
    }


STAGED = "pipelined"
"""The form that the project's table calls staged: page-locked, in chunks. The transport of that name is the plain form."""

MILLISECONDS, SHARE, TIMES = 1.0, 0.7, 5.0
"""Staged at P = 2 at most; of the link's rate at P = 4 at least; how much quicker device memory is than staging."""

COLUMNS = ("way", "P", "ms", "of the link's rate", "times as quick as pipelined", "")


def measure(setting: Record, rank: Rank) -> Record:
    """Carry out one launch."""
    device = device_of(setting["kind"], rank.world, share_gpu=True)
    return {
        **facts(rank.world, device, "all"),
        **measured(rank.world, device, int(setting["mib"] * 2**20)),
    }


def rows(launch: Record, *, on_gpu: bool) -> Iterator[tuple[str, ...]]:
    """Yield the cells of each way to gather: its median, and its share of the rate of the link between host and device."""
    samples, ranks = launch["samples"], launch["ranks"]
    for name, found in samples.items():
        seconds = statistics.median(found)
        share = link_seconds(launch) / seconds if name in ("naive", "staged", STAGED) else None
        staged = samples.get(STAGED) if name != STAGED else None
        quicker = (
            None
            if staged is None
            else statistics.median(a / b for a, b in zip(staged, found, strict=True))
        )
        required = {
            (2, STAGED): ("<=", MILLISECONDS, seconds * 1e3),
            (4, STAGED): (">=", SHARE, share),
            (ranks, "ipc"): (">=", TIMES, quicker),
        }.get((ranks, name))
        mark = ""
        if on_gpu and required is not None and required[2] is not None:
            mark = Requirement(name, required[0], required[1], exact_interval([required[2]])).mark
        shown = ("-" if value is None else f"{value:.2f}" for value in (share, quicker))
        yield name, str(ranks), f"{seconds * 1e3:.3f}", *shown, mark


def link_seconds(launch: Record) -> float:
    """Return the least time of the link that all ranks share: each sends its piece down, and takes the pieces of the others up."""
    beside, ranks = launch["beside"], launch["ranks"]
    down, up = (
        statistics.median(beside[f"{way}, one rank"]) for way in ("down", "up")
    )  # of the whole vector
    return float(max(down, up * (ranks - 1)))


def slicing(launch: Record) -> float:
    """Return the time of a computation by all ranks over P times that of one rank: 1 is fair sharing."""
    beside = launch["beside"]
    together, alone = (
        statistics.median(beside[f"computation, {who}"]) for who in ("all ranks", "one rank")
    )
    return float(together / alone / launch["ranks"])


def show(screen: Console, document: Record) -> Iterator[str]:
    """Print the rows of every launch, and the figures beside them."""
    cells: list[tuple[str, ...]] = []
    for launch in document["launches"]:
        if launch["status"] != "ok":
            terminal.say(
                screen, f"P = {launch['ranks']}: {launch['status']}: {launch['reason']}", "red"
            )
            continue
        cells += rows(launch, on_gpu=document["kind"] == "cuda")
        text = f"P = {launch['ranks']}: {launch['device']['name']}, {launch['nbytes'] / 2**20:g} MiB; a computation by all ranks "
        terminal.say(
            screen, f"{text}takes {slicing(launch):.2f} times as long as its share of the device"
        )
        for name, reason in launch["missing"].items():
            terminal.say(screen, f"  {name}: {reason}")
    terminal.show(screen, make("AllGather", COLUMNS, cells))
    yield from ()


def gpu(arguments: Sequence[str] | None = None) -> int:
    """Measure, write the record, show the table; return the exit code."""
    options = parse("gpu", __doc__, OPTIONS, arguments)
    if options.show:
        list(show(terminal.console(), json.loads(options.show.read_text())))
        return 0
    setting = {"kind": options.device, "mib": options.mib}
    try:
        launch, out = Launch(timeout=options.timeout), writable(options.out)
        counts = numbers_of_ranks(options.ranks)
    except UsageError as error:
        return refused("gpu", error)
    entries = [
        Entry(
            f"P = {size}", size, "benchmarks.contests.gpu:measure", setting, launch, {"ranks": size}
        )
        for size in counts
    ]
    return compete("gpu", entries, new_document(kind=options.device), out, show)


if __name__ == "__main__":
    main(gpu)
