"""Compare policies for sequences of unequal length on P ranks: balance, and time of a prefill.

Each policy runs once under a counter of operations, its logits are compared, then all are timed.
The workload has a sequence for each file of the standard library, with a 64th of its bytes. Exit
code: 0 if every policy computed the right logits and the balanced one's counted operations have
max/mean below 1.05; 1 if not, or if a launch failed; 2 for options that cannot be run.
"""

import argparse
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.contests.contest import Contest, Entry, Part, Wrong, at_least, unmet
from benchmarks.corpus import source_files
from benchmarks.launching import Record, about, numbers_of_ranks
from benchmarks.machine import facts
from benchmarks.reporting.tables import make
from benchmarks.sample import makespans, race, turn
from benchmarks.statistics import WITHIN, Interval, Requirement, certain, exact_interval, ratio
from benchmarks.worker import Intracomm, Rank
from sp_core.llama import Decoder, Llama, LlamaConfig, create
from sp_core.llama.unequal import collect, compute, work_of
from sp_core.machine import cores
from sp_core.mesh import Mesh
from sp_core.scheduling import (
    POLICIES,
    Assignment,
    bubble_share,
    one_forward_one_backward,
    picture,
    prefill_only,
    timeline,
)
from sp_core.scheduling.assignment import imbalance

WHOLE = "round_robin"
"""The policy whose logits the others are compared with: it shards nothing."""

NOT_RUN = "padded"
"""The policy that is only planned: it would compute a hundred times as much."""

ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
SHORTER = 64
"""The length of a sequence is that of its file in bytes over this, rounded up."""

CONFIG = LlamaConfig(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=176,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=1 << 20,
)
MICRO_BATCHES = (1, 2, 4, 8)
TOKENS, SAMPLES = 512, 5


def workload() -> list[list[int]]:
    """Return the tokens of each sequence, which are bytes."""
    return [list(text[: -(-len(text) // SHORTER)]) for text in source_files()]


def plans(sequences: Sequence[Sequence[int]], ranks: int) -> dict[str, Assignment]:
    """Return the plan that each policy makes for some sequences."""
    lengths, work = [len(tokens) for tokens in sequences], work_of(CONFIG)
    return {name: policy(lengths, ranks, work) for name, policy in POLICIES.items()}


def predicted(plan: Assignment) -> Record:
    """Return what the cost model predicts: loads of the ranks, shared sequences, useful share."""
    loads = plan.loads(work_of(CONFIG))
    useful = plan.useful(work_of(CONFIG)) / (max(loads) * plan.size)
    return {"loads": list(loads), "sharded": len(plan.sharded), "useful_share": useful}


def attention_operations(
    q: Sequence[int], k: Sequence[int], v: Sequence[int], *rest: Any, **options: Any
) -> int:
    """Count the operations of the fused kernel, which torch's counter does not know.

    The kernel computes two matrix products; if causal, for half of the square of scores.
    """
    batch, heads, queries, dim = q
    causal = options.get("is_causal", rest[1] if len(rest) > 1 else False)
    pairs = queries * (queries + 1) // 2 if causal else queries * k[2]
    return 4 * batch * heads * dim * pairs


def count(model: Llama, sequences: list[list[int]], plan: Assignment) -> tuple[int, Tensor]:
    """Return the operations of this rank, and the logits of all sequences."""
    known = {ATTENTION: attention_operations}
    with FlopCounterMode(display=False, custom_mapping=known) as counter:
        rows = compute(model, sequences, plan)
    return counter.get_total_flops(), collect(model, rows, len(sequences))


def measure(setting: Record, rank: Rank) -> Record:
    """Run one launch: count operations and check logits of each policy, and time all policies."""
    world, sequences = rank.world, workload()
    made = plans(sequences, world.size)
    del made[NOT_RUN]
    with Mesh(world, check="off", ring=world.size) as mesh:
        said = facts(world, mesh.device, mesh["ring"].transport.name)
        model = create(CONFIG, mesh)
        counted = {name: count(model, sequences, plan) for name, plan in made.items()}
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
        if setting["rounds"]:
            runners = {
                name: partial(turn, world, partial(compute, model, sequences, made[name]))
                for name in sorted(made)
            }
            for name, spans in race(world, runners, setting["rounds"], 0).items():
                policies[name]["spans_s"] = spans
    return {**said, "policies": policies, "bubbles": bubbles(world) if setting["rounds"] else []}


def bubbles(world: Intracomm) -> list[Record]:
    """Return for numbers of micro-batches the share of waiting: measured, by slots, by formula.

    A stage waits for hidden states, and in the end for the logits, which the last stage broadcasts.
    Its counters tell the seconds.
    """
    with Mesh(world, check="off", pp=world.size) as mesh:
        model = create(replace(CONFIG, num_hidden_layers=2 * world.size), mesh)
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
    """Return the share of waiting in the time of all stages, from first start to last end."""
    decoder = Decoder(model, [TOKENS] * count, micro_batches=count)
    tokens = [
        [(7 * t + number) % model.config.vocab_size for t in range(TOKENS)]
        for number in range(count)
    ]
    counters = model.grid.stages.counters
    counters.reset()
    runners = {"prefill": partial(turn, world, partial(decoder.prefill, tokens))}
    (whole,) = makespans(race(world, runners, 1, 0)["prefill"])
    waited = sum(counters[name].seconds for name in ("pipeline", "broadcast"))
    return float(sum(world.allgather(waited)) / (whole * world.size))


BALANCED = "balanced"
BOUND = 1.05
"""The bound of max/mean, over the ranks, of the counted operations of the balanced policy."""

COLUMNS = (
    "policy",
    "shared",
    "planned",
    "counted",
    "useful",
    "seconds",
    "balanced is faster by",
    "max/mean of seconds",
    "",
)
LEGEND = (
    "max/mean over the ranks of floating-point operations: planned by the cost model, counted "
    "while computing. useful: operations on the caller's tokens, over ranks x the most loaded "
    "rank. balanced is faster by: time of this policy over that of the balanced one, median over "
    "the rounds with its exact interval; time is the last rank's end minus the first one's start. "
    + WITHIN
)


def plan(options: argparse.Namespace) -> tuple[Record, list[Entry]]:
    """Return the number of rounds, and a launch for each number of ranks.

    With more ranks than cores nothing is timed.
    """
    entries = []
    for ranks in numbers_of_ranks(options.ranks):
        setting = {"ranks": ranks, "rounds": options.rounds if ranks <= cores() else 0}
        known = {"setting": setting, **planned(workload(), ranks)}
        entries.append(Entry(f"P = {ranks}", ranks, setting, known))
    return {"rounds": options.rounds}, entries


def planned(sequences: Sequence[Sequence[int]], ranks: int) -> Record:
    """Return a launch's numbers of sequences and tokens, and the predictions for each policy."""
    found = {name: predicted(plan) for name, plan in plans(sequences, ranks).items()}
    return {"sequences": len(sequences), "tokens": sum(map(len, sequences)), "planned": found}


def throughput(record: Record, name: str) -> Interval | None:
    """Return the time of a policy over that of the balanced one; None if nothing was timed."""
    spans = [record["policies"].get(one, {}).get("spans_s") for one in (name, BALANCED)]
    return None if None in spans else ratio(*map(makespans, spans))


def counted(policy: Record, name: str) -> Requirement:
    """Return the requirement on the operations that a policy's ranks have counted.

    A plan always gives the same numbers; with "dynamic" they depend on the ranks' speed.
    """
    value = imbalance(policy["counted"])
    found = exact_interval([value]) if name == "dynamic" else certain(value)
    return Requirement("max/mean of the counted operations", "<=", BOUND, found)


def show(document: Record) -> Iterator[Part]:
    """Yield the tables of all launches, and a complaint for each fault."""
    for record in document["launches"]:
        ranks = record["setting"]["ranks"]
        title = f"{record['sequences']} sequences, {record['tokens']} tokens, P = {ranks}"
        yield make(title, COLUMNS, [_cells(record, name) for name in record["planned"]], LEGEND)
        if record["bubbles"]:
            kinds = ("formula", "counted", "measured")
            rows = [
                (str(row["micro_batches"]), *(f"{row[kind]:.1%}" for kind in kinds))
                for row in record["bubbles"]
            ]
            columns = ("micro-batches", "formula", "counted slots", "measured")
            yield make(f"pipeline of {ranks} stages, forward", columns, rows)
            shown = picture(timeline(one_forward_one_backward(ranks, 4)))
            yield f"1F1B with 4 micro-batches, a prime for a backward:\n{shown}"
        for name, policy in record["policies"].items():
            if not policy["error"] <= policy["limit"]:
                text = "logits differ by {error:.2e}, allowed are {limit:.2e}".format(**policy)
                yield Wrong(f"P = {ranks}, {name}: {text}")
            if name == BALANCED:
                yield from unmet([counted(policy, name)], f"P = {ranks}, {name}")


def _cells(record: Record, name: str) -> tuple[str, ...]:
    plan, found = record["planned"][name], record["policies"].get(name, {})
    mark = counted(found, name).mark if found and name in (BALANCED, "dynamic") else ""
    planned = f"{imbalance(plan['loads']):.4f}"
    operations = f"{imbalance(found['counted']):.4f}" if found else "-"
    timed = ("-", "-", "-")
    if spans := found.get("spans_s"):
        rounds = [[end - start for start, end in ranks] for ranks in zip(*spans, strict=True)]
        shares = exact_interval([imbalance(seconds) for seconds in rounds])
        seconds = exact_interval(makespans(spans)).median
        timed = (f"{seconds:.2f}", str(throughput(record, name)), f"{shares.median:.3f}")
    useful = f"{plan['useful_share']:.1%}"
    return (name, str(plan["sharded"]), planned, operations, useful, *timed, mark)


OPTIONS = {
    "--ranks": about(
        default="2,4", metavar="P,P,...", help="numbers of ranks (default: %(default)s)"
    ),
    "--rounds": about(
        type=at_least(0), default=6, metavar="N", help="timed rounds (default: %(default)s)"
    ),
}
balance = Contest(
    *("balance", __doc__, OPTIONS, plan, "benchmarks.contests.balance:measure", show),
    file="balance.json",
    timeout=600.0,
)
