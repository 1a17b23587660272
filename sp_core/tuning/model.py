"""Hold measured constants of a machine, predict times of collectives, and choose algorithms.

In the usual model a message of n bytes takes alpha + beta n seconds, and a sum of n bytes gamma n.
On a real machine beta and gamma depend on n, because of caches and of the library's protocols. So
messages, sums and copies each have a `Curve` of seconds through measured points. The model predicts
the seconds of a collective from its schedule, the steps of messages and sums of each rank:

    messages of a step   for each kind of link, the curve at the bytes sent or received, whichever
                         are more; the slowest kind counts
    sum, copy            the curve of each, once per addend
    run of a collective  all steps of the rank that has most to do, plus a constant

If steps overlap (`Program.depth` above 1) and messages leave the node, the greater of the time of
messages and the time of sums counts. Inside a node both add up, because the same core copies and
adds. An algorithm that was timed takes its measured time. For other ranks or nodes this is scaled
by the ratio of the model's two predictions. The MPI library's own algorithm, "mpi", has no
schedule: it is scaled like the quickest algorithm that has one. Every rank decides by itself, from
the same numbers.

Source: Thakur, Rabenseifner and Gropp, IJHPCA 19 (2005), section 3 (alpha, beta, gamma); measured
constants instead of tables of thresholds as in NCCL's `graph/tuning.cc`.
"""

import math
from bisect import bisect_left
from dataclasses import dataclass, field
from functools import lru_cache

import torch

from sp_core.programs import SCHEDULED, Program, Step, operation, program_of, segment_length
from sp_core.segments import split_sizes

Nodes = tuple[int, ...]
"""For each rank the number of its node."""
DTYPE = torch.float32
"""The dtype for which sums are measured and predicted."""
STEPS_PER_OCTAVE = 4
"""The number of sizes between n and 2n bytes that `decide` tells apart. It rounds other sizes."""
MOST_RANKS = 8
"""The most ranks for which the model computes the time of every rank."""
LINKS = ("node", "network")
"""Kinds of link: between ranks of one node, and between nodes."""


@dataclass(frozen=True)
class Curve:
    """Map a number of bytes to seconds: `curve(nbytes)`.

    Between two points the seconds are a power of the bytes. Below the first point they are
    constant, above the last point proportional to the bytes.

    Args:
        points: (bytes, seconds) in ascending order of bytes, at least one; positive numbers.

    Raises:
        ValueError: no point, bytes that do not ascend from 1 or more, or seconds that are not
            positive and finite.
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
        """Return seconds per byte at the point with the most bytes."""
        return self.points[-1][1] / self.points[-1][0]


@dataclass(frozen=True, eq=False)
class Tuning:
    """Hold the measured constants of a machine.

    A plan is a collective prepared for one tensor (`sp.plan`); a run of it is one execution.

    Args:
        fingerprint: describes the machine that was measured: name -> value of host, processor,
            cores and MPI library.
        nodes: for each rank of the measurement the number of its node.
        links: kind of link (`LINKS`) -> seconds in which two ranks send n bytes to each other at
            the same time.
        add, copy: seconds of a sum of two tensors, and of a copy, for n bytes of result in memory
            that was allocated before.
        start: seconds of a plan's run besides its messages and sums.
        bind: seconds to prepare a call, and seconds to prepare each of its steps. A plan is
            prepared only once, when it is made.
        times: collective -> algorithm -> seconds of a plan's run, for the bytes of the whole vector
            (as in `predict`). Algorithm "mpi" is the MPI library's. Collectives may have different
            sizes: an all-gather or all-to-all of fewer elements than ranks is not measured.
        error: how well the model predicts `times` without using them: median and 95th percentile
            of |predicted / measured - 1|.
        measured_at: date and time of the measurement, ISO 8601.
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
        """Return the latency: seconds of the exchange with the fewest bytes that was measured.

        The exchange is inside a node, or between nodes if only that was measured.
        """
        return self._link.points[0][1]

    @property
    def beta(self) -> float:
        """Return the inverse bandwidth: seconds per byte of the exchange with the most bytes.

        Latency is not subtracted. The exchange is inside a node, or between nodes if only that was
        measured.
        """
        return self._link.per_byte

    @property
    def _link(self) -> Curve:
        """Return the curve of exchanges inside a node; between nodes if only that was measured."""
        return next(self.links[kind] for kind in LINKS if kind in self.links)


def _programs(op: str, algorithm: str, nodes: Nodes, nbytes: int) -> dict[int, Program]:
    """Return the programs (steps of messages and sums) of the ranks that may be the slowest.

    Up to MOST_RANKS ranks these are all. Of more ranks, to save time, these are the root, the first
    rank that forwards data, and the last rank. Another rank may then be slower.

    Args:
        op, algorithm: names of a collective and of an algorithm that has a schedule.
        nodes: for each rank the number of its node.
        nbytes: bytes of the whole float32 vector, which is split evenly over the ranks.

    Returns:
        Rank -> program.
    """
    size, count = len(nodes), max(nbytes // DTYPE.itemsize, 1)
    pieces = split_sizes(count, size)
    segment = segment_length(count=count, size=size, itemsize=DTYPE.itemsize)
    return {
        rank: program_of(operation(op, rank, size, pieces, segment=segment, nodes=nodes), algorithm)
        for rank in (range(size) if size <= MOST_RANKS else (0, 1, size - 1))
    }


@lru_cache(maxsize=4096)
def modelled(tuning: Tuning, op: str, algorithm: str, nodes: Nodes, nbytes: int) -> float:
    """Predict the seconds of a prepared collective by the model alone, without `Tuning.times`.

    Arguments as in `predict`. For "mpi" return the prediction of the quickest other algorithm.
    Return infinity if messages use a kind of link that was not measured.
    """
    if algorithm not in SCHEDULED[op]:
        return min(modelled(tuning, op, name, nodes, nbytes) for name in SCHEDULED[op])
    return tuning.start + max(
        _seconds(tuning, program, rank, nodes)
        for rank, program in _programs(op, algorithm, nodes, nbytes).items()
    )


def predict(
    tuning: Tuning, op: str, algorithm: str, nodes: Nodes, nbytes: int, *, planned: bool = True
) -> float:
    """Predict the seconds of a collective on the rank that takes longest.

    Args:
        tuning: constants of the machine.
        op, algorithm: a collective, and an algorithm of `sp_core.programs.ALGORITHMS[op]` other
            than "auto".
        nodes: for each rank the number of its node.
        nbytes: bytes of the whole vector, in float32 and split evenly: the result of an all-gather,
            the input of a reduce-scatter, what a rank sends in an all-to-all.
        planned: whether the collective was prepared by `sp.plan`. Otherwise the time includes the
            preparation of its steps.

    Returns:
        Seconds; infinity if messages use a kind of link that was not measured.
    """
    seconds = modelled(tuning, op, algorithm, nodes, nbytes)
    measured = tuning.times.get(op, {}).get(algorithm)
    if measured is not None:
        there = modelled(tuning, op, algorithm, tuning.nodes, nbytes)
        seconds = measured(nbytes) * (seconds / there)  # 1 for the ranks and nodes measured
    if planned or algorithm not in SCHEDULED[op]:
        return seconds
    programs = _programs(op, algorithm, nodes, nbytes).values()
    start, step = tuning.bind
    return seconds + start + step * max(len(program.steps) for program in programs)


def _seconds(tuning: Tuning, program: Program, rank: int, nodes: Nodes) -> float:
    """Return the seconds of all messages and sums in the program of `rank`."""
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
    """Return the seconds of the messages of a step, which are all sent and received at once.

    The slowest kind of link counts; infinity if a kind that is used was not measured.
    """
    slowest = 0.0
    for kind in LINKS:
        sent, received = (
            sum(
                len(m.region)
                for m in messages
                if (nodes[m.peer] != nodes[rank]) == (kind == "network")
            )
            for messages in (step.sends, step.receives)
        )
        if sent or received:
            curve = tuning.links.get(kind, lambda nbytes: math.inf)
            slowest = max(slowest, curve(max(sent, received) * DTYPE.itemsize))
    return slowest


def _work(tuning: Tuning, step: Step) -> float:
    """Return the seconds of the sums and copies that follow the messages of a step."""
    seconds = 0.0
    for combine in step.then:
        nbytes = len(combine.into) * DTYPE.itemsize
        sums = len(combine.parts) - 1
        seconds += sums * tuning.add(nbytes) if sums else tuning.copy(nbytes)
    return seconds


def decide(
    tuning: Tuning, op: str, nodes: Nodes, nbytes: int, *, among: tuple[str, ...], planned: bool
) -> str:
    """Return the name of the algorithm that is predicted to be the quickest for a collective.

    Only algorithms that were timed, in `Tuning.times`, are considered. There is no communication:
    ranks get the same name if their arguments are equal.

    Args:
        tuning: constants, the same on every rank.
        op: name of the collective.
        nodes: for each rank the number of its node.
        nbytes: bytes of the whole vector, as in `predict`, the same on every rank.
        among: names to choose from. Of equally quick algorithms "mpi" is preferred.
        planned: whether the collective is prepared by `sp.plan`; otherwise it is a single call.

    Returns:
        A name of `among`. "mpi" for no bytes, for a single rank, for a collective that was not
        timed, or if every candidate uses a kind of link that was not measured.
    """
    if nbytes == 0 or len(nodes) == 1 or op not in tuning.times:
        return "mpi"
    return _decided(tuning, op, nodes, round(math.log2(nbytes) * STEPS_PER_OCTAVE), among, planned)


@lru_cache(maxsize=4096)
def _decided(
    tuning: Tuning, op: str, nodes: Nodes, place: int, among: tuple[str, ...], planned: bool
) -> str:
    """Return the name that `decide` returns for 2 ** (place / STEPS_PER_OCTAVE) bytes. Cached."""
    nbytes = round(2 ** (place / STEPS_PER_OCTAVE))
    # an algorithm that was never timed is not chosen: the model alone is not exact enough
    timed = [name for name in among if name in tuning.times[op]]
    seconds = {name: predict(tuning, op, name, nodes, nbytes, planned=planned) for name in timed}
    known = [name for name in timed if seconds[name] < math.inf]  # infinite: a link not measured
    return min(known, key=lambda name: (seconds[name], name != "mpi"), default="mpi")
