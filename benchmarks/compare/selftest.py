"""Does the comparison see what is there, and nothing else? `python -m benchmarks.compare.selftest`.

A commit against itself must show nothing. Then the head's worktree gets more work on one rank,
twice the smallest change that counts, in one scheme: that must be found at every P whose times are
quiet enough, and nothing else. Last, a thousand comparisons are resampled from the launches. The
change is made in the worktree, so that the library itself has no switch for it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import launching
from benchmarks.compare import resample
from benchmarks.compare.__main__ import (
    INTERRUPTED,
    USAGE,
    add_measuring,
    compare,
    fresh_folder,
    runner,
)
from benchmarks.compare.rule import DELTAS, GATEABLE_SHARE, MAX_DELTA, Verdict
from benchmarks.compare.sides import Side, commits, sides
from benchmarks.launching import UsageError

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
Result = dict[str, Any]


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; 0 where the comparison is right, 1 where it is not, 2 for usage."""
    made = argparse.ArgumentParser(
        prog="bench_selftest", description=(__doc__ or "").partition("\n")[0]
    )
    made.add_argument(
        "--same",
        type=int,
        default=1,
        metavar="N",
        help="comparisons of a commit with itself (default: 1)",
    )
    made.add_argument(
        "--slower",
        type=int,
        default=1,
        metavar="N",
        help="comparisons with more work on one rank (default: 1)",
    )
    add_measuring(made)
    options = made.parse_args(arguments, argparse.Namespace(strict=False))
    try:
        complaints = _run(options, fresh_folder(options.out))
    except UsageError as error:
        print(f"bench_selftest: {error}", file=sys.stderr)
        return USAGE
    except KeyboardInterrupt:
        print(
            "\nbench_selftest: interrupted, so nothing is judged; the records so far are kept.",
            file=sys.stderr,
        )
        return INTERRUPTED
    print("\n".join(complaints) or "the comparison finds what is there, and nothing else")
    return int(bool(complaints))


def _run(options: argparse.Namespace, out: Path) -> list[str]:
    """All comparisons; what is wrong with them."""
    head = commits("HEAD", "HEAD")[1]
    complaints: list[str] = []
    with sides(head, head, ("HEAD", "HEAD")) as pair:
        same = [
            compare(pair, options, runner(options, f"same-{n}"), fresh_folder(out / f"same-{n}"))
            for n in range(options.same)
        ]
        complaints += [text for result in same for text in nothing_found(result)]
        factor = 1 + 2 * planted_delta(same)
        slower = (pair[0], plant(pair[1], factor))
        for n in range(options.slower):
            result = compare(
                slower, options, runner(options, f"slower-{n}"), fresh_folder(out / f"slower-{n}")
            )
            complaints += planted_found(result)
    if same and resample.main(
        [*(str(out / f"same-{n}") for n in range(options.same)), "--case", PLANTED_CASE]
    ):
        complaints.append(
            "resampled comparisons: a false alarm, or a delay that was missed; see above"
        )
    return complaints


def plant(side: Side, factor: float) -> Side:
    """More work on the last rank in one scheme, forward only: the call takes `factor` times as long there.

    Raises:
        UsageError: the scheme is not where it was.
    """
    path = side.root / PLANTED_IN
    if "def ring_attention(" not in path.read_text():
        raise UsageError(
            f"{PLANTED_IN} has no ring_attention; plant the work elsewhere (benchmarks/compare/selftest.py)."
        )
    with path.open("a") as file:
        file.write(MORE_WORK.format(factor=factor))
    return replace(
        side,
        told={
            **side.told,
            "ref": f"HEAD, {factor - 1:.0%} more work on one rank in {PLANTED_CASE}",
            "sha": None,
        },
    )


def planted_delta(same: Sequence[Result]) -> float:
    """The smallest change that counts for the planted case, as the comparisons of a commit with itself have shown it."""
    seen = [
        row["delta"]
        for result in same
        for row in result["rows"]
        if row["case"] == PLANTED_CASE and row["delta"] is not None
    ]
    return max((delta for delta in seen if delta <= MAX_DELTA), default=DELTAS["cpu"])


def nothing_found(result: Result) -> Iterator[str]:
    """What is wrong with a comparison of a commit with itself."""
    for row in result["rows"]:
        if row["verdict"] in (
            Verdict.REGRESSED,
            Verdict.IMPROVED,
            Verdict.MISSING,
            Verdict.MISMATCH,
            Verdict.NEW,
        ):
            yield f"a commit against itself: {row['case']}, P={row['ranks']} is {row['verdict']}"
    if result["gateable_share"] < GATEABLE_SHARE:
        yield f"a commit against itself: only {result['gateable_share']:.0%} of the cases are quiet enough to be judged"


def planted_found(result: Result) -> list[str]:
    """What is wrong with a comparison in which one case is slower."""
    planted = [row for row in result["rows"] if row["case"] == PLANTED_CASE]
    wrong = [
        row
        for row in planted
        if row["verdict"] not in (Verdict.REGRESSED, Verdict.UNGATEABLE, Verdict.OVERSUBSCRIBED)
    ]
    wrong += [
        row
        for row in result["rows"]
        if row["case"] != PLANTED_CASE and row["verdict"] == Verdict.REGRESSED
    ]
    found = [
        f"more work in {PLANTED_CASE}: {row['case']}, P={row['ranks']} is {row['verdict']}"
        for row in wrong
    ]
    if not any(row["verdict"] == Verdict.REGRESSED for row in planted):
        found.append(f"more work in {PLANTED_CASE}: found at no P")
    return found


if __name__ == "__main__":
    launching.main(main)
