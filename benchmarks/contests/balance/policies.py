"""Each policy once under a counter of operations, its logits compared with those of whole sequences; then they take turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.corpus import source_files
from benchmarks.launching import Record
from benchmarks.machine import facts
from benchmarks.records import fingerprint
from benchmarks.sample import Span, race
from benchmarks.worker import Intracomm, Rank
from sp_core.communicator import Communicator
from sp_core.llama import Decoder, Grid, Llama, LlamaConfig
from sp_core.llama.unequal import collect, compute, work_of
from sp_core.mesh import Mesh
from sp_core.nn.gradients import Placement
from sp_core.scheduling import POLICIES, Plan, Work, bubble_share, prefill_only, timeline

WHOLE = "round_robin"
"""The policy whose logits the others are compared with: it shards nothing."""
ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def attention_operations(
    q: Sequence[int], k: Sequence[int], v: Sequence[int], *rest: Any, **options: Any
) -> int:
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
        with FlopCounterMode(
            display=False, custom_mapping={ATTENTION: attention_operations}
        ) as counter:
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
        limit = (
            2
            * max(map(len, self.sequences)) ** 0.5
            * torch.finfo(whole.dtype).eps
            / 2
            * float(whole.abs().max())
        )
        return {
            name: {
                "counted": self.world.allgather(count),
                "error": float((logits - whole).abs().max()),
                "limit": limit,
            }
            for name, (count, logits) in found.items()
        }


def measure(values: Any, rank: Rank) -> Record:
    """Carry out one launch."""
    setting, world = msgspec.convert(values, Setting), rank.world
    with Mesh(world, check="off", ring=world.size) as mesh:
        said = facts(world, mesh.device, mesh["ring"].transport.name)
        field = Field(setting, mesh, world)
        policies = field.check()
        runners = (
            {name: partial(field.sample, field.plans[name]) for name in sorted(field.plans)}
            if setting.rounds
            else {}
        )
        for name, spans in race(world, runners, setting.rounds, setting.seed).items():
            policies[name]["spans_s"] = spans
    with Mesh(world, check="off", pp=world.size) as mesh:
        stages = bubbles(setting, mesh, world) if setting.rounds else []
    print_of = fingerprint(said["env"], said["device"], said["transport"])
    return {**said, "fingerprint": print_of, "policies": policies, "bubbles": stages}


MICRO_BATCHES = (1, 2, 4, 8)
TOKENS = 512
SAMPLES = 5


def bubbles(setting: Setting, mesh: Mesh, world: Intracomm) -> list[dict[str, Any]]:
    """For each number of micro-batches the share of waiting by the clock, by counting slots, and by formula.

    The waiting of a stage is what its counters say: of hidden states, and in the end of the logits,
    which the last stage hands out.
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
    tokens = [
        [(7 * t + number) % model.config.vocab_size for t in range(TOKENS)]
        for number in range(count)
    ]
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


SHORTER = 64
"""The length of a sequence is that of its file in bytes over this, rounded up."""
NOT_RUN = "padded"
"""Planned only: it would compute a hundred times as much."""
GAIN = 0.5  # width of the random weights, times 1/sqrt(fan in)


class Setting(msgspec.Struct, frozen=True):
    """What a launch does.

    Args:
        ranks: of the launch.
        rounds: in which the policies take turns; 0 counts operations and times nothing.
        hidden, heads, kv_heads, head_dim, ffn, layers: of the model.
        most: sequences that are taken from the workload, evenly spread; 0 for all.
        seed: of weights and order.
    """

    ranks: int = 2
    rounds: int = 6
    hidden: int = 64
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    ffn: int = 176
    layers: int = 2
    most: int = 0
    seed: int = 0

    @property
    def config(self) -> LlamaConfig:
        """The architecture."""
        return LlamaConfig(
            vocab_size=256,
            hidden_size=self.hidden,
            intermediate_size=self.ffn,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim,
            max_position_embeddings=1 << 20,
        )

    def sequences(self) -> list[list[int]]:
        """The tokens of each sequence, which are bytes."""
        texts = [list(text[: -(-len(text) // SHORTER)]) for text in source_files()]
        return texts if not self.most else texts[:: max(len(texts) // self.most, 1)][: self.most]

    def model(self, mesh: Mesh) -> Llama:
        """The model, with the same random weights on any mesh."""
        grid = Grid.of(mesh)
        model = Llama(self.config, grid)

        def draw(name: str, placement: Placement) -> Tensor:
            random = torch.Generator().manual_seed(self.seed + sum(name.encode()) * 131 + len(name))
            shape = placement.shape
            width = GAIN * shape[-1] ** -0.5 if len(shape) == 2 else 0.0
            return placement.take(
                torch.randn(shape, generator=random) * width + (len(shape) == 1), grid.tensor.rank
            )

        model.fill(draw)
        return model


def plans(lengths: list[int], setting: Setting) -> dict[str, Plan]:
    """What each policy makes of the workload."""
    return {
        name: policy(lengths, setting.ranks, work_of(setting.config))
        for name, policy in POLICIES.items()
    }


def predicted(plan: Plan, work: Work) -> dict[str, Any]:
    """Loads by the cost model, and the share of the ranks' time that goes into what was asked for."""
    loads = plan.loads(work)
    return {
        "loads": list(loads),
        "sharded": len(plan.sharded),
        "useful_share": plan.useful(work) / (max(loads) * plan.size) if max(loads) else 1.0,
    }
