"""Measured constants of a machine, what they predict for a collective, and the choice for "auto".

A message of n bytes takes alpha + beta n, a sum gamma n. On a real machine beta and gamma depend on
n, because caches end and libraries change their protocol; so each is a curve through measured
points, and alpha is what its first point says. Seconds of a collective follow from its schedule:

    step       the messages of a step travel at once: the slowest kind of link they use, with all
               their bytes
    sum, copy  the curve of each, once per addend
    run        the steps of the rank that has most to do, and a constant beside

Where steps overlap (depth above 1) and messages leave the node, the longer of messages and sums
counts; inside a node the core that adds is the one that copies, so they add up. An algorithm that
was timed takes its measured time, scaled by what the model says for the ranks and nodes at hand
over what it says for those that were timed. The MPI library is no schedule: it is scaled like the
quickest of ours. Every rank decides alone, from the same numbers.

Source: Thakur, Rabenseifner and Gropp, IJHPCA 19 (2005), section 3 (alpha, beta, gamma); measured
constants instead of tables of thresholds as in NCCL's `graph/tuning.cc`.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass, field
from functools import lru_cache

import torch

from sp_core.schedules import SCHEDULED, Program, Step, operation, program_of, segment_length
from sp_core.segments import split_sizes

Nodes = tuple[int, ...]
DTYPE = torch.float32
STEPS_PER_OCTAVE = 4
"""Decisions are made for so many sizes between n and 2n. Sizes in between use the nearest one."""
LINKS = ("node", "network")
"""Kinds of link: between ranks of one node, and between nodes."""


@dataclass(frozen=True)
class Curve:
    """Seconds as a function of bytes.

    Between two points it is a power law, below the first one constant, above the last one
    proportional to the size.

    Args:
        points: (bytes, seconds) in ascending order of bytes; positive.
    """

    points: tuple[tuple[int, float], ...]

    def __post_init__(self) -> None:
        sizes = [size for size, _ in self.points]
        if not sizes or sizes != sorted(set(sizes)) or min(sizes) < 1:
            raise ValueError(
                f"a curve through the sizes {sizes} was given; "
                "at least one is needed, in ascending order from 1."
            )
        if not all(0 < seconds < math.inf for _, seconds in self.points):
            raise ValueError(
                "a curve was given with a time that is not a positive number; measure again."
            )

    def __call__(self, nbytes: float) -> float:
        first, last = self.points[0], self.points[-1]
        if nbytes <= first[0]:
            return first[1]
        if nbytes >= last[0]:
            return last[1] * nbytes / last[0]
        place = bisect_left(self.points, nbytes, key=lambda point: point[0])
        (low, before), (high, after) = self.points[place - 1 : place + 1]
        share = math.log(nbytes / low) / math.log(high / low)
        return math.exp((1 - share) * math.log(before) + share * math.log(after))

    @property
    def per_byte(self) -> float:
        """Seconds per byte of the largest measured size."""
        return self.points[-1][1] / self.points[-1][0]


@dataclass(frozen=True, eq=False)
class Tuning:
    """The constants of one machine.

    Args:
        fingerprint: of which machine and MPI library.
        nodes: the node of each rank that was timed together.
        links: seconds of an exchange, n bytes each way at once, by kind of link.
        add, copy: seconds for n bytes of result, in memory that is there already.
        start: seconds that a run of a plan takes beside its messages and sums.
        bind: seconds to prepare a call, and each of its steps. A plan pays this once, when made.
        times: seconds of a plan's run by collective and algorithm, over the bytes of the whole
            vector; "mpi" is the library.
        error: of the model without `times`, against them: median and 95th percentile of |predicted
            / measured - 1|.
        measured_at: date and time.
    """

    fingerprint: dict[str, str]
    nodes: tuple[int, ...]
    links: dict[str, Curve]
    add: Curve
    copy: Curve
    start: float = 0.0
    bind: tuple[float, float] = (0.0, 0.0)
    times: dict[str, dict[str, Curve]] = field(default_factory=dict)
    error: tuple[float, float] = (0.0, 0.0)
    measured_at: str = ""

    @property
    def alpha(self) -> float:
        """Seconds of the shortest exchange in a node; between nodes if only that was timed."""
        return self._link.points[0][1]

    @property
    def beta(self) -> float:
        """Seconds per byte of the longest exchange."""
        return self._link.per_byte

    @property
    def _link(self) -> Curve:
        return next(self.links[kind] for kind in LINKS if kind in self.links)


def _programs(op: str, algorithm: str, nodes: Nodes, nbytes: int) -> dict[int, Program]:
    """Return the programs of the ranks that can be slowest.

    These are the root, the first rank that forwards data, and the last rank. The vector is split
    evenly over the ranks.
    """
    size, count = len(nodes), max(nbytes // DTYPE.itemsize, 1)
    pieces, segment = split_sizes(count, size), segment_length(count, size, DTYPE.itemsize)
    return {
        rank: program_of(operation(op, rank, size, pieces, segment=segment, nodes=nodes), algorithm)
        for rank in sorted({0, 1 % size, size - 1})
    }


@lru_cache(maxsize=4096)
def modelled(tuning: Tuning, op: str, algorithm: str, nodes: Nodes, nbytes: int) -> float:
    """Return seconds by the model alone, or infinity if a kind of link was not measured."""
    if algorithm not in SCHEDULED[op]:
        return min(modelled(tuning, op, name, nodes, nbytes) for name in SCHEDULED[op])
    programs = _programs(op, algorithm, nodes, nbytes)
    return tuning.start + max(
        _seconds(tuning, program, rank, nodes) for rank, program in programs.items()
    )


def predict(
    tuning: Tuning, op: str, algorithm: str, nodes: Nodes, nbytes: int, *, planned: bool = True
) -> float:
    """Return the expected seconds of a collective on the busiest rank.

    Args:
        tuning: constants of the machine.
        op, algorithm: of `sp_core.schedules.ALGORITHMS`, but "auto".
        nodes: the node of each rank.
        nbytes: of the whole vector, float32, cut evenly: what an all-gather gives, a reduce-scatter
            takes, a rank of an all-to-all sends.
        planned: a run of a plan; else a call, which prepares its steps first.
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
    if planned or algorithm not in SCHEDULED[op]:
        return seconds
    programs = _programs(op, algorithm, nodes, nbytes).values()
    start, step = tuning.bind
    return seconds + start + step * max(len(program.steps) for program in programs)


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


def decide(
    tuning: Tuning, op: str, nodes: Nodes, nbytes: int, *, among: tuple[str, ...], planned: bool
) -> str:
    """Return the quickest algorithm for a collective.

    Args:
        tuning: constants, the same on every rank.
        op: collective.
        nodes: the node of each rank.
        nbytes: of the whole vector, the same on every rank.
        among: names to choose from, "mpi" among them, which is taken where nothing is quicker.
        planned: for a plan, which prepares its steps once; else for one call.

    Returns:
        A name; "mpi" where there is nothing to choose, or where a link was never measured.
    """
    if nbytes == 0 or len(nodes) == 1 or op not in tuning.times:
        return "mpi"
    return _decided(tuning, op, nodes, round(math.log2(nbytes) * STEPS_PER_OCTAVE), among, planned)


@lru_cache(maxsize=4096)
def _decided(
    tuning: Tuning, op: str, nodes: Nodes, place: int, among: tuple[str, ...], planned: bool
) -> str:
    nbytes = round(2 ** (place / STEPS_PER_OCTAVE))
    # the model alone is not good enough to prefer an algorithm that was never timed
    timed = [name for name in among if name in tuning.times[op]]
    seconds = {name: predict(tuning, op, name, nodes, nbytes, planned=planned) for name in timed}
    known = [name for name in timed if seconds[name] < math.inf]  # else a link was never measured
    return min(known, key=lambda name: (seconds[name], name != "mpi"), default="mpi")
