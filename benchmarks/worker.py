"""One rank of one case: `mpiexec -n P python -m mpi4py -m benchmarks.worker RUN_DIR`.

RUN_DIR holds `case.json`. Rank 0 writes `progress` while it works and `record.json` at the end. An exception on any rank ends all
of them, because `-m mpi4py` calls `MPI_Abort`.
"""

from __future__ import annotations

import functools
import json
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from benchmarks import inputs, ranks, single
from benchmarks.case import Case
from benchmarks.measure import Samples, peak_memory, timed
from sp_core.collectives.api import all_gather
from sp_core.communicator import Communicator
from sp_core.mask import Mask
from sp_core.mesh import Mesh
from sp_core.nn.layers import TransformerBlock
from sp_core.schemes import allgather_kv_attention
from sp_core.sharding import Sharding

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm


class Run:
    """Everything that one rank needs to carry a case out.

    Args:
        case: what to compute.
        world: all ranks.
        folder: where rank 0 reports.
    """

    def __init__(self, case: Case, world: Intracomm, folder: Path) -> None:
        self.case = case
        self.world = world
        self.folder = folder
        self.dtype: torch.dtype = getattr(torch, case.dtype)
        self.device = ranks.device(case.device, world, share_gpu=case.share_gpu)
        self.mesh = Mesh(world, device=self.device, transport=case.transport, check="off", sp=case.ranks)
        self.comm: Communicator = self.mesh["sp"]
        self.sharding: Sharding = getattr(Sharding, case.layout)(case.seq, case.ranks)
        self.block = self._make_block()
        self.x = inputs.tokens(case, self.sharding.positions(world.rank)).to(self.device, self.dtype)

    def step(self) -> Tensor:
        """The forward pass that is timed, (B, S/P, E)."""
        with torch.no_grad():
            y: Tensor = self.block(self.x, sharding=self.sharding)
        return y

    def sync(self) -> None:
        """Wait until the device has done everything."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def tell(self, phase: str, done: int = 0, total: int = 0) -> None:
        """Say what is going on; the driver shows it."""
        if self.world.rank == 0:
            (self.folder / "progress").write_text(json.dumps({"phase": phase, "done": done, "total": total}))

    def attend(self, q: Tensor, *args: Any, **kwargs: Any) -> Any:
        """The scheme, from a moment when the device is idle: else its queue of kernels would be timed as communication."""
        self.sync()
        return allgather_kv_attention(q, *args, **kwargs)

    def _make_block(self) -> TransformerBlock:
        case = self.case
        block = TransformerBlock(
            case.hidden,
            case.heads,
            num_kv_heads=case.kv_heads,
            ffn_hidden=case.ffn,
            comm=self.comm,
            attention=self.attend,
            mask=Mask(causal=case.causal),
            device=self.device,
            dtype=self.dtype,
        )
        inputs.fill(block, case.seed)
        return block


def main(folder: Path) -> None:
    """Carry out the case that `folder` describes."""
    from mpi4py import MPI

    case = Case.from_dict(json.loads((folder / "case.json").read_text()))
    world = MPI.COMM_WORLD
    if world.size != case.ranks:
        raise SystemExit(
            f"this MPI job has {world.size} ranks, {case.ranks} were launched: the launcher belongs to another MPI than mpi4py's. "
            "Use the mpiexec beside this Python, or tell srun which one it is (srun --mpi=list)."
        )
    torch.set_num_threads(ranks.THREADS)
    torch.set_float32_matmul_precision("highest")  # no TF32
    run = Run(case, world, folder)
    record = measure(run)
    if record is not None:
        (folder / "record.json").write_text(json.dumps(record, allow_nan=False))
    run.mesh.free()


def measure(run: Run) -> dict[str, Any] | None:
    """Check the output, then time the step; the record on rank 0, None elsewhere."""
    run.tell("checking the output against a single device")
    verdict = _check(run)
    if not verdict["passed"]:
        return {"status": "wrong", "check": verdict} if run.world.rank == 0 else None
    steps, traffic = _time_steps(run)
    run.tell("timing the AllGather")
    gather = _time_gather(run)
    peak, method = peak_memory(run.step, [*run.block.state_dict().values(), run.x], run.device)
    peaks = run.world.gather(peak)
    facts = ranks.facts(run.world, run.device, run.comm.transport.name)
    if run.world.rank != 0:
        return None
    assert peaks is not None
    timing = {"warmup": run.case.warmup, **steps.as_dict()}
    return {
        "status": "ok",
        **facts,
        "timing": timing,
        "comm": _communication(run.case, steps, traffic, gather),
        "memory": {"peak_bytes_per_rank": peaks, "peak_bytes": max(peaks), "method": method},
        "work": {"flops": run.case.flops, "tokens": run.case.tokens},
        "check": verdict,
    }


def _check(run: Run) -> dict[str, Any]:
    """The verdict on the gathered output, the same on every rank."""
    verdict: dict[str, Any] | None = None
    y = _gather_output(run)
    if y is not None:
        x = inputs.tokens(run.case, torch.arange(run.case.seq)).to(run.device, run.dtype)
        with torch.no_grad():
            alone = single.block(x, run.block.state_dict(), run.case)
            truth = single.exact(x, run.block.state_dict(), run.case)
            verdict = single.judge(y, alone, truth, run.case.longest_sum).as_dict()
    _wait_for_all(run.world)
    agreed: dict[str, Any] = run.world.bcast(verdict)
    return agreed


def _gather_output(run: Run) -> Tensor | None:
    """All tokens on rank 0, (B, S, E), brought there by MPI alone and put in place by position."""
    shard = run.step().float().cpu().contiguous()
    shards = run.world.gather(shard.numpy())
    if shards is None:
        return None
    y = torch.empty(run.case.batch, run.case.seq, run.case.hidden)
    for rank, part in enumerate(shards):
        y[:, run.sharding.positions(rank)] = torch.from_numpy(np.asarray(part))
    return y.to(run.device, run.dtype)


def _wait_for_all(world: Intracomm) -> None:
    """A barrier that leaves the core to rank 0, which checks alone."""
    request = world.Ibarrier()
    while not request.Test():
        time.sleep(0.002)


def _time_steps(run: Run) -> tuple[Samples, list[dict[str, float]]]:
    """Timings, and each rank's traffic in the last step."""
    counters = run.comm.counters
    total = run.case.iterations

    def step() -> None:
        counters.reset()
        run.step()

    run.tell("warming up")
    timed(step, run.world, run.case.warmup + 1, sync=run.sync)  # one more than asked for: the first touches all memory
    samples = timed(
        step,
        run.world,
        total,
        sync=run.sync,
        note=lambda: counters.total(control=True).seconds,
        progress=lambda done: run.tell("timing the step", done, total),
    )
    sent, control = counters.total(), counters["control"]
    traffic = {"calls": sent.calls, "messages": sent.messages, "bytes_sent": sent.bytes_sent, "control_calls": control.calls}
    return samples, run.world.allgather(traffic)


def _time_gather(run: Run) -> dict[str, Any] | None:
    """The K/V AllGather of the case by itself; None for a single rank, which has nobody to gather from."""
    case = run.case
    if case.ranks == 1:
        return None
    shape = (run.sharding.local_len(run.comm.rank), 2, case.batch, case.kv_heads, case.head_dim)
    mine = torch.ones(shape, device=run.device, dtype=run.dtype)
    gather = functools.partial(all_gather, mine, comm=run.comm, sizes=run.sharding.lengths)
    timed(gather, run.world, 3, sync=run.sync)
    samples = timed(gather, run.world, max(case.iterations, 10), sync=run.sync)
    received = case.kv_bytes * (case.ranks - 1) / case.ranks
    median = statistics.median(samples.makespans)
    return {
        "bytes_result": case.kv_bytes,
        "bytes_received_per_rank": received,
        "samples_s": samples.makespans,
        "ms": median * 1e3,
        "gb_per_s": received / median / 1e9,
    }


def _communication(case: Case, steps: Samples, traffic: list[dict[str, float]], gather: dict[str, Any] | None) -> dict[str, Any]:
    sent, expected = sum(rank["bytes_sent"] for rank in traffic), (case.ranks - 1) * case.kv_bytes
    if sent != expected:
        raise RuntimeError(f"the ranks sent {sent} bytes in one step; by formula it is (P-1) * K/V = {expected}.")
    shares = [seconds / makespan for seconds, makespan in zip(steps.max_notes, steps.makespans, strict=True)]
    return {
        "calls_per_step": traffic[0]["calls"],
        "control_calls_per_step": traffic[0]["control_calls"],
        "bytes_sent_per_step": sent,
        "bytes_formula": expected,
        "seconds": steps.max_notes,
        "share": statistics.median(shares),
        "all_gather": gather,
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]))
