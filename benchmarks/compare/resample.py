"""Resample many comparisons from the launches of a few of a commit with itself.

`python -m benchmarks.compare.resample FOLDER...`: a resampled comparison takes the screen of one
stored run, for the second stage those of two runs, and throws every coin again: which launch of a
pair counts as head is as good as any other, for they are the same commit. What was measured close
together stays together, with all its drift. Then head gets a delay in one case after another. Exit
code: 0 no false alarm, and the delay is found in 95 of 100; 1 otherwise; 2 usage.
"""

from __future__ import annotations

import math
import random
import statistics
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from benchmarks.compare.pairs import SIDES, grouped
from benchmarks.compare.result import RECORDS, RESULT, Key, load as load_result
from benchmarks.compare.rule import (
    CONFIRM_PAIRS,
    JUDGED,
    SCREEN_PAIRS,
    Verdict,
    judge,
    raised_delta,
)
from benchmarks.files import ForeignError
from benchmarks.launching import Options, UsageError, about, parse
from benchmarks.records import read

COMPARISONS, DELAYED = 1000, 100
FOUND_SHARE = 0.95
SCREENED = JUDGED | {Verdict.UNGATEABLE}
Pairs = list[tuple[float, float]]
"""Seconds of both launches of each pair of a screen."""
OPTIONS: Options = {
    "folders": about(
        nargs="+", type=Path, metavar="FOLDER", help="of a comparison of a commit with itself"
    ),
    "--comparisons": about(
        type=int, default=COMPARISONS, help="without a delay (default: %(default)s)"
    ),
    "--extra": about(
        type=float, default=0.2, help="delay as a share of a case's time (default: %(default)s)"
    ),
    "--case": about(
        default="", metavar="TEXT", help="the delay must be found in cases with this in their name"
    ),
    "--seed": about(type=int, default=0),
}


@dataclass(frozen=True)
class Stored:
    """The launches of one case on one number of ranks.

    Args:
        floor: the smallest change that ever counts on this device.
        runs: the screen of each comparison.
    """

    floor: float
    runs: list[Pairs]

    @property
    def typical(self) -> float:
        """Median seconds of a launch."""
        return statistics.median(seconds for run in self.runs for pair in run for seconds in pair)

    def again(self, draw: random.Random, extra: float = 0.0) -> Verdict:
        """Resample a comparison with head later by a share of the typical time."""
        screen, *confirm = (
            thrown(draw.choice(self.runs), draw) for _ in range(1 + CONFIRM_PAIRS // SCREEN_PAIRS)
        )
        delta = raised_delta(self.floor, [base for base, _ in screen])
        first, again = (
            [math.log((head + extra * self.typical) / base) for base, head in pairs]
            for pairs in (screen, list(chain(*confirm)))
        )
        return judge(first, again, delta).verdict


def thrown(pairs: Pairs, draw: random.Random) -> Pairs:
    """Exchange base and head of a pair if a coin says so."""
    return [pair if draw.getrandbits(1) else pair[::-1] for pair in pairs]


def load(folders: Sequence[Path]) -> dict[Key, Stored]:
    """Read the screens that can be resampled: of comparisons of a commit with itself.

    Raises:
        UsageError: a folder holds something else.
    """
    found: dict[Key, Stored] = {}
    for folder in folders:
        result = load_result(folder / RESULT)
        if not result.same_commit:
            raise UsageError(f"{folder} compares different commits, so it shows more than noise.")
        groups = grouped(read(folder / RECORDS).records)
        for name in sorted(row.key for row in result.rows if row.verdict in SCREENED):
            group = groups[name]
            pairs = zip(*(group.seconds("screen", side) for side in SIDES), strict=True)
            found.setdefault(name, Stored(group.floor, [])).runs.append(list(pairs))
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    options = parse("resample", (__doc__ or "").partition("\n")[0], OPTIONS, arguments)
    try:
        stored = load(options.folders)
    except (UsageError, ForeignError) as error:
        print(f"resample: {error}", file=sys.stderr)
        return 2
    bad = alarms(stored, options.comparisons, options.seed)
    missed = []
    draw = random.Random(options.seed)
    for (name, ranks), case in stored.items():
        counts = Counter(case.again(draw, options.extra) for _ in range(DELAYED))
        found, judged = counts[Verdict.REGRESSED], DELAYED - counts[Verdict.UNGATEABLE]
        print(
            f"{name}, P={ranks}, {options.extra:.0%} more: found {found} of {DELAYED}, "
            f"{judged} of them quiet enough to be judged"
        )
        missed += [name] * (options.case in name and found < FOUND_SHARE * DELAYED)
    return int(bool(bad or missed or not stored))


def alarms(stored: Mapping[Key, Stored], comparisons: int, seed: int) -> int:
    """Resample comparisons without a delay, and return in how many of them anything regressed."""
    draw, counts, bad = random.Random(seed), Counter[str](), 0
    for _ in range(comparisons):
        verdicts = [case.again(draw) for case in stored.values()]
        counts.update(verdicts)
        bad += Verdict.REGRESSED in verdicts
    print(
        f"{comparisons} comparisons of identical commits, {len(stored)} cases each: "
        f"{bad} say regressed"
    )
    shown = ", ".join(f"{count} {verdict}" for verdict, count in counts.most_common())
    print(f"verdicts of the cases: {shown}")
    return bad


if __name__ == "__main__":
    raise SystemExit(main())
