"""Sequences of unequal length on P ranks: how balanced each policy is, and how fast a prefill.

The workload has a sequence for each file of the standard library, with a 64th of its bytes. Exit
code: 0 if every policy computed the right logits and the balanced one's counted operations have
max/mean below 1.05; 1 if not, or if a launch failed; 2 for options that cannot be run.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import msgspec

from benchmarks.contests.balance.policies import Setting
from benchmarks.contests.contest import Contest, Entry
from benchmarks.launching import Launch, Record, UsageError, about, main, numbers_of_ranks
from benchmarks.reporting import terminal
from benchmarks.reporting.tables import make
from benchmarks.reporting.terminal import Console
from benchmarks.sample import makespans
from benchmarks.statistics import Interval, Requirement, exact_interval
from sp_core.machine import cores
from sp_core.scheduling import one_forward_one_backward, picture, timeline
from sp_core.scheduling.plan import imbalance

BALANCED = "balanced"
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
    "max/mean over the ranks of floating-point operations: planned by the cost model, counted "
    "while computing. useful: operations on the caller's tokens, over ranks x the most loaded "
    "rank. balanced is faster by: time of this policy over that of the balanced one, median over "
    "the rounds with its exact interval; time is the last rank's end minus the first one's start."
)


def plan(options: argparse.Namespace) -> tuple[Record, list[Entry]]:
    """Return a launch for each number of ranks; with more ranks than cores nothing is timed.

    Raises:
        UsageError: options that cannot be run.
    """
    if options.rounds < 0:
        raise UsageError("--rounds must be at least 0.")
    measure, launch = f"{__package__}.policies:measure", Launch(timeout=options.timeout)
    entries = []
    for ranks in numbers_of_ranks(options.ranks):
        setting = Setting(ranks, options.rounds if ranks <= cores() else 0)
        known = planned(setting)
        entries.append(Entry(f"P = {ranks}", ranks, measure, setting, launch, known))
    return {}, entries


def planned(setting: Setting) -> Record:
    """Return what is known of a launch before: its sequences, and each policy's predictions."""
    lengths = list(map(len, setting.sequences()))
    found = {name: setting.predicted(plan) for name, plan in setting.plans().items()}
    sizes = {"sequences": len(lengths), "tokens": sum(lengths)}
    return {"setting": msgspec.structs.asdict(setting), **sizes, "planned": found}


def throughput(record: Record, name: str) -> Interval | None:
    """Return the time of a policy over that of the balanced one; None if nothing was timed."""
    spans = [record["policies"].get(one, {}).get("spans_s") for one in (name, BALANCED)]
    if None in spans:
        return None
    times = (makespans(one) for one in spans)
    return exact_interval([other / ours for other, ours in zip(*times, strict=True)])


def counted(policy: Record) -> Requirement:
    """Return the requirement on the operations that a policy's ranks have counted."""
    found = exact_interval([imbalance(policy["counted"])])
    return Requirement("max/mean of the counted operations", "<=", BOUND, found)


def show(screen: Console, document: Record) -> Iterator[str]:
    """Print the tables of all launches; yield everything that is wrong."""
    for record in document["launches"]:
        ranks = record["setting"]["ranks"]
        title = f"{record['sequences']} sequences, {record['tokens']} tokens, P = {ranks}"
        cells = [_cells(record, name) for name in record["planned"]]
        terminal.show(screen, make(title, POLICIES, cells, LEGEND))
        if record["bubbles"]:
            kinds = ("formula", "counted", "measured")
            rows = [
                (str(row["micro_batches"]), *(f"{row[kind]:.1%}" for kind in kinds))
                for row in record["bubbles"]
            ]
            columns = ("micro-batches", "formula", "counted slots", "measured")
            terminal.show(screen, make(f"pipeline of {ranks} stages, forward", columns, rows))
            shown = picture(timeline(one_forward_one_backward(ranks, 4)))
            text = f"1F1B with 4 micro-batches, a prime for a backward:\n{shown}"
            terminal.say(screen, text)
        for name, policy in record["policies"].items():
            error, limit = policy["error"], policy["limit"]
            if not error <= limit:
                yield f"P = {ranks}, {name}: logits differ by {error:.2e}, allowed are {limit:.2e}"
            if name == BALANCED and counted(policy).mark != "reached":
                share = imbalance(policy["counted"])
                text = f"max/mean of the counted operations is {share:.4f}, needed is below {BOUND}"
                yield f"P = {ranks}, {name}: {text}"


def _cells(record: Record, name: str) -> tuple[str, ...]:
    plan, found = record["planned"][name], record["policies"].get(name, {})
    mark = counted(found).mark if found and name in (BALANCED, "dynamic") else ""
    operations = f"{imbalance(found['counted']):.4f}" if found else "-"
    planned, useful = f"{imbalance(plan['loads']):.4f}", f"{plan['useful_share']:.1%}"
    timed = ("-", "-", "-")
    if spans := found.get("spans_s"):
        rounds = [[end - start for start, end in ranks] for ranks in zip(*spans, strict=True)]
        shares = exact_interval([imbalance(seconds) for seconds in rounds])
        seconds = exact_interval(makespans(spans)).median
        timed = (f"{seconds:.2f}", str(throughput(record, name)), f"{shares.median:.3f}")
    return (name, str(plan["sharded"]), planned, operations, useful, *timed, mark)


OPTIONS = {
    "--ranks": about(
        default="2,4", metavar="P,P,...", help="numbers of ranks (default: %(default)s)"
    ),
    "--rounds": about(type=int, default=6, metavar="N", help="timed rounds (default: %(default)s)"),
}
balance = Contest("balance", __doc__, OPTIONS, plan, show, "balance.json", timeout=600.0)

if __name__ == "__main__":
    main(balance)
