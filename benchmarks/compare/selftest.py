"""Test that the comparison finds a planted slowdown, and nothing else: `nox -s bench_selftest`.

A commit against itself must show no change. Then head's worktree gets more work on one rank in one
scheme, twice the smallest change that counts. The comparison must find this at every P whose times
are quiet enough, and nothing else. The change is made in the worktree, so that the library itself
has no switch for it.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.compare.command import (
    KEPT,
    MEASURING,
    Bench,
    commits,
    compare,
    fresh_folder,
    sides,
)
from benchmarks.compare.rule import (
    DELTAS,
    GATEABLE_SHARE,
    MAX_DELTA,
    Result,
    Side,
    Verdict,
)
from benchmarks.contests.contest import at_least
from benchmarks.launching import Options, UsageError, about, program

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

OPTIONS: Options = {
    **MEASURING,
    "--same": about(
        type=at_least(0), default=1, metavar="N", help="comparisons of a commit with itself (1)"
    ),
    "--slower": about(
        type=at_least(0), default=1, metavar="N", help="comparisons with more work (1)"
    ),
}


@program("bench_selftest", __doc__, OPTIONS, KEPT, strict=False)
def main(options: argparse.Namespace) -> int:
    """Run the tests. Return 0 if the comparison is right, 1 if it is not, 2 for bad options."""
    if not options.same + options.slower:
        raise UsageError("nothing would be measured. Pass more than 0 to --same or --slower.")
    texts = options.cases or [PLANTED_CASE]
    if options.slower and not any(text in PLANTED_CASE for text in texts):
        raise UsageError(
            f"{PLANTED_CASE}, which has the planted work, is not among --cases. Pass a part of its "
            "name too, or --slower 0."
        )
    out, head = fresh_folder(options.out), commits("HEAD", "HEAD")[1]

    def compared(pair: tuple[Side, Side], name: str) -> Result:
        return compare(pair, options, Bench(options), fresh_folder(out / name))

    names = [f"same-{n}" for n in range(options.same)]
    with sides(head, head, ("HEAD", "HEAD")) as pair:
        same = [compared(pair, name) for name in names]
        complaints = [text for result in same for text in nothing_found(result)]
        slower = (pair[0], plant(pair[1], 1 + 2 * planted_delta(same)))
        for n in range(options.slower):
            complaints += planted_found(compared(slower, f"slower-{n}"))
    print("\n".join(complaints) or "the comparison finds what is there, and nothing else")
    return int(bool(complaints))


def plant(side: Side, factor: float) -> Side:
    """Plant more work on the last rank in one scheme: forward takes `factor` times as long there.

    Raises:
        UsageError: the scheme's file does not define `ring_attention`.
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
    return replace(side, ref=ref, sha=None)


def planted_delta(same: Sequence[Result]) -> float:
    """Return the smallest change that counts for the planted case; `same` has no planted work."""
    rows = [row for result in same for row in result.rows if row.case == PLANTED_CASE]
    seen = [row.delta for row in rows if row.delta is not None and row.delta <= MAX_DELTA]
    return max(seen, default=DELTAS["cpu"])


def nothing_found(result: Result) -> Iterator[str]:
    """Yield a text for each fault of a comparison of a commit with itself."""
    for row in result.rows:
        if row.verdict in SEEN:
            yield f"a commit against itself: {row.case}, P={row.ranks} is {row.verdict}"
    if (share := result.gateable_share) < GATEABLE_SHARE:
        yield f"a commit against itself: only {share:.0%} of the cases are quiet enough"


def planted_found(result: Result) -> list[str]:
    """Return a text for each fault of a comparison in which one case has more work."""
    planted = [row for row in result.rows if row.case == PLANTED_CASE]
    fine = (Verdict.REGRESSED, Verdict.UNGATEABLE, Verdict.OVERSUBSCRIBED)
    wrong = [row for row in planted if row.verdict not in fine]
    others = (row for row in result.rows if row.case != PLANTED_CASE)
    wrong += [row for row in others if row.verdict is Verdict.REGRESSED]
    found = [f"{row.case}, P={row.ranks} is {row.verdict}" for row in wrong]
    if not any(row.verdict is Verdict.REGRESSED for row in planted):
        found.append("found at no P")
    return [f"more work in {PLANTED_CASE}: {text}" for text in found]
