"""Check and time the contestants of each row on the ranks of a launch; a wrong result ends the launch."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

import sp_core as sp
from benchmarks.contests.collectives import regret
from benchmarks.contests.collectives.contestants import CONTESTANTS, Field, Runner, error_of, expected
from benchmarks.contests.collectives.rows import heats
from benchmarks.contests.peers.rivals import start_gloo
from benchmarks.machine import facts
from benchmarks.worker import Rank
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
    x = torch.randn(count, generator=torch.Generator().manual_seed(world.rank)).bfloat16().float()  # bf16 is given the same
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


def measure(kind: str, rank: Rank) -> dict[str, Any]:
    """Carry out one launch: the heats of a kind of row, or "regret"."""
    world = rank.world
    with sp.Mesh(world, transport="window", tuning="off", check="off", all=world.size) as mesh, contextlib.ExitStack() as stack:
        record = facts(world, mesh.device, mesh["all"].transport.name)
        if kind == "regret":
            measured = regret.measure(world, mesh["all"])
            cases = regret.judged(measured["bare"], measured["samples"])
            return {**record, "cases": [asdict(case) for case in cases], "summary": regret.summary(cases)}
        if kind == "default":
            start_gloo(rank.folder, world.rank, world.size)
            stack.callback(dist.destroy_process_group)
        return {**record, "heats": {name: heat(world, mesh, *contest) for name, contest in heats(kind).items()}}
