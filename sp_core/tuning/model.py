"""Predict the seconds of a collective from its schedule, and correct them by measurements.

    step       the messages of a step travel at once: the slowest kind of link they use, with all
    their bytes sum, copy  the curve of each, once per addend
    run        the steps of the rank that has most to do, and a constant beside

Where steps overlap (depth above 1) and messages leave the node, the longer of messages and sums
counts; inside a node the core that adds is the one that copies, so they add up. An algorithm that
was timed takes its measured time, scaled by what the model says for the ranks and nodes at hand
over what it says for those that were timed. The MPI library is no schedule: it is scaled like the
quickest of ours.

Source: Thakur, Rabenseifner and Gropp, IJHPCA 19 (2005), section 3 (alpha, beta, gamma); measured
constants instead of tables of thresholds as in NCCL's `graph/tuning.cc`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from sp_core.schedules import (
    SCHEDULED,
    Operation,
    Program,
    Step,
    cost,
    operation,
    program_of,
    segment_length,
)
from sp_core.segments import split_sizes
from sp_core.tuning.constants import Tuning

Nodes = tuple[int, ...]
DTYPE = torch.float32


@dataclass(frozen=True)
class Prediction:
    """The expected cost of one run of a collective on the busiest rank.

    Attributes:
        seconds: it takes.
        messages, bytes_sent: of that rank, where a schedule says so; what the MPI library does is
            its own business.
        scratch: bytes of scratch memory.
    """

    seconds: float
    messages: int = 0
    bytes_sent: int = 0
    scratch: int = 0


def even_operation(op: str, rank: int, nodes: Nodes, count: int) -> Operation:
    """Describe `op` for `rank` on a vector of `count` elements that is split evenly over ranks.

    `nodes` has the node of each rank. The root is rank 0.
    """
    size = len(nodes)
    segment = segment_length(count, size, DTYPE.itemsize)
    return operation(op, rank, size, split_sizes(count, size), segment=segment, nodes=nodes)


def witnesses(size: int) -> list[int]:
    """Return the ranks that can be slowest: the root, the first that forwards data, the last."""
    return sorted({0, min(1, size - 1), size - 1})


@lru_cache(maxsize=4096)
def modelled(tuning: Tuning, op: str, algorithm: str, nodes: Nodes, nbytes: int) -> float:
    """Return seconds by the model alone, or infinity if a kind of link was not measured."""
    if algorithm not in SCHEDULED[op]:
        return min(modelled(tuning, op, name, nodes, nbytes) for name in SCHEDULED[op])
    count = max(nbytes // DTYPE.itemsize, 1)
    programs = {
        rank: program_of(even_operation(op, rank, nodes, count), algorithm)
        for rank in witnesses(len(nodes))
    }
    return tuning.start + max(
        _seconds(tuning, program, rank, nodes) for rank, program in programs.items()
    )


def predict(
    tuning: Tuning, op: str, algorithm: str, nodes: Nodes, nbytes: int, *, planned: bool = True
) -> Prediction:
    """Predict the cost of a collective.

    Args:
        tuning: constants of the machine.
        op, algorithm: of `sp_core.schedules.ALGORITHMS`, but "auto".
        nodes: the node of each rank.
        nbytes: of the whole vector, float32, cut evenly: what an all-gather gives, a reduce-scatter
            takes, a rank of an all-to-all sends.
        planned: a run of a plan; else a call, which prepares its steps first.

    Returns:
        The prediction.
    """
    seconds = modelled(tuning, op, algorithm, nodes, nbytes)
    measured = tuning.times.get(op, {}).get(algorithm)
    if measured is not None:
        there = (
            1.0
            if nodes == tuning.nodes
            else seconds / modelled(tuning, op, algorithm, tuning.nodes, nbytes)
        )
        seconds = measured(nbytes) * there
    if algorithm not in SCHEDULED[op]:
        return Prediction(seconds)
    count = max(nbytes // DTYPE.itemsize, 1)
    programs = [
        program_of(even_operation(op, rank, nodes, count), algorithm)
        for rank in witnesses(len(nodes))
    ]
    figures = max(
        (cost(program, DTYPE) for program in programs), key=lambda found: found.bytes_sent
    )
    if not planned:
        seconds += tuning.bind[0] + tuning.bind[1] * max(len(program.steps) for program in programs)
    return Prediction(seconds, figures.messages, figures.bytes_sent, figures.scratch)


def _seconds(tuning: Tuning, program: Program, rank: int, nodes: Nodes) -> float:
    travel = [_travel(tuning, step, rank, nodes) for step in program.steps]
    work = [_work(tuning, step) for step in program.steps]
    away = any(
        nodes[m.peer] != nodes[rank]
        for step in program.steps
        for m in (*step.sends, *step.receives)
    )
    if program.depth > 1 and away:
        return max(sum(travel), sum(work))
    return sum(travel) + sum(work)


def _travel(tuning: Tuning, step: Step, rank: int, nodes: Nodes) -> float:
    """Return the seconds of a step's messages, both ways and over all kinds of link at once."""
    slowest = 0.0
    for kind in ("node", "network"):
        sent, received = (
            sum(
                len(m.region)
                for m in messages
                if (nodes[m.peer] != nodes[rank]) == (kind == "network")
            )
            for messages in (step.sends, step.receives)
        )
        if sent or received:
            curve = tuning.links.get(kind)
            slowest = max(
                slowest,
                float("inf") if curve is None else curve(max(sent, received) * DTYPE.itemsize),
            )
    return slowest


def _work(tuning: Tuning, step: Step) -> float:
    seconds = 0.0
    for combine in step.then:
        nbytes = len(combine.into) * DTYPE.itemsize
        seconds += (
            tuning.copy(nbytes)
            if len(combine.parts) == 1
            else (len(combine.parts) - 1) * tuning.add(nbytes)
        )
    return seconds
