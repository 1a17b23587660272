"""How long the stages of a pipeline do nothing, measured while equal micro-batches go through."""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING, Any

import msgspec

from benchmarks.contests.balance.workload import Setting
from sp_core.communicator import Communicator
from sp_core.llama import Decoder, Llama
from sp_core.mesh import Mesh
from sp_core.scheduling import bubble_share, prefill_only, timeline

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

MICRO_BATCHES = (1, 2, 4, 8)
TOKENS = 512
SAMPLES = 5


def bubbles(setting: Setting, mesh: Mesh, world: Intracomm) -> list[dict[str, Any]]:
    """For each number of micro-batches the share of waiting by the clock, by counting slots, and by formula.

    The waiting of a stage is what its counters say: of hidden states, and in the end of the logits, which the last stage hands out.
    """
    model = msgspec.structs.replace(setting, layers=2 * mesh.size).model(mesh)
    found = []
    for count in MICRO_BATCHES:
        samples = [_sample(model, count, world) for _ in range(SAMPLES + 1)][1:]
        found.append(
            {
                "micro_batches": count,
                "measured": statistics.median(samples),
                "counted": timeline(prefill_only(mesh.size, count)).bubble,
                "formula": bubble_share(mesh.size, count),
            }
        )
    return found


def _sample(model: Llama, count: int, world: Intracomm) -> float:
    """The share of all stages' time that they wait for each other, from the first start to the last end."""
    decoder = Decoder(model, [TOKENS] * count, micro_batches=count)
    tokens = [[(7 * t + number) % model.config.vocab_size for t in range(TOKENS)] for number in range(count)]
    stages = model.grid.stages
    waited = _waited(stages)
    world.Barrier()
    start = time.perf_counter()
    decoder.prefill(tokens)
    end = time.perf_counter()
    sums = world.allgather((start, end, _waited(stages) - waited))
    whole = max(stop for _, stop, _ in sums) - min(begin for begin, _, _ in sums)
    share: float = sum(wait for *_, wait in sums) / (whole * len(sums))
    return share


def _waited(stages: Communicator) -> float:
    """Seconds so far that this stage has waited for others."""
    return sum(stages.counters[name].seconds for name in ("pipeline", "broadcast"))
