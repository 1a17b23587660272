"""Prepare contestants for a collective of a float32 vector on two ranks, and time them in turns.

A contestant is one line in `CONTESTANTS`: a name, and a function that prepares its call and result
(`Runner`). The function returns None if the contestant lacks the collective, or something that it
needs is missing.
"""

import contextlib
import gc
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

import sp_core as sp
from benchmarks.contests.collectives.table import MEDIAN, MICROSECONDS, OURS, WORST, heats
from benchmarks.launching import Record
from benchmarks.machine import facts
from benchmarks.worker import Intracomm, Rank
from sp_core import measuring
from sp_core.programs import ALGORITHMS
from sp_core.tuning import Tuning, decide, modelled, predict
from tests.conformance.gloo import Gloo
from tests.oracle.collective_cases import DEFINITIONS


@dataclass(frozen=True)
class Field:
    """The task that all contestants of a heat get.

    Args:
        world: all ranks; the MPI library's own calls use this communicator.
        mesh: the same ranks, with the axis "all".
        op: the name of the collective.
        x: this rank's input, flat; its piece in an all-gather or a ring exchange.
    """

    world: Intracomm
    mesh: sp.Mesh
    op: str
    x: Tensor

    @property
    def received(self) -> int:
        """Return the elements of the result on this rank."""
        size, own = self.world.size, self.x.numel()
        return {"all_gather": own * size, "reduce_scatter": own // size}.get(self.op, own)


@dataclass(frozen=True)
class Runner:
    """A prepared call, its result as a flat tensor, and our bytes of scratch, 0 for others."""

    call: Callable[[], object]
    result: Callable[[], Tensor]
    scratch: Callable[[], int] = lambda: 0


Maker = Callable[[Field], Runner | None]


def library(field: Field) -> Runner:
    """Prepare mpi4py's own call on NumPy arrays, the quickest call of MPI from Python."""
    world, send = field.world, field.x.numpy()
    out = field.x.clone() if field.op == "broadcast" else torch.zeros(field.received)
    recv, right, left = out.numpy(), (world.rank + 1) % world.size, (world.rank - 1) % world.size
    calls: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: world.Allreduce(send, recv),
        "reduce_scatter": lambda: world.Reduce_scatter_block(send, recv),
        "all_gather": lambda: world.Allgather(send, recv),
        "all_to_all": lambda: world.Alltoall(send, recv),
        "reduce": lambda: world.Reduce(send, recv if world.rank == 0 else None, root=0),
        "shift": lambda: world.Sendrecv(send, right, 0, recv, left, 0),
        "broadcast": lambda: world.Bcast(recv, 0),
    }
    return Runner(calls[field.op], lambda: out)


def plan(algorithm: str, dtype: torch.dtype = torch.float32, *, shared: bool = False) -> Maker:
    """Return a maker of our plans by an algorithm; if `shared`, on a tensor in shared memory."""

    def make(field: Field) -> Runner | None:
        if algorithm != "auto" and algorithm not in ALGORITHMS.get(field.op, ()):
            return None
        comm = field.mesh["all"]
        x = field.x.to(dtype)
        x = in_shared_memory(x, field) if shared else x
        x = x.view(field.world.size, 1, -1) if field.op == "all_to_all" else x
        made = sp.plan(field.op, x, comm=comm, algorithm=algorithm, **measuring.arguments(field.op))
        if algorithm not in ("auto", made.algorithm):
            return None  # this communicator lacks the algorithm
        return Runner(
            made.run,
            lambda: made.run().reshape(-1).float(),
            lambda: comm.counters[field.op].scratch,
        )

    return make


def in_shared_memory(x: Tensor, field: Field) -> Tensor:
    """Copy a tensor into memory that the ranks share."""
    there = sp.shared_empty(x.shape, comm=field.mesh["all"], dtype=x.dtype)
    there.copy_(x)
    sp.fence(comm=field.mesh["all"])
    return there


def on_input(field: Field, x: Tensor, compute: Callable[[], Tensor]) -> Tensor:
    """Set x, in shared memory, to this rank's input, compute on all inputs, then set x to zero.

    Timed calls sum x in place again and again, and sums of sums would soon be infinite.
    """
    fence = partial(sp.fence, comm=field.mesh["all"])
    x.copy_(field.x)
    fence()
    found = compute()
    fence()
    x.zero_()
    fence()
    return found


def summed_in_place(field: Field) -> Runner | None:
    """Prepare our all-reduce in place, of a tensor in shared memory."""
    if field.op != "all_reduce":
        return None
    comm, x = field.mesh["all"], in_shared_memory(field.x, field)
    made = sp.plan("all_reduce_", x, comm=comm, algorithm="window")
    result = partial(on_input, field, x, lambda: made.run().clone())
    return Runner(made.run, result, lambda: comm.counters["all_reduce"].scratch)


def read_in_place(field: Field) -> Runner | None:
    """Prepare a ring exchange without any copy: the neighbour's tensor is read in place."""
    if field.op != "shift":
        return None
    comm = field.mesh["all"]
    theirs = sp.peer(in_shared_memory(field.x, field), (comm.rank - 1) % comm.size, comm=comm)
    return Runner(partial(sp.fence, comm=comm), lambda: theirs)


def barrier(field: Field) -> Runner:
    """Prepare MPI's barrier: a read in place cannot take less time."""
    wanted = expected(field).float()
    return Runner(field.world.Barrier, lambda: wanted)


def memory_floor(field: Field) -> Runner | None:
    """Prepare the memory accesses of a sum in place on two ranks, without any waiting."""
    if field.op != "all_reduce" or field.world.size != 2:
        return None
    half, rank = field.x.numel() // 2, field.world.rank
    x = in_shared_memory(field.x, field)
    mine, theirs = x.numpy(), sp.peer(x, 1 - rank, comm=field.mesh["all"]).numpy()
    own, other = (slice(0, half), slice(half, None))[:: 1 if rank == 0 else -1]

    def call() -> None:
        np.add(mine[own], theirs[own], out=mine[own])
        np.copyto(mine[other], theirs[other])

    return Runner(call, partial(on_input, field, x, lambda: torch.from_numpy(mine + theirs)))


def gloo(field: Field) -> Runner | None:
    """Prepare torch.distributed's collective over gloo."""
    x, out = field.x, torch.zeros(field.received)
    both = x.clone()
    calls: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(both),
        "reduce_scatter": lambda: dist.reduce_scatter(out, list(x.chunk(field.world.size))),
        "all_gather": lambda: dist.all_gather(list(out.chunk(field.world.size)), x),
        "all_to_all": lambda: dist.all_to_all_single(out, x),
        "broadcast": lambda: dist.broadcast(both, 0),
        "reduce": lambda: dist.reduce(both, 0),
    }
    if field.op not in calls or not dist.is_initialized():
        return None
    in_place = field.op in ("all_reduce", "broadcast", "reduce")

    def result() -> Tensor:
        both.copy_(x)
        calls[field.op]()
        return both if in_place else out

    return Runner(calls[field.op], result)


CONTESTANTS: dict[str, Maker] = {
    "library": library,
    "plan of the library": plan("mpi"),
    "auto": plan("auto"),
    **{name: plan(name) for name in OURS},
    "window": plan("window", shared=True),
    "window, staged": plan("window"),
    "memory floor": memory_floor,
    "window, in place": summed_in_place,
    "read in place": read_in_place,
    "barrier": barrier,
    "bf16 segmented_ring": plan("segmented_ring", torch.bfloat16),
    "bf16 ring": plan("ring", torch.bfloat16),
    "bf16 window, staged": plan("window", torch.bfloat16),
    "gloo": gloo,
}


def expected(field: Field) -> Tensor:
    """Return the result in float64; it is empty if this rank receives nothing."""
    inputs = field.world.allgather(field.x.numpy().astype(np.float64))
    everybody = [torch.from_numpy(x) for x in inputs]
    how = {"dim": 0, "offset": 1, "root": 0, "split_dim": 0, "concat_dim": 0}
    wanted: Tensor = DEFINITIONS[field.op](everybody, how)[field.world.rank]
    return wanted[:0] if field.op == "reduce" and field.world.rank else wanted


def error_of(found: Tensor, wanted: Tensor) -> float:
    """Return the largest error; its unit is the rounding of the exact result to bfloat16."""
    difference = (found[: wanted.numel()].double() - wanted).abs()
    roundings = difference / (wanted.abs() * 2**-8 + 1e-30)
    return float(roundings.max()) if wanted.numel() else 0.0


GLOO_SECONDS = 150.0
SHARE = 0.3  # seconds for each heat, beside the least number of rounds
LEAST_ROUNDS = 7
EXACT = 2**-16
"""The allowed error of float32, in roundings to bfloat16: one float32 rounding of a sum of two."""


def heat(
    world: Intracomm, mesh: sp.Mesh, op: str, nbytes: int, names: Iterable[str]
) -> dict[str, Any]:
    """Check and time some contestants. Return their samples in seconds and bytes of scratch."""
    count = nbytes // 4 // (world.size if op == "all_gather" else 1)
    generator = torch.Generator().manual_seed(world.rank)
    x = torch.randn(count, generator=generator).bfloat16().float()  # bf16 gets equal values
    field, counters = Field(world, mesh, op, x), mesh["all"].counters
    made = {name: CONTESTANTS[name](field) for name in names}
    runners = {name: runner for name, runner in made.items() if runner is not None}
    wanted, scratch = expected(field), {}
    for name, runner in runners.items():
        counters.reset()
        runner.call()
        error = float(np.max(world.allgather(error_of(runner.result(), wanted))))
        scratch[name] = max(world.allgather(runner.scratch()))
        if not error <= (1.0 if name.startswith("bf16") else EXACT):
            raise RuntimeError(
                f"{name}: {op} of {nbytes} bytes is off by {error:g} roundings to bfloat16"
            )
    gc.collect()
    calls = {name: runner.call for name, runner in runners.items()}
    return {"samples": measuring.interleaved(world, calls, SHARE, LEAST_ROUNDS), "scratch": scratch}


def measure(kind: str, rank: Rank) -> dict[str, Any]:
    """Run one launch: all heats of a kind; for the kind "regret", the choices of "auto"."""
    world = rank.world
    with (
        sp.Mesh(world, transport="window", tuning="off", check="off", all=world.size) as mesh,
        contextlib.ExitStack() as stack,
    ):
        record = facts(world, mesh.device, mesh["all"].transport.name)
        if kind == "regret":
            # sample every algorithm; the primitives are measured apart from these samples
            samples = (world, mesh["all"], CHOICE_SECONDS, JUDGED, CHOICE_ROUNDS)
            sizes = [x for x in JUDGED if x in FITTED]
            bare = measuring.primitives(world, mesh["all"], CHOICE_SECONDS / 4, sizes)
            cases = judged(bare, measuring.collectives(*samples))
            return {**record, "cases": cases, "summary": summary(cases)}
        if kind == "default":
            Gloo(rank.folder, world, GLOO_SECONDS)
            stack.callback(dist.destroy_process_group)
        return {
            **record,
            "heats": {name: heat(world, mesh, *contest) for name, contest in heats(kind).items()},
        }


FITTED = (*measuring.SIZES, 4**14)  # 64 bytes to 256 MiB, each four times the one before
# up to 16 MiB also the sizes between, at which nothing was fitted
JUDGED = (*(2**place for place in range(6, 25)), 4**13, 4**14)
CHOICE_SECONDS, CHOICE_ROUNDS = 0.08, 6
"""Seconds for each size and collective; and the least number of rounds, which may need more."""


def judged(bare: Tuning, samples: measuring.Samples) -> list[Record]:
    """Return for every collective and size the algorithm that constants choose, and the best one.

    Times are median seconds. "predicted" is the time that the constants predict for the choice, and
    "plain" the time that the model without corrections predicts.
    """
    fit = {
        op: {
            name: {size: x[::2] for size, x in by_size.items() if size in FITTED}
            for name, by_size in by_name.items()
        }
        for op, by_name in samples.items()
    }
    tuning, found = measuring.fitted(bare, fit), []
    for op, by_name in samples.items():
        for nbytes in next(iter(by_name.values())):
            seconds = measuring.typical(
                {name: by_size[nbytes][1::2] for name, by_size in by_name.items()}
            )
            name = decide(tuning, op, tuning.nodes, nbytes, among=tuple(by_name), planned=True)
            best = min(seconds, key=lambda other: seconds[other])
            found.append(
                {
                    "op": op,
                    "nbytes": nbytes,
                    "chosen": name,
                    "best": best,
                    "seconds": seconds[name],
                    "least": seconds[best],
                    "predicted": predict(tuning, op, name, tuning.nodes, nbytes),
                    "plain": modelled(tuning, op, name, tuning.nodes, nbytes),
                }
            )
    return found


def summary(found: Sequence[Record]) -> Record:
    """Return the regret of "auto" over all cases, and the errors of the predictions."""
    shares = [case["seconds"] / case["least"] - 1 for case in found]
    lost = [(case["seconds"] - case["least"]) * 1e6 for case in found]
    # a loss of at most MICROSECONDS does not count
    counting = [s * (us > MICROSECONDS) for s, us in zip(shares, lost, strict=True)]
    errors = ([abs(x[kind] / x["seconds"] - 1) for x in found] for kind in ("predicted", "plain"))
    regret, beyond, error, model = (
        {
            "median": statistics.median(values),
            "p95": float(np.quantile(values, 0.95, method="inverted_cdf")),
        }
        for values in (shares, counting, *errors)
    )
    return {
        "cases": len(found),
        **regret,
        "p95_beyond_microseconds": beyond["p95"],
        "reached": regret["median"] <= MEDIAN and beyond["p95"] <= WORST,
        "prediction_error": error,
        "model_error": model,
    }
