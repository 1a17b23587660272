"""Measure the constants of `sp_core.tuning` on several ranks: times of messages, sums and copies.

The command is `mpiexec -n 2 python -m sp_core doctor --measure`. It calls `keep`, which calls
`measure` and writes a file. Benchmarks also call `interleaved`. Every rank makes these calls.
`told` describes the file, without communication.

A sample is the time of one call on the slowest rank, from a barrier to the end of the call. Calls
to be compared take turns: each round has one sample of each call, so that a disturbance of the
machine slows all of them. A constant is the median of its samples. Messages and sums are measured
by themselves, for predictions for any number of ranks and nodes. Whole collectives are measured on
the given ranks, to correct these predictions.
"""

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any, cast

import torch

from sp_core.collectives import execution
from sp_core.collectives.plans import plan
from sp_core.communicator import Communicator
from sp_core.mesh import Mesh, fingerprint
from sp_core.programs import SCHEDULED, operation, usable
from sp_core.scratch import Scratch
from sp_core.transport import Intracomm, wait
from sp_core.tuning import (
    LINKS,
    VARIABLE,
    Curve,
    FileError,
    Tuning,
    default_path,
    load,
    modelled,
    save,
)

Call = Callable[[], object]
Samples = dict[str, dict[str, dict[int, list[float]]]]
"""Seconds of each sample, by collective, algorithm and bytes of the whole vector."""

SIZES = tuple(4**place for place in range(3, 14))  # 64 bytes to 64 MiB
SECONDS = 2.0
SAMPLE_SECONDS = 2e-4  # a quicker call is repeated in a sample
MOST_REPEATS = 50
LEAST_ROUNDS, MOST_ROUNDS = 3, 15
OPS = tuple(op for op, names in SCHEDULED.items() if names)
BOUND = {"recursive_doubling": 1 << 12, "segmented_ring": 1 << 23}
"""Algorithms and bytes of an all-reduce with few steps, and of one with many, for any ranks."""


def measure(world: Intracomm, *, seconds: float = SECONDS, sizes: Sequence[int] = SIZES) -> Tuning:
    """Measure times of messages, sums, copies and collectives with at least two ranks.

    Args:
        world: an mpi4py communicator; every rank calls this.
        seconds: about how long to measure. Large vectors need a fraction of a second more.
        sizes: bytes of messages and vectors, in ascending order.

    Returns:
        The constants by which algorithm="auto" chooses, the same on every rank.

    Raises:
        ValueError: `world` has a single rank, so there are no messages to measure.
    """
    if world.size < 2:
        raise ValueError(
            "constants were to be measured on 1 rank; "
            "2 are needed: mpiexec -n 2 python -m sp_core doctor --measure."
        )
    with Mesh(world, transport="window", tuning="off", check="off", all=world.size) as mesh:
        group = mesh["all"]
        share = seconds / len(sizes) / (len(OPS) + 3)
        bare = primitives(world, group, share, sizes)
        samples = collectives(world, group, share, sizes)
    return fitted(bare, samples)


def primitives(
    world: Intracomm, group: Communicator, share: float, sizes: Sequence[int] = SIZES
) -> Tuning:
    """Measure the times of messages, sums, copies, and the preparation of a collective.

    Args:
        world, group: the same ranks, as an mpi4py communicator and as a `Communicator`. Every rank
            calls this.
        share: seconds to spend on each size of each kind of message, sum and copy.
        sizes: the sizes in bytes, in ascending order.

    Returns:
        The constants without times of whole collectives, the same on every rank.
    """
    curve = partial(_curve, world, share=share, sizes=sizes)
    links = {
        kind: curve(partial(_exchange, group, pair))
        for kind in LINKS
        if (pair := _pair(group.nodes, kind))
    }
    add, copy = (curve(partial(_local, kind)) for kind in ("add", "copy"))
    made = Tuning(
        *(fingerprint(), group.nodes, links, add, copy),
        bind=_binding(world, group),
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    return cast("Tuning", world.bcast(made))


def collectives(
    world: Intracomm,
    group: Communicator,
    share: float,
    sizes: Sequence[int] = SIZES,
    least: int = LEAST_ROUNDS,
) -> Samples:
    """Measure the times of every algorithm of every collective, on float32 vectors of some sizes.

    Args:
        world, group, sizes: as in `primitives`.
        share: seconds to spend on each size of each collective.
        least: the least number of samples of each algorithm, even if they take longer than `share`.

    Returns:
        Seconds of each sample, by collective, algorithm and bytes; the same on every rank.
    """
    found: Samples = {
        op: {name: {} for name in usable(group.nodes, op, window=group.window is not None)}
        for op in OPS
    }
    for size in sizes:
        for op in OPS:
            x = vector(op, size, group)
            if not x.numel():  # too many ranks
                continue
            runs: dict[str, Call] = {
                name: plan(op, x, comm=group, **arguments(op), algorithm=name).run
                for name in found[op]
            }
            for name, seconds in interleaved(world, runs, share, least).items():
                found[op][name][size] = seconds
    return found


def fitted(bare: Tuning, samples: Samples) -> Tuning:
    """Return constants that are corrected by the measured times of whole collectives.

    Args:
        bare: the constants that `primitives` has measured.
        samples: the times that `collectives` has measured.

    Returns:
        `bare` with three more fields. `times` are the measured times of each algorithm by size.
        `start` are seconds added to each prediction, so that it fits at the smallest size. `error`
        is the (median, 95th percentile) of the predictions' relative errors.
    """
    times = {op: _curves(by_name) for op, by_name in samples.items()}
    ours = [
        (op, name, *point)
        for op, by_name in times.items()
        for name, c in by_name.items()
        if name != "mpi"
        for point in c.points
    ]
    least = min(size for _, _, size, _ in ours)
    beside = [
        seconds - modelled(bare, op, name, bare.nodes, size)
        for op, name, size, seconds in ours
        if size == least
    ]
    started = replace(bare, start=max(statistics.median(beside), 0.0))
    errors = sorted(
        abs(modelled(started, op, name, bare.nodes, size) / seconds - 1)
        for op, name, size, seconds in ours
    )
    error = (statistics.median(errors), errors[int(0.95 * (len(errors) - 1))])
    return replace(started, times=times, error=error)


def _curves(by_name: dict[str, dict[int, list[float]]]) -> dict[str, Curve]:
    sizes = list(next(iter(by_name.values())))
    found = {
        size: typical({name: by_size[size] for name, by_size in by_name.items()}) for size in sizes
    }
    return {name: Curve(tuple((size, found[size][name]) for size in sizes)) for name in by_name}


def typical(rounds: dict[str, list[float]]) -> dict[str, float]:
    """Return a typical time in seconds for each name.

    A disturbance can slow a whole round. Therefore each sample is divided by the median of its
    round. The result is the median of these ratios, times the median of all rounds' medians.

    Args:
        rounds: for each name its seconds in each round. All names have the same rounds.
    """
    levels = [statistics.median(together) for together in zip(*rounds.values(), strict=True)]
    level = statistics.median(levels)
    return {
        name: level
        * statistics.median(seconds / own for seconds, own in zip(samples, levels, strict=True))
        for name, samples in rounds.items()
    }


def interleaved(
    world: Intracomm, calls: dict[str, Call], seconds: float, least: int = LEAST_ROUNDS
) -> dict[str, list[float]]:
    """Time several calls in turns; every rank calls this.

    Each round takes one sample of every call. Successive rounds begin with successive calls. Quick
    calls are repeated in a sample, which is then the mean time of a call.

    Args:
        world: an mpi4py communicator.
        calls: the calls to time, by name.
        seconds: about how long to measure, in at least `least` and at most MOST_ROUNDS rounds.

    Returns:
        For each name the seconds of its call in each round, on the slowest rank; the same on every
        rank.
    """
    repeats, spent = {}, 0.0
    for name, call in calls.items():
        sample(world, call)  # the first call touches its memory
        took = max(world.allgather(sample(world, call)))
        repeats[name] = max(1, min(MOST_REPEATS, int(SAMPLE_SECONDS / max(took, 1e-9))))
        spent += took * repeats[name]
    rounds = max(least, min(MOST_ROUNDS, int(seconds / spent)))
    names = list(calls)
    mine: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds):
        first = number % len(names)
        for name in (*names[first:], *names[:first]):
            mine[name].append(sample(world, calls[name], repeats[name]))
    ranks = world.allgather(mine)
    return {
        name: [max(together) for together in zip(*(rank[name] for rank in ranks), strict=True)]
        for name in names
    }


def sample(world: Intracomm, call: Call, repeats: int = 1) -> float:
    """Wait for all ranks, make `repeats` calls, and return their mean seconds on this rank."""
    world.Barrier()
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    return max(time.perf_counter() - start, 1e-9) / repeats


def vector(op: str, nbytes: int, group: Communicator) -> torch.Tensor:
    """Return this rank's float32 input of `op`: nbytes bytes, or for all_gather nbytes / P.

    For all_gather and all_to_all it is empty if there are fewer elements than ranks.
    """
    part = nbytes // 4 // group.size
    shapes = {"all_gather": (part,), "all_to_all": (group.size, 1, part)}
    return torch.ones(shapes.get(op, (nbytes // 4,)), device="cpu")


def arguments(op: str) -> dict[str, Any]:
    """Return the keyword arguments that `op` needs beside the tensor and the communicator."""
    return {"split_dim": 0, "concat_dim": 1} if op == "all_to_all" else {}


def _pair(nodes: tuple[int, ...], kind: str) -> tuple[int, int] | None:
    """Return the first pair of ranks on one node ("node") or on two ("network"), or None."""
    pairs = combinations(range(len(nodes)), 2)
    return next(((a, b) for a, b in pairs if (nodes[a] == nodes[b]) == (kind == "node")), None)


def _curve(
    world: Intracomm, call: Callable[[int], Call], *, share: float, sizes: Iterable[int]
) -> Curve:
    """Return the median seconds of `call(size)` for each size in bytes.

    Every rank of `world` calls this, so that all use the memory at the same time. `share` is the
    number of seconds to spend on each size.
    """
    return Curve(tuple((size, _median(world, call(size), share)) for size in sizes))


def _exchange(group: Communicator, pair: tuple[int, int], size: int) -> Call:
    """Return a function with which two ranks send each other `size` bytes.

    Both messages travel at once. On other ranks the function does nothing.
    """
    peers = [rank for rank in pair if rank != group.rank] if group.rank in pair else []
    transport = group.transport
    sends, recvs = (
        transport.bind(
            [(peer, torch.ones(size, dtype=torch.uint8, device="cpu")) for peer in peers]
        )
        for _ in range(2)
    )
    return lambda: wait(transport.post(sends=sends, recvs=recvs, tag=group.next_tag()), group.poll)


def _local(kind: str, size: int) -> Call:
    """Return a function that makes a sum ("add") or a copy ("copy") of `size` bytes."""
    into, one, other = (torch.ones(size // 4, device="cpu") for _ in range(3))
    return {"add": partial(torch.add, one, other, out=into), "copy": partial(into.copy_, one)}[kind]


def _binding(world: Intracomm, group: Communicator) -> tuple[float, float]:
    """Return the seconds to prepare a collective: (without any step, additional for each step)."""
    found = []
    for name, nbytes in BOUND.items():
        x, scratch = torch.ones(nbytes // 4, device="cpu"), Scratch(group.device)
        moves = operation("all_reduce", group.rank, group.size, (x.numel(),), itemsize=x.itemsize)
        bind = partial(execution.bind, group, moves, x, x, name, scratch)
        bound = bind()
        assert isinstance(bound, execution.BoundProgram)

        def again(bind: Callable[[], execution.Ready] = bind) -> None:
            bind().release()

        steps = max(world.allgather(len(bound.steps)))  # the slowest rank has the most
        found.append((steps, _median(world, again, 0.0)))
    (few, short), (many, long) = found
    step = max(long - short, 0.0) / (many - few)
    return max(short - few * step, 0.0), step


def _median(world: Intracomm, call: Call, seconds: float) -> float:
    return statistics.median(interleaved(world, {"": call}, seconds)[""])


def told(*, measured: bool = False) -> tuple[bool, str]:
    """Return whether there are constants for "auto" here, and the text that `doctor` prints.

    With `measured` the text is about the file that `keep` has written, whatever SP_TUNING names.
    """
    choice = "auto" if measured else os.environ.get(VARIABLE) or "auto"
    otherwise = "algorithm='auto' uses the MPI library's algorithms"
    if choice == "off":
        return False, f"off, by {VARIABLE}; {otherwise}"
    try:
        own = fingerprint() if choice == "auto" else None
        path = default_path(own) if own else Path(choice)
        tuning = load(path, own)
    except FileError as error:
        if choice != "auto":  # a mesh refuses it
            return False, str(error)
        none = "none: " * isinstance(error.__context__, FileNotFoundError)
        return False, f"{none}{error}; {otherwise}. To measure: python -m sp_core doctor --measure"
    median, worst = tuning.error
    return (
        True,
        f"alpha {tuning.alpha * 1e6:.1f} us, 1/beta {1e-9 / tuning.beta:.1f} GB/s, "
        f"1/gamma {1e-9 / tuning.add.per_byte:.1f} GB/s ({', '.join(tuning.links)}), "
        f"measured {tuning.measured_at} on {len(tuning.nodes)} ranks; {path}; "
        f"times that were not measured are predicted to {median:.0%} (median) or "
        f"{worst:.0%} (95th percentile)",
    )


def keep(world: Intracomm) -> None:
    """Measure the constants of this machine, and let rank 0 write them to a file.

    Every rank calls this. First rank 0 checks that it can write to the file's folder.

    Raises:
        FileError: the constants cannot be written; on every rank.
        ValueError: `world` has a single rank.
    """

    def try_to_write(path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path.parent).close()

    _on_the_first(world, try_to_write)
    _on_the_first(world, partial(save, measure(world)))


def _on_the_first(world: Intracomm, write: Callable[[Path], None]) -> None:
    """Call `write` with the path of the file on rank 0.

    If it raises an OSError there, or if there is no such path, raise a FileError on every rank.
    """
    problem, path = "", None
    if world.rank == 0:
        try:
            path = default_path(fingerprint())
            write(path)
        except FileError as error:
            problem = str(error)
        except OSError as error:
            problem = f"{path} cannot be written ({error}). Set SP_TUNING_DIR to a folder that can."
    if problem := world.bcast(problem):
        raise FileError(problem)
