"""Each policy once under a counter of operations, its logits compared with those of whole sequences; then they take turns."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.contests.balance.pipelined import bubbles
from benchmarks.contests.balance.workload import NOT_RUN, Setting, plans
from benchmarks.launching import Record
from benchmarks.machine import facts
from benchmarks.records import fingerprint
from benchmarks.sample import Span, race
from benchmarks.worker import Rank
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

    def sample(self, plan: Plan) -> Span:
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


def measure(values: Any, rank: Rank) -> Record:
    """Carry out one launch."""
    setting, world = msgspec.convert(values, Setting), rank.world
    with Mesh(world, check="off", ring=world.size) as mesh:
        said = facts(world, mesh.device, mesh["ring"].transport.name)
        field = Field(setting, mesh, world)
        policies = field.check()
        runners = {name: partial(field.sample, field.plans[name]) for name in sorted(field.plans)} if setting.rounds else {}
        for name, spans in race(world, runners, setting.rounds, setting.seed).items():
            policies[name]["spans_s"] = spans
    with Mesh(world, check="off", pp=world.size) as mesh:
        stages = bubbles(setting, mesh, world) if setting.rounds else []
    print_of = fingerprint(said["env"], said["device"], said["transport"])
    return {**said, "fingerprint": print_of, "policies": policies, "bubbles": stages}
