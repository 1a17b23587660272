"""One rank of a traced step: `mpiexec -n P python -m mpi4py -m benchmarks.reporting.trace.worker REQUEST.json`.

Rank 0 writes the merged trace to the path that the request names.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from mpi4py import MPI
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks import inputs
from benchmarks.case import Case
from benchmarks.ranks import THREADS, device
from benchmarks.reporting.trace.clock import anchors, offset
from benchmarks.reporting.trace.merge import Event, Profile, merge
from benchmarks.reporting.trace.naming import Log
from sp_core.mask import Mask
from sp_core.mesh import Mesh
from sp_core.nn.layers import TransformerBlock
from sp_core.schemes import SCHEMES
from sp_core.sharding import Sharding

WARMUP = 2


class Step:
    """A transformer block, and one step of it.

    Args:
        request: `case`, `scheme` and `backward`.
        mesh: all ranks, as axis `sp`.
    """

    def __init__(self, request: dict[str, Any], mesh: Mesh) -> None:
        self.case = case = Case.from_dict(request["case"])
        self.comm = mesh["sp"]
        self._scheme, self._backward = request["scheme"], request["backward"]
        self._sharding: Sharding = getattr(Sharding, case.layout)(case.seq, case.ranks)
        self._block = TransformerBlock(
            case.hidden,
            case.heads,
            num_kv_heads=case.kv_heads,
            ffn_hidden=case.ffn,
            comm=self.comm,
            attention=self._attend,
            mask=Mask(causal=case.causal),
            device=self.comm.device,
            dtype=getattr(torch, case.dtype),
        )
        inputs.fill(self._block, case.seed)
        self._x = inputs.tokens(case, self._sharding.positions(self.comm.rank)).to(self.comm.device, getattr(torch, case.dtype))

    def __call__(self) -> None:
        """Forward, and backward if asked for."""
        with record_function("forward"), torch.set_grad_enabled(self._backward):
            y = self._block(self._x, sharding=self._sharding)
        if self._backward:
            with record_function("backward"):
                y.sum().backward()
            self._block.zero_grad()
        if self.comm.device.type == "cuda":
            torch.cuda.synchronize(self.comm.device)

    def _attend(self, *args: Any, **kwargs: Any) -> Any:
        with record_function(f"attention, {self._scheme}"):
            return SCHEMES[self._scheme](*args, **kwargs)


def main(request: dict[str, Any]) -> None:
    """Trace one step and let rank 0 write it."""
    torch.set_num_threads(THREADS)
    world, case = MPI.COMM_WORLD, Case.from_dict(request["case"])
    with Mesh(
        world, device=device(case.device, world, share_gpu=case.share_gpu), transport=case.transport, check="off", sp=case.ranks
    ) as mesh:
        step = Step(request, mesh)
        for _ in range(WARMUP):
            step()
        mine = _profiled(step, world)
    profiles = world.gather(mine)
    if profiles is not None:
        Path(request["out"]).write_text(json.dumps(merge(profiles, request["about"]), separators=(",", ":"), allow_nan=False))


def _profiled(step: Step, world: MPI.Intracomm) -> Profile:
    """One step of this rank, which all ranks begin together."""
    log, ahead = Log(step.comm), offset(world)
    with profile(activities=_activities(step.comm.device.type)) as profiler:
        marks = anchors()
        world.Barrier()
        with record_function("step"):
            step()
    where = f"{step.comm.device} of {MPI.Get_processor_name()}"
    return Profile(world.rank, where, _events(profiler), log.as_dicts(), marks, ahead)


def _activities(kind: str) -> list[ProfilerActivity]:
    return [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if kind == "cuda" else [])]


def _events(profiler: profile) -> list[Event]:
    """The events that the profiler would write into a file of its own."""
    with tempfile.TemporaryDirectory(prefix="sp_core-trace-") as folder:
        path = Path(folder) / "rank.json"
        profiler.export_chrome_trace(str(path))
        events: list[Event] = json.loads(path.read_text())["traceEvents"]
    return events


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
