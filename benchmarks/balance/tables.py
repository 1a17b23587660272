"""From the record of a launch to what is shown: balance by policy, throughput as ratios, bubbles."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from benchmarks.peers.ratios import Ratio, summarized
from sp_core.scheduling.plan import imbalance

if TYPE_CHECKING:
    from rich.table import Table

Record = dict[str, Any]
BALANCED = ("balanced", "dynamic")
BOUND = 1.05
"""What max/mean of the counted operations of a balanced policy must stay under."""
LEGEND = (
    "max/mean over the ranks of floating-point operations: planned by the cost model, counted while computing. useful: operations\n"
    "on the caller's tokens, over ranks x the most loaded rank. balanced is faster by: time of this policy over that of the\n"
    "balanced one, median over the rounds with its exact interval; time is the last rank's end minus the first one's start."
)


def seconds(policy: Record) -> list[float]:
    """Time of each round, from the first rank's start to the last rank's end."""
    rounds = zip(*policy["spans_s"], strict=True)
    return [max(end for _, end in spans) - min(start for start, _ in spans) for spans in rounds]


def busy(policy: Record) -> list[float]:
    """max/mean of the ranks' own times, in each round."""
    return [imbalance([end - start for start, end in spans]) for spans in zip(*policy["spans_s"], strict=True)]


def throughput(record: Record, name: str) -> Ratio | None:
    """Throughput of the balanced policy over that of another one; None where nothing was timed."""
    policies = record["policies"]
    if "spans_s" not in policies.get(name, {}):
        return None
    pairs = zip(seconds(policies[name]), seconds(policies[BALANCED[0]]), strict=True)
    return summarized([other / ours for other, ours in pairs])


def balance(record: Record) -> Table:
    """All policies of a launch."""
    from rich.table import Table

    ranks = record["setting"]["ranks"]
    table = Table(title=f"{record['sequences']} sequences, {record['tokens']} tokens, P = {ranks}", title_justify="left")
    heads = ("policy", "shared", "planned", "counted", "useful", "seconds", "balanced is faster by", "max/mean of seconds")
    for place, head in enumerate(heads):
        table.add_column(head, justify="right" if place else "left")
    for name, plan in record["planned"].items():
        found = record["policies"].get(name, {})
        counted = imbalance(found["counted"]) if found else None
        timed = "spans_s" in found
        style = None if counted is None or name not in BALANCED else "green" if counted < BOUND else "red"
        table.add_row(
            name,
            str(plan["sharded"]),
            f"{imbalance(plan['loads']):.4f}",
            "-" if counted is None else f"{counted:.4f}",
            f"{plan['useful_share']:.1%}",
            f"{summarized(seconds(found)).median:.2f}" if timed else "-",
            str(throughput(record, name)) if timed else "-",
            f"{summarized(busy(found)).median:.3f}" if timed else "-",
            style=style,
        )
    return table


def bubbles(record: Record) -> Table:
    """The share of the stages' time in which they wait."""
    from rich.table import Table

    table = Table(title=f"pipeline of {record['setting']['ranks']} stages, forward", title_justify="left")
    for head in ("micro-batches", "formula", "counted slots", "measured"):
        table.add_column(head, justify="right")
    for row in record["bubbles"]:
        table.add_row(str(row["micro_batches"]), *(f"{row[name]:.1%}" for name in ("formula", "counted", "measured")))
    return table


def problems(records: Sequence[Record]) -> list[str]:
    """What must hold and does not."""
    found = []
    for record in records:
        where = f"P = {record['setting']['ranks']}"
        for name, policy in record["policies"].items():
            if not policy["error"] <= policy["limit"]:
                found.append(f"{where}, {name}: logits differ by {policy['error']:.2e}, allowed are {policy['limit']:.2e}")
            share = imbalance(policy["counted"])
            if name in BALANCED[:1] and not share < BOUND:
                found.append(f"{where}, {name}: max/mean of the counted operations is {share:.4f}, needed is below {BOUND}")
    return found
