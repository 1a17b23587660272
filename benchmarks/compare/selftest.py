"""Does the comparison see what is there, and nothing else? `python -m benchmarks.compare.selftest`.

A commit against itself must show nothing. Then the head's worktree gets more work on one rank,
twice the smallest change that counts, in one scheme: that must be found at every P whose times are
quiet enough, and nothing else. Last, a thousand comparisons are resampled from the launches. The
change is made in the worktree, so that the library itself has no switch for it.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

from benchmarks.compare.__main__ import KEPT, MEASURING, bench, compare, fresh_folder
from benchmarks.compare.pairs import SIDES, grouped
from benchmarks.compare.rule import (
    CONFIRM_PAIRS,
    DELTAS,
    GATEABLE_SHARE,
    JUDGED,
    MAX_DELTA,
    RECORDS,
    SCREEN_PAIRS,
    Key,
    Result,
    Told,
    Verdict,
    judge,
    raised_delta,
)
from benchmarks.compare.sides import Side, commits, sides
from benchmarks.launching import Options, UsageError, about, main as start, parse, program
from benchmarks.records import read

PLANTED_CASE = "schemes/ring/zigzag/causal/forward"
PLANTED_IN = Path("sp_core") / "schemes" / "ring.py"
MORE_WORK = """

_unchanged = ring_attention


def ring_attention(*args, comm, **kwargs):
    import time

    start = time.perf_counter()
    out = _unchanged(*args, comm=comm, **kwargs)
    end = start + {factor} * (time.perf_counter() - start)
    while comm.rank == comm.size - 1 and not torch.is_grad_enabled() and time.perf_counter() < end:
        pass
    return out
"""
SEEN = (Verdict.REGRESSED, Verdict.IMPROVED, Verdict.MISSING, Verdict.MISMATCH, Verdict.NEW)
COMPARISONS, DELAYED = 1000, 100
EXTRA, FOUND_SHARE = 0.2, 0.95
"""A resampled delay as a share of a case's time, and how often it must be found."""

Pairs = list[tuple[float, float]]
"""Seconds of both launches of each pair of a screen."""


OPTIONS: Options = {
    **MEASURING,
    "--same": about(
        type=int, default=1, metavar="N", help="comparisons of a commit with itself (1)"
    ),
    "--slower": about(type=int, default=1, metavar="N", help="comparisons with more work (1)"),
}


@program("bench_selftest", KEPT)
def main(arguments: Sequence[str] | None = None) -> int:
    """Return 0 if the comparison is right, 1 if it is not, 2 for usage."""
    options = parse("bench_selftest", __doc__, OPTIONS, arguments, strict=False)
    complaints = _run(options, fresh_folder(options.out))
    print("\n".join(complaints) or "the comparison finds what is there, and nothing else")
    return int(bool(complaints))


def _run(options: argparse.Namespace, out: Path) -> list[str]:
    """Make all comparisons; return what is wrong with them."""

    def compared(pair: tuple[Side, Side], name: str) -> Result:
        return compare(pair, options, bench(options, name), fresh_folder(out / name))

    head = commits("HEAD", "HEAD")[1]
    names = [f"same-{n}" for n in range(options.same)]
    with sides(head, head, ("HEAD", "HEAD")) as pair:
        same = [compared(pair, name) for name in names]
        complaints = [text for result in same for text in nothing_found(result)]
        slower = (pair[0], plant(pair[1], 1 + 2 * planted_delta(same)))
        for n in range(options.slower):
            complaints += planted_found(compared(slower, f"slower-{n}"))
    return complaints + (resampled(load(same, out)) if same else [])


def plant(side: Side, factor: float) -> Side:
    """Plant more work on the last rank in one scheme: forward takes `factor` times as long there.

    Raises:
        UsageError: the scheme is not where it was.
    """
    path = side.root / PLANTED_IN
    if "def ring_attention(" not in path.read_text():
        raise UsageError(
            f"{PLANTED_IN} has no ring_attention; "
            "plant the work elsewhere (benchmarks/compare/selftest.py)."
        )
    with path.open("a") as file:
        file.write(MORE_WORK.format(factor=factor))
    ref = f"HEAD, {factor - 1:.0%} more work on one rank in {PLANTED_CASE}"
    return replace(side, told=Told(ref, None, side.told.environment))


def planted_delta(same: Sequence[Result]) -> float:
    """Return the smallest change that counts for the planted case, by comparisons without one."""
    rows = [row for result in same for row in result.rows if row.case == PLANTED_CASE]
    seen = [row.delta for row in rows if row.delta is not None and row.delta <= MAX_DELTA]
    return max(seen, default=DELTAS["cpu"])


def nothing_found(result: Result) -> Iterator[str]:
    """Say what is wrong with a comparison of a commit with itself."""
    for row in result.rows:
        if row.verdict in SEEN:
            yield f"a commit against itself: {row.case}, P={row.ranks} is {row.verdict}"
    if (share := result.gateable_share) < GATEABLE_SHARE:
        yield f"a commit against itself: only {share:.0%} of the cases are quiet enough"


def planted_found(result: Result) -> list[str]:
    """Say what is wrong with a comparison in which one case is slower."""
    planted = [row for row in result.rows if row.case == PLANTED_CASE]
    fine = (Verdict.REGRESSED, Verdict.UNGATEABLE, Verdict.OVERSUBSCRIBED)
    wrong = [row for row in planted if row.verdict not in fine]
    others = (row for row in result.rows if row.case != PLANTED_CASE)
    wrong += [row for row in others if row.verdict is Verdict.REGRESSED]
    found = [f"{row.case}, P={row.ranks} is {row.verdict}" for row in wrong]
    if not any(row.verdict is Verdict.REGRESSED for row in planted):
        found.append("found at no P")
    return [f"more work in {PLANTED_CASE}: {text}" for text in found]


@dataclass(frozen=True)
class Stored:
    """The launches of one case on one number of ranks.

    Args:
        floor: the smallest change that ever counts on this device.
        runs: the screen of each comparison.
    """

    floor: float
    runs: list[Pairs]

    def again(self, draw: random.Random, extra: float = 0.0) -> Verdict:
        """Resample a comparison with head later by a share of a launch's median time."""
        typical = statistics.median(chain.from_iterable(pair for run in self.runs for pair in run))
        screen, *confirm = (
            thrown(draw.choice(self.runs), draw) for _ in range(1 + CONFIRM_PAIRS // SCREEN_PAIRS)
        )
        delta = raised_delta(self.floor, [base for base, _ in screen])
        first, again = (
            [math.log((head + extra * typical) / base) for base, head in pairs]
            for pairs in (screen, list(chain(*confirm)))
        )
        return judge(first, again, delta).verdict


def thrown(pairs: Pairs, draw: random.Random) -> Pairs:
    """Exchange base and head of a pair if a coin says so."""
    return [pair if draw.getrandbits(1) else pair[::-1] for pair in pairs]


def load(results: Sequence[Result], out: Path) -> dict[Key, Stored]:
    """Read the screens of comparisons of a commit with itself; `same-N` in `out` has the Nth."""
    found: dict[Key, Stored] = {}
    for number, result in enumerate(results):
        groups = grouped(read(out / f"same-{number}" / RECORDS).records)
        for row in result.rows:
            if row.verdict in JUDGED | {Verdict.UNGATEABLE}:
                group = groups[row.key]
                pairs = zip(*(group.seconds("screen", side) for side in SIDES), strict=True)
                found.setdefault(row.key, Stored(group.floor, [])).runs.append(list(pairs))
    return found


def resampled(stored: dict[Key, Stored], comparisons: int = COMPARISONS) -> list[str]:
    """Say what is wrong with comparisons that are resampled from stored launches.

    A resampled comparison takes the screen of one stored run, for the second stage those of two
    runs, and throws every coin again: which launch of a pair counts as head is as good as any
    other. What was measured close together stays together, with all its drift. Then head gets a
    delay in the planted case, which must be found.
    """
    draw = random.Random(0)
    drawn = [{case.again(draw) for case in stored.values()} for _ in range(comparisons)]
    bad = sum(Verdict.REGRESSED in verdicts for verdicts in drawn)
    told = f"{bad} of {comparisons} resampled comparisons of {len(stored)} cases say regressed"
    print(told)
    complaints = [told] * bool(bad)
    for (name, ranks), case in stored.items():
        counts = Counter(case.again(draw, EXTRA) for _ in range(DELAYED))
        text = (
            f"{name}, P={ranks}, {EXTRA:.0%} more: found {counts[Verdict.REGRESSED]} of {DELAYED}"
        )
        print(f"{text}, {DELAYED - counts[Verdict.UNGATEABLE]} quiet enough to be judged")
        missed = counts[Verdict.REGRESSED] < FOUND_SHARE * DELAYED
        complaints += [text] * (name == PLANTED_CASE and missed)
    return complaints


if __name__ == "__main__":
    start(main)
