"""Run each policy once under a counter of operations, compare its logits, then time them all."""

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
from benchmarks.sample import Span, race
from benchmarks.worker import Intracomm, Rank
from sp_core.llama import Decoder, Llama, LlamaConfig, create
from sp_core.llama.unequal import collect, compute, work_of
from sp_core.mesh import Mesh
from sp_core.scheduling import POLICIES, Plan, bubble_share, prefill_only, timeline

WHOLE = "round_robin"
"""The policy whose logits the others are compared with: it shards nothing."""

NOT_RUN = "padded"
"""Planned only: it would compute a hundred times as much."""

ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
SHORTER = 64
"""The length of a sequence is that of its file in bytes over this, rounded up."""

MODEL = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1 << 20,
}
MICRO_BATCHES = (1, 2, 4, 8)
TOKENS, SAMPLES = 512, 5


class Setting(msgspec.Struct, frozen=True):
    """What a launch does.

    Args:
        ranks: of the launch.
        rounds: in which the policies take turns; 0 counts operations and times nothing.
        most: sequences that are taken from the workload, evenly spread; 0 for all.
        model: the sizes of the LLaMA.
    """

    ranks: int = 2
    rounds: int = 6
    most: int = 0
    model: dict[str, Any] = msgspec.field(default_factory=lambda: dict(MODEL))

    @property
    def config(self) -> LlamaConfig:
        """Return the architecture."""
        return LlamaConfig(**self.model)

    def sequences(self) -> list[list[int]]:
        """Return the tokens of each sequence, which are bytes."""
        texts = [list(text[: -(-len(text) // SHORTER)]) for text in source_files()]
        return texts if not self.most else texts[:: max(len(texts) // self.most, 1)][: self.most]

    def plans(self) -> dict[str, Plan]:
        """Return what each policy makes of the workload."""
        lengths, work = [len(tokens) for tokens in self.sequences()], work_of(self.config)
        return {name: policy(lengths, self.ranks, work) for name, policy in POLICIES.items()}

    def predicted(self, plan: Plan) -> Record:
        """Return the loads by the cost model, and the share of time that is worth its while."""
        work = work_of(self.config)
        loads = plan.loads(work)
        useful = plan.useful(work) / (max(loads) * plan.size) if max(loads) else 1.0
        return {"loads": list(loads), "sharded": len(plan.sharded), "useful_share": useful}


def attention_operations(
    q: Sequence[int], k: Sequence[int], v: Sequence[int], *rest: Any, **options: Any
) -> int:
    """Count operations of the fused kernel, which torch's counter does not know.

    These are two products, for half of a causal square.
    """
    batch, heads, queries, dim = q
    causal = options.get("is_causal", rest[1] if len(rest) > 1 else False)
    pairs = queries * (queries + 1) // 2 if causal else queries * k[2]
    return 4 * batch * heads * dim * pairs


def count(model: Llama, sequences: list[list[int]], plan: Plan) -> tuple[int, Tensor]:
    """Return the operations of this rank, and the logits of all sequences."""
    known = {ATTENTION: attention_operations}
    with FlopCounterMode(display=False, custom_mapping=known) as counter:
        rows = compute(model, sequences, plan)
    return counter.get_total_flops(), collect(model, rows, len(sequences))


def measure(values: Any, rank: Rank) -> Record:
    """Carry out one launch."""
    setting, world = msgspec.convert(values, Setting), rank.world
    sequences = setting.sequences()
    plans = {name: plan for name, plan in setting.plans().items() if name != NOT_RUN}
    with Mesh(world, check="off", ring=world.size) as mesh:
        said = facts(world, mesh.device, mesh["ring"].transport.name)
        model = create(setting.config, mesh)
        counted = {name: count(model, sequences, plan) for name, plan in plans.items()}
        whole = counted[WHOLE][1]
        unit = torch.finfo(whole.dtype).eps / 2
        limit = 2 * max(map(len, sequences)) ** 0.5 * unit * float(whole.abs().max())
        policies: dict[str, Record] = {
            name: {
                "counted": world.allgather(operations),
                "error": float((logits - whole).abs().max()),
                "limit": limit,
            }
            for name, (operations, logits) in counted.items()
        }

        def sample(plan: Plan) -> Span:
            world.Barrier()
            start = time.perf_counter()
            compute(model, sequences, plan)
            return start, time.perf_counter()

        if setting.rounds:
            runners = {name: partial(sample, plans[name]) for name in sorted(plans)}
            for name, spans in race(world, runners, setting.rounds, 0).items():
                policies[name]["spans_s"] = spans
    stages = bubbles(setting, world) if setting.rounds else []
    return {**said, "policies": policies, "bubbles": stages}


def bubbles(setting: Setting, world: Intracomm) -> list[Record]:
    """Return the share of waiting by the clock, by counting slots, and by formula.

    The waiting of a stage is what its counters say: of hidden states, and in the end of the logits,
    which the last stage hands out.
    """
    config = LlamaConfig(**setting.model | {"num_hidden_layers": 2 * world.size})
    with Mesh(world, check="off", pp=world.size) as mesh:
        model = create(config, mesh)
        return [
            {
                "micro_batches": count,
                "measured": statistics.median(
                    [waiting(model, count, world) for _ in range(SAMPLES + 1)][1:]
                ),
                "counted": timeline(prefill_only(mesh.size, count)).bubble,
                "formula": bubble_share(mesh.size, count),
            }
            for count in MICRO_BATCHES
        ]


def waiting(model: Llama, count: int, world: Intracomm) -> float:
    """Return the share of all stages' time, first start to last end, that they wait."""
    decoder = Decoder(model, [TOKENS] * count, micro_batches=count)
    vocab = model.config.vocab_size
    tokens = [[(7 * t + number) % vocab for t in range(TOKENS)] for number in range(count)]
    counters = model.grid.stages.counters
    counters.reset()
    world.Barrier()
    start = time.perf_counter()
    decoder.prefill(tokens)
    end = time.perf_counter()
    waited = sum(counters[name].seconds for name in ("pipeline", "broadcast"))
    starts, ends, waits = zip(*world.allgather((start, end, waited)), strict=True)
    return float(sum(waits) / ((max(ends) - min(starts)) * world.size))
