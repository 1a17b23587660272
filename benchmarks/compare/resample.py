"""Many comparisons from few: the launches of comparisons of a commit with itself, paired and thrown again.

`python -m benchmarks.compare.resample FOLDER...`: a resampled comparison takes the screen of one
stored run, for the second stage those of two runs, and throws every coin again: which launch of a
pair counts as head is as good as any other, for they are the same commit. What was measured close
together stays together, with all its drift. Then head gets a delay in one case after another. Exit
code: 0 no false alarm, and the delay is found in 95 of 100; 1 otherwise; 2 usage.
"""

from __future__ import annotations

import json
import math
import random
import statistics
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.compare.pairs import SIDES, Group, Key, assess, floor, grouped
from benchmarks.compare.result import RECORDS, RESULT
from benchmarks.compare.rule import (
    CONFIRM_PAIRS,
    JUDGED,
    SCREEN_PAIRS,
    Verdict,
    judge,
    raised_delta,
)
from benchmarks.launching import Options, UsageError, about, parse
from benchmarks.records import read

COMPARISONS, DELAYED = 1000, 100
FOUND_SHARE = 0.95
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
        """The verdict of a resampled comparison, head later by a share of the typical time."""
        delay = extra * self.typical
        screen = _thrown(draw.choice(self.runs), draw)
        confirm = [
            pair
            for _ in range(CONFIRM_PAIRS // SCREEN_PAIRS)
            for pair in _thrown(draw.choice(self.runs), draw)
        ]
        delta = raised_delta(self.floor, [base for base, _ in screen])
        first, again = (
            [math.log((head + delay) / base) for base, head in pairs] for pairs in (screen, confirm)
        )
        return judge(first, again, delta).verdict


def load(folders: Sequence[Path]) -> dict[Key, Stored]:
    """The launches that can be resampled: those of comparisons of a commit with itself, where every pair is there.

    Raises:
        UsageError: a folder holds something else.
    """
    found: dict[Key, Stored] = {}
    for folder in folders:
        for name, group in _screens(folder).items():
            sides = (group.seconds("screen", side) for side in SIDES)
            found.setdefault(name, Stored(floor(group), [])).runs.append(
                list(zip(*sides, strict=True))
            )
    return found


def false_alarms(stored: Mapping[Key, Stored], comparisons: int, seed: int) -> Counter[str]:
    """In how many resampled comparisons anything regressed, and the verdicts of all their cases."""
    draw, counts = random.Random(seed), Counter[str]()
    for _ in range(comparisons):
        verdicts = [case.again(draw) for case in stored.values()]
        counts.update(verdicts)
        counts["comparisons with an alarm"] += Verdict.REGRESSED in verdicts
    return counts


def delays(stored: Mapping[Key, Stored], extra: float, seed: int) -> dict[Key, Counter[str]]:
    """The verdicts of `DELAYED` resampled comparisons of each case, with a delay."""
    draw = random.Random(seed)
    return {
        name: Counter(str(case.again(draw, extra)) for _ in range(DELAYED))
        for name, case in stored.items()
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; the exit code."""
    options = parse("resample", (__doc__ or "").partition("\n")[0], OPTIONS, arguments)
    try:
        stored = load(options.folders)
    except UsageError as error:
        print(f"resample: {error}", file=sys.stderr)
        return 2
    return report(stored, options.comparisons, options.extra, options.case, options.seed)


def report(
    stored: Mapping[Key, Stored], comparisons: int, extra: float, case: str, seed: int
) -> int:
    """Resample, show what comes of it, and say whether it is as it should be; the exit code."""
    alarms = false_alarms(stored, comparisons, seed)
    bad = alarms.pop("comparisons with an alarm")
    print(
        f"{comparisons} comparisons of identical commits, {len(stored)} cases each: {bad} say regressed"
    )
    print(
        "verdicts of the cases: "
        + ", ".join(f"{count} {verdict}" for verdict, count in alarms.most_common())
    )
    missed = []
    for (name, ranks), counts in sorted(delays(stored, extra, seed).items()):
        judged = sum(counts[verdict] for verdict in JUDGED)
        found = counts[Verdict.REGRESSED]
        print(
            f"{name}, P={ranks}, {extra:.0%} more: found {found} of {DELAYED}, {judged} of them quiet enough to be judged"
        )
        missed += [name] * (case in name and found < FOUND_SHARE * DELAYED)
    return int(bool(bad or missed or not stored))


def _thrown(pairs: Pairs, draw: random.Random) -> Pairs:
    """The pairs with base and head exchanged where a coin says so."""
    return [pair if draw.getrandbits(1) else pair[::-1] for pair in pairs]


def _screens(folder: Path) -> dict[Key, Group]:
    """The cases of a stored comparison that were judged or could have been."""
    try:
        result = json.loads((folder / RESULT).read_text())
        same, listed = (
            result["same_commit"],
            {side: {(case, n) for case, n in result["cases"][side]} for side in SIDES},
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{folder} holds no comparison: {error!r}") from error
    if not same:
        raise UsageError(
            f"{folder} compares different commits; what it measured is not noise alone."
        )
    groups = grouped(read(folder / RECORDS).records)
    return {
        name: group
        for name, group in groups.items()
        if assess(name, group, listed).verdict in JUDGED | {Verdict.UNGATEABLE}
    }


if __name__ == "__main__":
    raise SystemExit(main())
