"""From a case to the measured parts of its record."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.cases.case import (
    CONTROL,
    Build,
    Work,
    counts_of,
    meshes,
    operation_key,
    operations,
    phase_names,
)
from benchmarks.records import Case
from benchmarks.sample import (
    Budget,
    Counts,
    Loop,
    Sampler,
    Samples,
    highest_and_mean,
    peak_memory,
    undisturbed,
)
from benchmarks.worker import Intracomm
from sp_core.communicator import Communicator

Parts = dict[str, Any]
Notes = list[list[dict[str, float]]]


def measure(
    case: Case,
    build: Build,
    world: Intracomm,
    device: torch.device,
    budget: Budget | Counts,
    loop: Loop,
    *,
    memory: bool = True,
) -> tuple[Parts, Samples]:
    """Time a case and count what it sends.

    Args:
        case: what to measure.
        build: makes this rank's work of it.
        world: all ranks, on a communicator that the case does not use.
        device: where tensors live.
        budget: how long it may take, or how many samples there are.
        loop: calls the step.
        memory: also find out the peak memory, which on a CPU takes every rank seconds of imports.

    Returns:
        The parts of the record that were measured, the same on all ranks; and the samples.
    """
    with meshes(case, world, device) as mesh, undisturbed():

        def sync() -> None:
            if device.type == "cuda":
                torch.cuda.synchronize(device)

        work = build(case, mesh, sync)
        note = work.phases.note if work.phases is not None else lambda: plain_note(work.comms)
        sampler = Sampler(work.step, world, sync=sync, note=note)
        counts = sampler.agree(budget) if isinstance(budget, Budget) else budget
        samples, notes = sampler.run(counts, loop)
        traffic, peak = one_step(work, world, device, memory=memory)
    return {
        "timing": {"warmup": counts.warmup, **samples.as_dict()},
        "phases": _phases(samples, notes),
        "comm": _comm(traffic, notes, work),
        "memory": peak,
        "work": {"flops": work.flops, "tokens": work.tokens, "bytes_formula": _formula(traffic)},
    }, samples


def problem(parts: Parts) -> str | None:
    """What is wrong with the result: bytes counted that are not those of the formula."""
    counted = sum(entry["bytes_sent"] for name, entry in parts["comm"].items() if name != CONTROL)
    expected = parts["work"]["bytes_formula"]
    if expected is None or counted == expected:
        return None
    return f"the ranks sent {counted} bytes in one step; by formula it is {expected}."


def one_step(
    work: Work, world: Intracomm, device: torch.device, *, memory: bool = True
) -> tuple[list[Parts], Parts | None]:
    """Take one more step, not timed, and count what it sends on every rank; and what it holds, where memory is asked for."""
    for comm in work.comms:
        comm.counters.reset()
    peak, method = peak_memory(work.step, work.held, device) if memory else (0, work.step())
    mine = {"formula": work.sent, "counts": counts_of(work.comms)}
    traffic: list[Parts] = world.allgather(mine)
    highest = max(world.allgather(peak))
    return traffic, {"peak_bytes": highest, "method": method} if memory else None


def plain_note(comms: Sequence[Communicator]) -> dict[str, float]:
    """Seconds of waiting, for work without phases of its own."""
    waited = operations(comms)
    return {
        "communication": sum(waited.values()),
        **{operation_key(name): s for name, s in waited.items()},
    }


def _phases(samples: Samples, notes: Notes) -> Parts:
    named = {name: highest_and_mean(_noted(notes, name)) for name in phase_names(notes)}
    return {"total": highest_and_mean(samples.durations), **named}


def _noted(notes: Notes, name: str) -> list[list[float]]:
    return [[sample.get(name, 0.0) for sample in rank] for rank in notes]


def _comm(traffic: list[Parts], notes: Notes, work: Work) -> Parts:
    """By operation: calls of the rank that made most, messages and bytes of all, seconds of the one that waited longest."""
    names = sorted({name for rank in traffic for name in rank["counts"]})
    only = [name for name in names if name != CONTROL]

    def entry(name: str) -> Parts:
        counts = [
            rank["counts"].get(name, {"calls": 0, "messages": 0, "bytes_sent": 0})
            for rank in traffic
        ]
        found = {
            "calls": max(count["calls"] for count in counts),
            "messages": sum(count["messages"] for count in counts),
            "bytes_sent": sum(count["bytes_sent"] for count in counts),
            "bytes_formula": _formula(traffic) if only == [name] else None,
            "seconds": highest_and_mean(_noted(notes, operation_key(name)))["max_s"],
        }
        return found | (
            {"bytes_result": work.result_bytes}
            if work.result_bytes is not None and name != CONTROL
            else {}
        )

    return {name: entry(name) for name in names}


def _formula(traffic: list[Parts]) -> int | None:
    """Bytes that all ranks send by formula."""
    sent = [rank["formula"] for rank in traffic]
    return None if None in sent else sum(sent)
