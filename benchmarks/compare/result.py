"""The result of a comparison: its form in `result.json`, and how people see it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, field

from benchmarks.compare import rule
from benchmarks.compare.rule import GATEABLE_SHARE, ExitCode, Verdict
from benchmarks.files import read_json
from benchmarks.records.types import Count, Size
from benchmarks.reporting.tables import DASH, Table, make, milliseconds, plain, ratio

RECORDS, RESULT = "records.jsonl", "result.json"
Key = tuple[str, int]
"""Case and number of ranks."""

Text = Annotated[str, Meta(max_length=10_000)]
Ratio = Annotated[float, Meta(gt=1e-9, le=1e9)]
Share = Annotated[float, Meta(ge=0, le=1e9)]
RULE = {
    "screen": {
        "pairs": rule.SCREEN_PAIRS,
        "agree": rule.SCREEN_AGREE,
        "share_of_delta": rule.SCREEN_SHARE,
    },
    "confirm": {"pairs": rule.CONFIRM_PAIRS, "agree": rule.CONFIRM_AGREE, "share_of_delta": 1.0},
    "delta": dict(rule.DELTAS),
    "max_delta": rule.MAX_DELTA,
    "miss": rule.MISS,
}
COLUMNS = (
    "case",
    "P",
    "verdict",
    "change",
    "interval",
    "counts from",
    "slower pairs",
    "base (ms)",
    "head (ms)",
    "remarks",
)
CODES = {
    0: "nothing regressed",
    1: "something regressed",
    3: "not everything could be measured or compared",
    4: "not everything could be decided",
}
NOTE = (
    "change: median of head / base over pairs of launches, and its exact interval. "
    "counts from: the smallest change judged. regressed: confirmed by fresh pairs. "
    "ungateable: base against itself varies too much. inconclusive is not red."
)
ORDER = list(Verdict)


class Row(Struct):
    """The comparison of one case on one number of ranks.

    Args:
        case, ranks: what was measured.
        verdict: the answer, and `reason` why there is none.
        stage, pairs, slower: the pairs that decided, how many they are, and in how many head took
            longer.
        ratio, low, high: median of head / base, and its exact interval.
        delta, half_width: the smallest change that counts, and the noise of base against itself, as
            shares.
        base_s, head_s: median seconds of the pairs that decided.
        pairs_needed: if inconclusive, how many would decide; None if more than are worth it.
        flags: reasons to read the row with care.
        explanation: where the time went, for a case that changed.
    """

    case: Text
    ranks: Size
    verdict: Verdict
    reason: Text | None = None
    stage: Text | None = None
    pairs: Count = 0
    slower: Count = 0
    ratio: Ratio | None = None
    low: Ratio | None = None
    high: Ratio | None = None
    delta: Share | None = None
    half_width: Share | None = None
    base_s: Share | None = None
    head_s: Share | None = None
    pairs_needed: Count | None = None
    flags: Annotated[list[Text], Meta(max_length=20)] = []
    explanation: Text | None = None

    @property
    def key(self) -> Key:
        """Case and number of ranks."""
        return self.case, self.ranks

    @property
    def change(self) -> tuple[float, float, float] | None:
        """Low, middle and high of head / base, if they were measured."""
        if self.low is None or self.ratio is None or self.high is None:
            return None
        return self.low, self.ratio, self.high


class Told(Struct):
    """One side of a comparison: the name that was asked for, its commit, and its environment."""

    ref: Text
    sha: Text | None
    environment: Text = ""


class Result(Struct, kw_only=True):
    """A whole comparison.

    Args:
        base, head: the sides.
        seed: of the coins.
        ranks: the numbers of ranks.
        cases: the cases that each side has.
        records, records_sha256: the file of the records, and its hash.
        problems: what is wrong with the records.
        rows: a row for each case and number of ranks that either side has.
        counts: how often each verdict was given.
        gateable_share: the share of the cases that was quiet enough to be judged.
    """

    format: Literal[1] = 1
    base: Told
    head: Told
    same_commit: bool = False
    seed: int = 0
    ranks: list[int] = []
    cases: dict[str, set[Key]] = {}
    rule: dict[str, Any] = field(default_factory=lambda: dict(RULE))
    records: Text = RECORDS
    records_sha256: Text | None = None
    problems: Annotated[list[Text], Meta(max_length=10_000)] = []
    rows: Annotated[list[Row], Meta(max_length=10_000)]
    counts: dict[str, int] = {}
    gateable_share: Annotated[float, Meta(ge=0, le=1)]
    strict: bool = False
    exit_code: ExitCode


def load(path: Path) -> Result:
    """Read a result.

    Raises:
        ForeignError: the file holds none.
    """
    return read_json(path, Result)


def table(result: Result) -> Table:
    """Return a line for each row of a result."""
    names = [
        f"{name} {plain(side.ref, 60)} ({plain(side.sha or 'changed')[:10]})"
        for name, side in (("base", result.base), ("head", result.head))
    ]
    title = " against ".join(names) + (": the same commit" if result.same_commit else "")
    return make(title, COLUMNS, map(cells, result.rows), NOTE)


def cells(row: Row) -> tuple[str, ...]:
    """Return the texts of one line."""
    change, times = row.change, (row.base_s, row.head_s)
    remarks = [text for text in (row.reason, row.explanation, *row.flags) if text]
    return (
        plain(row.case),
        str(row.ranks),
        row.verdict,
        DASH if change is None else ratio(change[1]),
        DASH if change is None else f"{ratio(change[0])} to {ratio(change[2])}",
        DASH if row.delta is None else f"{row.delta:.1%}",
        f"{row.slower} of {row.pairs}" if row.pairs else DASH,
        *(DASH if time is None else milliseconds(time) for time in times),
        plain("; ".join(remarks), 400),
    )


def summary(result: Result) -> Iterator[str]:
    """Sum up a result in a few lines."""
    counts = Counter(row.verdict for row in result.rows)
    shown = ", ".join(f"{counts[verdict]} {verdict}" for verdict in ORDER if counts[verdict])
    yield f"{shown or 'no case'}. Exit code {result.exit_code}: {CODES[result.exit_code]}."
    if 0 < result.gateable_share < GATEABLE_SHARE:
        yield (
            f"Only {result.gateable_share:.0%} of the cases are quiet enough to be judged, "
            f"{GATEABLE_SHARE:.0%} should be: is something else running on this machine?"
        )
    if result.same_commit:
        yield "Base and head are the same commit, so this measures the comparison itself."
