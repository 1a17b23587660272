"""What drawing every pair of parts has found, by call, and the report of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from domains import subjects
from domains.trial import Tried, every_pair

Record = dict[str, Any]


def explored(name: str, seed: int) -> Record:
    """Draw the pairs of one subject.

    Returns:
        Its counts, its impossible pairs by the library's reason, and its fault if there is one.
    """
    torch.set_num_threads(1)
    subject = subjects.BY_NAME[name]
    tried, fault = Tried(), ""
    try:
        every_pair(subject, seed, tried)
    except AssertionError as error:
        fault = str(error)
    reasons = Counter(reason.removeprefix("rank 0: ").split(" Pass ")[0][:160] for reason in tried.refused.values())
    return {
        "subject": name,
        "singles": len(subject.singles()),
        "pairs": len(subject.pairs()),
        "drawn": len(subject.pairs() & tried.pairs),
        "impossible": len(tried.refused),
        "rows": tried.rows,
        "reasons": dict(reasons.most_common()),
        "refused": {" & ".join("=".join(one) for one in pair): reason for pair, reason in sorted(tried.refused.items())},
        "fault": fault,
    }


def markdown(records: Sequence[Record], seed: int) -> str:
    """Return the report as Markdown."""
    done = sum(record["drawn"] for record in records)
    possible = sum(record["pairs"] - record["impossible"] for record in records)
    lines = [
        "# Domains: the parts of every parameter, drawn alone and in pairs",
        "",
        f"Seed {seed}: {done} of {possible} possible pairs drawn and judged; {sum(r['rows'] for r in records)} calls.",
        "A pair is impossible where the library refuses it in the base row; the reason is the library's.",
        "",
        "| call | parts | possible pairs | drawn | impossible | calls |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for r in records:
        cells = (r["subject"], r["singles"], r["pairs"] - r["impossible"], r["drawn"], r["impossible"], r["rows"])
        lines.append(f"| {' | '.join(map(str, cells))} |")
    lines += ["", "## Impossible pairs, by reason", ""]
    reasons: Counter[str] = Counter()
    for record in records:
        reasons.update(record["reasons"])
    return "\n".join([*lines, *(f"- {count} pairs: {reason}" for reason, count in reasons.most_common()), ""])
