"""One rank of one launch: `mpiexec -n P python -m mpi4py -m benchmarks.balance.worker FOLDER`.

FOLDER holds `setting.json`. Each policy is carried out once under a counter of operations, and its logits are compared with those
of sequences that are computed whole; then, if there are rounds, policies are timed in a new random order in each. Rank 0 writes
`record.json`. An exception on any rank ends all of them: `-m mpi4py` calls `MPI_Abort`.
"""

from __future__ import annotations

import gc
import json
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.balance.pipelined import bubbles
from benchmarks.balance.workload import NOT_RUN, Setting, plans
from benchmarks.peers.worker import redirect
from benchmarks.ranks import facts
from benchmarks.records import fingerprint
from sp_core.llama import Llama
from sp_core.llama.unequal import collect, compute
from sp_core.mesh import Mesh
from sp_core.scheduling import Plan

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

WHOLE = "round_robin"
"""The policy whose logits the others are compared with: it shards nothing."""
ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def attention_operations(q: Sequence[int], k: Sequence[int], v: Sequence[int], *rest: Any, **options: Any) -> int:
    """Operations of the two products of the fused kernel, which torch's counter does not know; half of a causal square."""
    batch, heads, queries, dim = q
    causal = options.get("is_causal", rest[1] if len(rest) > 1 else False)
    pairs = queries * (queries + 1) // 2 if causal else queries * k[2]
    return 4 * batch * heads * dim * pairs


class Field:
    """The policies on one model and workload.

    Args:
        setting: sizes.
        mesh: the ranks.
        world: the same ranks.
    """

    def __init__(self, setting: Setting, mesh: Mesh, world: Intracomm) -> None:
        self.world, self.setting = world, setting
        self.model: Llama = setting.model(mesh)
        self.sequences = setting.sequences()
        made = plans([len(tokens) for tokens in self.sequences], setting)
        self.plans = {name: plan for name, plan in made.items() if name != NOT_RUN}

    def count(self, plan: Plan) -> tuple[int, Tensor]:
        """Operations of this rank, and the logits of all sequences."""
        with FlopCounterMode(display=False, custom_mapping={ATTENTION: attention_operations}) as counter:
            rows = compute(self.model, self.sequences, plan)
        return counter.get_total_flops(), collect(self.model, rows, len(self.sequences))

    def sample(self, plan: Plan) -> tuple[float, float]:
        """Start and end of this rank's part."""
        self.world.Barrier()
        start = time.perf_counter()
        compute(self.model, self.sequences, plan)
        return start, time.perf_counter()

    def check(self) -> dict[str, Any]:
        """Operations by rank of each policy, and how far its logits are from those of whole sequences."""
        found = {name: self.count(plan) for name, plan in self.plans.items()}
        whole = found[WHOLE][1]
        limit = 2 * max(map(len, self.sequences)) ** 0.5 * torch.finfo(whole.dtype).eps / 2 * float(whole.abs().max())
        return {
            name: {"counted": self.world.allgather(count), "error": float((logits - whole).abs().max()), "limit": limit}
            for name, (count, logits) in found.items()
        }

    def race(self, rounds: int) -> dict[str, list[list[tuple[float, float]]]]:
        """Start and end of every sample of each policy, for each rank."""
        order = random.Random(self.setting.seed)
        spans: dict[str, list[tuple[float, float]]] = {name: [] for name in self.plans}
        for _ in range(rounds):
            gc.collect()
            for name in order.sample(sorted(self.plans), len(self.plans)):
                spans[name].append(self.sample(self.plans[name]))
        everyone = self.world.allgather(spans)
        return {name: [rank[name] for rank in everyone] for name in self.plans}


def run(setting: Setting, world: Intracomm) -> dict[str, Any]:
    """The record of this launch."""
    with Mesh(world, check="off", ring=world.size) as mesh:
        said = facts(world, mesh.device, mesh["ring"].transport.name)
        field = Field(setting, mesh, world)
        policies = field.check()
        if setting.rounds:
            gc.disable()
            for name, spans in field.race(setting.rounds).items():
                policies[name]["spans_s"] = spans
            gc.enable()
    with Mesh(world, check="off", pp=world.size) as mesh:
        stages = bubbles(setting, mesh, world) if setting.rounds else []
    print_of = fingerprint(said["env"], said["device"], said["transport"])
    return {**said, "fingerprint": print_of, "setting": setting.as_dict(), "policies": policies, "bubbles": stages}


def main(folder: Path) -> None:
    """Carry out the launch that `folder` describes."""
    from mpi4py import MPI

    redirect(folder)
    torch.set_num_threads(1)
    record = run(Setting(**json.loads((folder / "setting.json").read_text())), MPI.COMM_WORLD)
    if MPI.COMM_WORLD.rank == 0:
        (folder / "record.json").write_text(json.dumps(record, allow_nan=False))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
