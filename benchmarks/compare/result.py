"""The result of a comparison: a row for each case, what was compared, and where the records are; as `result.json` beside them."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.compare import rule
from benchmarks.compare.explain import explain
from benchmarks.compare.pairs import SIDES, Group, Key, Row, assess, grouped
from benchmarks.compare.rule import Verdict
from benchmarks.files import write_json
from benchmarks.records import Record, read

FORMAT = 1
RECORDS, RESULT = "records.jsonl", "result.json"
RULE = {
    "screen": {"pairs": rule.SCREEN_PAIRS, "agree": rule.SCREEN_AGREE, "share_of_delta": rule.SCREEN_SHARE},
    "confirm": {"pairs": rule.CONFIRM_PAIRS, "agree": rule.CONFIRM_AGREE, "share_of_delta": 1.0},
    "delta": dict(rule.DELTAS),
    "max_delta": rule.MAX_DELTA,
    "miss": rule.MISS,
}
ORDER = list(Verdict)


@dataclass(frozen=True)
class Compared:
    """What was compared.

    Args:
        base, head: "ref" as it was asked for, "sha" that was measured, and "environment" it ran in.
        seed: of the coins.
        ranks: the numbers of ranks.
        listed: the cases that each side has.
    """

    base: dict[str, Any]
    head: dict[str, Any]
    seed: int
    ranks: list[int]
    listed: Mapping[str, set[Key]]


def rows(records: list[Record], listed: Mapping[str, set[Key]]) -> list[Row]:
    """A row for each case that either side has, the most important first."""
    groups = grouped(records)
    names = sorted(listed["base"] | listed["head"])
    found = [assess(name, groups.get(name, Group([])), listed) for name in names]
    told = [replace(row, explanation=_explained(row, found, groups)) for row in found]
    return sorted(told, key=lambda row: (ORDER.index(row.verdict), row.case, row.ranks))


def build(folder: Path, compared: Compared, *, strict: bool) -> dict[str, Any]:
    """The result of the records in a folder, as plain values; it is written beside them too."""
    path = folder / RECORDS
    reading = read(path)
    found = rows(reading.records, compared.listed)
    verdicts = [row.verdict for row in found]
    result = {
        "format": FORMAT,
        "base": compared.base,
        "head": compared.head,
        "same_commit": compared.base["sha"] == compared.head["sha"],
        "seed": compared.seed,
        "ranks": compared.ranks,
        "cases": {side: [list(name) for name in sorted(compared.listed[side])] for side in SIDES},
        "rule": RULE,
        "records": RECORDS,
        "records_sha256": hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else None,
        "problems": reading.problems,
        "rows": [row.as_dict() for row in found],
        "counts": dict(Counter(str(verdict) for verdict in verdicts)),
        "gateable_share": rule.gateable_share(verdicts),
        "strict": strict,
        "exit_code": rule.exit_code(verdicts, strict=strict),
    }
    write_json(folder / RESULT, result)
    return result


def _explained(row: Row, found: list[Row], groups: dict[Key, Group]) -> str | None:
    if row.stage is None:
        return None
    records = groups[(row.case, row.ranks)].stage(row.stage)
    sides = ([record for record in records if record.pair and record.pair.side == side] for side in SIDES)
    return explain(row, found, *sides)
