"""Sequences of unequal length on P ranks: how balanced each policy is, and how much faster that makes a prefill.

The workload has a sequence for each file of the standard library, with a 64th of its bytes. Exit
code: 0 if every policy computed the right logits and the balanced one's counted operations have
max/mean below 1.05; 1 if not, or if a launch failed; 2 for options that cannot be run.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from benchmarks.contests.balance.policies import Setting, plans, predicted
from benchmarks.contests.contest import RESULTS, Entry, compete, new_document, refused
from benchmarks.launching import (
    Launch,
    Options,
    Record,
    UsageError,
    about,
    main,
    numbers_of_ranks,
    parse,
    writable,
)
from benchmarks.reporting import terminal
from benchmarks.reporting.tables import Table, make
from benchmarks.reporting.terminal import Console
from benchmarks.sample import makespans
from benchmarks.statistics import Interval, Requirement, exact_interval
from sp_core.llama.unequal import work_of
from sp_core.machine import cores
from sp_core.scheduling import one_forward_one_backward, picture, timeline
from sp_core.scheduling.plan import imbalance

BALANCED = ("balanced", "dynamic")
BOUND = 1.05
"""Bound of max/mean of the counted operations of a balanced policy."""

POLICIES = (
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
    "max/mean over the ranks of floating-point operations: planned by the cost model, counted while computing. useful: operations "
    "on the caller's tokens, over ranks x the most loaded rank. balanced is faster by: time of this policy over that of the "
    "balanced one, median over the rounds with its exact interval; time is the last rank's end minus the first one's start."
)
USUAL = Setting()
OPTIONS: Options = {
    "--ranks": about(
        default="2,4", metavar="P,P,...", help="numbers of ranks (default: %(default)s)"
    ),
    "--rounds": about(
        type=int, default=USUAL.rounds, metavar="N", help="timed rounds (default: %(default)s)"
    ),
    "--most": about(
        type=int, default=0, metavar="N", help="take only so many sequences; all if 0 (default)"
    ),
    "--seed": about(
        type=int, default=0, metavar="N", help="of weights and order (default: %(default)s)"
    ),
    "--out": about(
        type=Path, default=RESULTS / "balance.json", metavar="FILE", help="default: %(default)s"
    ),
    "--timeout": about(
        type=float, default=600.0, metavar="S", help="limit of a launch (default: %(default)g)"
    ),
}


def settings(options: argparse.Namespace) -> list[Setting]:
    """Return one launch for each number of ranks; with more ranks than cores nothing is timed.

    Raises:
        UsageError: options that cannot be run.
    """
    if options.rounds < 0 or options.most < 0:
        raise UsageError("--rounds and --most must be at least 0.")
    given = {"most": options.most, "seed": options.seed}
    ranks = numbers_of_ranks(options.ranks)
    return [
        Setting(ranks=size, rounds=options.rounds if size <= cores() else 0, **given)
        for size in ranks
    ]


def planned(setting: Setting) -> Record:
    """Return the part of a launch's record that is known before: its sequences, and the predictions for each policy."""
    lengths = list(map(len, setting.sequences()))
    found = {
        name: predicted(plan, work_of(setting.config))
        for name, plan in plans(lengths, setting).items()
    }
    about = {
        "setting": msgspec.structs.asdict(setting),
        "sequences": len(lengths),
        "tokens": sum(lengths),
    }
    return {**about, "planned": found}


def throughput(record: Record, name: str) -> Interval | None:
    """Return the throughput of the balanced policy over that of another one; None if nothing was timed."""
    policies = record["policies"]
    if "spans_s" not in policies.get(name, {}):
        return None
    pairs = zip(
        makespans(policies[name]["spans_s"]),
        makespans(policies[BALANCED[0]]["spans_s"]),
        strict=True,
    )
    return exact_interval([other / ours for other, ours in pairs])


def tables(record: Record) -> Iterator[Table]:
    """Yield the tables of a launch: its policies, and the share of the stages' time in which they wait."""
    title = f"{record['sequences']} sequences, {record['tokens']} tokens, P = {record['setting']['ranks']}"
    yield make(title, POLICIES, (_cells(record, name) for name in record["planned"]), LEGEND)
    if record["bubbles"]:
        shares = [
            [f"{row[name]:.1%}" for name in ("formula", "counted", "measured")]
            for row in record["bubbles"]
        ]
        rows = [
            (str(row["micro_batches"]), *cells)
            for row, cells in zip(record["bubbles"], shares, strict=True)
        ]
        columns = ("micro-batches", "formula", "counted slots", "measured")
        yield make(f"pipeline of {record['setting']['ranks']} stages, forward", columns, rows)


def _cells(record: Record, name: str) -> tuple[str, ...]:
    plan, found = record["planned"][name], record["policies"].get(name, {})
    mark = counted(found).mark if found and name in BALANCED else ""
    operations = f"{imbalance(found['counted']):.4f}" if found else "-"
    timed = ("-", "-", "-")
    if "spans_s" in found:
        shares = [
            imbalance([end - start for start, end in spans])
            for spans in zip(*found["spans_s"], strict=True)
        ]
        seconds = exact_interval(makespans(found["spans_s"])).median
        timed = (
            f"{seconds:.2f}",
            str(throughput(record, name)),
            f"{exact_interval(shares).median:.3f}",
        )
    planned = f"{imbalance(plan['loads']):.4f}"
    return (
        name,
        str(plan["sharded"]),
        planned,
        operations,
        f"{plan['useful_share']:.1%}",
        *timed,
        mark,
    )


def counted(policy: Record) -> Requirement:
    """Return the requirement on the operations that a policy's ranks have counted."""
    return Requirement(
        "max/mean of the counted operations",
        "<=",
        BOUND,
        exact_interval([imbalance(policy["counted"])]),
    )


def show(screen: Console, document: Record) -> Iterator[str]:
    """Print the tables of all launches; yield everything that is wrong."""
    for record in document["launches"]:
        for table in tables(record):
            terminal.show(screen, table)
        where = f"P = {record['setting']['ranks']}"
        if record["bubbles"]:
            shown = picture(timeline(one_forward_one_backward(record["setting"]["ranks"], 4)))
            terminal.say(screen, f"1F1B with 4 micro-batches, a prime for a backward:\n{shown}")
        for name, policy in record["policies"].items():
            if not policy["error"] <= policy["limit"]:
                yield f"{where}, {name}: logits differ by {policy['error']:.2e}, allowed are {policy['limit']:.2e}"
            if name == BALANCED[0] and counted(policy).mark != "reached":
                share = imbalance(policy["counted"])
                yield f"{where}, {name}: max/mean of the counted operations is {share:.4f}, needed is below {BOUND}"


def balance(arguments: Sequence[str] | None = None) -> int:
    """Plan, count and time; return the exit code."""
    options = parse("balance", __doc__, OPTIONS, arguments)
    try:
        chosen = settings(options)
        launch, out = Launch(timeout=options.timeout), writable(options.out)
    except UsageError as error:
        return refused("balance", error)
    measure = f"{__package__}.policies:measure"
    entries = [
        Entry(f"P = {one.ranks}", one.ranks, measure, one, launch, planned(one)) for one in chosen
    ]
    return compete("balance", entries, new_document(), out, show)


if __name__ == "__main__":
    main(balance)
