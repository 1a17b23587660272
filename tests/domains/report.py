"""What drawing every pair of parts has found, by call, and the report of it.

`REPORT.json` is also the inventory of parts: one that was never explored, or lost its generator
since, makes the suite red.
"""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from domains import subjects
from domains.declared import Pair, Subject
from domains.differing import every_difference
from domains.trial import Tried, every_pair, every_part

COMMITTED = Path(__file__).with_name("REPORT.json")
PART_SEEDS = 3
Record = dict[str, Any]


def parts_of(subject: Subject) -> dict[str, list[str]]:
    """Return the names of a subject's parts by factor."""
    return {factor: list(parts) for factor, parts in subject.factors.items()}


def changed(declared: Iterable[Subject], records: Iterable[Record]) -> list[str]:
    """Say which factors have other parts than a report lists."""
    listed = {
        (r["subject"], factor): parts for r in records for factor, parts in r["parts"].items()
    }
    found = {(s.name, factor): parts for s in declared for factor, parts in parts_of(s).items()}
    return [
        f"{name} {factor}"
        for name, factor in sorted(listed.keys() | found)
        if listed.get((name, factor)) != found.get((name, factor))
    ]


def committed() -> list[Record]:
    """Return the records of the committed report."""
    return list(json.loads(COMMITTED.read_text()))


def impossible_pairs(name: str, records: Iterable[Record]) -> set[Pair]:
    """Return the pairs of a subject that a report calls impossible."""
    texts = [
        text
        for record in records
        if record["subject"] == name
        for pairs in record["impossible"].values()
        for text in pairs
    ]
    split = [[tuple(one.split("=", 1)) for one in text.split(" & ", 1)] for text in texts]
    return {((a, b), (c, d)) for (a, b), (c, d) in split}


def explored(name: str, seed: int, depth: str = "pairs") -> Record:
    """Draw the pairs of one subject, or its single parts with `PART_SEEDS` seeds.

    Returns:
        Its parts, its counts, its impossible pairs by the library's reason, and its fault if there
        is one.
    """
    torch.set_num_threads(1)
    subject = subjects.BY_NAME[name]
    tried, fault = Tried(), ""
    try:
        every_pair(subject, seed, tried) if depth == "pairs" else every_part(
            subject, range(seed, seed + PART_SEEDS), tried
        )
    except AssertionError as error:
        fault = str(error)
    impossible = defaultdict(list)
    for pair, reason in sorted(tried.impossible.items()):
        impossible[re.sub(r"^(\w+: )rank \d+: ", r"\1", reason)[:300]].append(
            " & ".join("=".join(one) for one in pair)
        )
    tally = every_difference(subject)
    return {
        "subject": name,
        "differing": tally,
        "depth": depth,
        "parts": parts_of(subject),
        "possible": len(subject.pairs()) - len(tried.impossible),
        "drawn": len(subject.pairs() & tried.pairs),
        "calls": tried.rows,
        "impossible": impossible,
        "fault": "\n".join([*filter(None, [fault]), *tally.pop("faults")]),
    }


def markdown(records: Sequence[Record], seed: int) -> str:
    """Return the report as Markdown."""
    in_pairs = [record for record in records if record["depth"] == "pairs"]
    drawn, possible = (sum(record[key] for record in in_pairs) for key in ("drawn", "possible"))
    calls = sum(record["calls"] for record in records)
    reasons = Counter(
        {reason: len(pairs) for record in records for reason, pairs in record["impossible"].items()}
    )
    return "\n".join(
        [
            "# Domains: the parts of every parameter, drawn in pairs",
            "",
            f"Seed {seed}: {drawn} of {possible} possible pairs of {len(in_pairs)} functions "
            f"drawn and judged, {calls} calls.",
            f"Of {len(records) - len(in_pairs)} more functions only single parts were drawn, "
            f"with {PART_SEEDS} seeds.",
            "A pair is impossible where the library refuses it in the base row; "
            "the reasons below are the library's.",
            "`REPORT.json` lists the parts and the impossible pairs.",
            "",
            "| call | parts | drawn in | possible pairs | drawn | impossible | calls |",
            "| --- | --- | --- | --- | --- | --- | --- |",
            *map(_line, records),
            "",
            *_differing(records),
            "",
            "## Reasons why pairs are impossible",
            "",
            *(f"- {count} pairs: {reason}" for reason, count in reasons.most_common()),
            "",
        ]
    )


def _differing(records: Sequence[Record]) -> list[str]:
    """What was tried of ranks that differ."""
    tried = [
        (record["subject"], record["differing"])
        for record in records
        if record["differing"]["compared"]
    ]
    total = {
        key: sum(tally[key] for _, tally in tried) for key in ("arguments", "compared", "unchecked")
    }
    return [
        "## Ranks that differ",
        "",
        f"{len(tried)} calls with {total['arguments']} arguments: "
        f"{total['compared']} situations in which an argument of one "
        f'rank, or of all, is another or a wrong one, {total["unchecked"]} with `check="off"`.',
        "",
        "| call | arguments | situations | with check off |",
        "| --- | --- | --- | --- |",
        *(
            f"| {name} | {tally['arguments']} | {tally['compared']} | {tally['unchecked']} |"
            for name, tally in tried
        ),
    ]


def _line(record: Record) -> str:
    impossible = sum(map(len, record["impossible"].values()))
    parts = sum(map(len, record["parts"].values()))
    cells = (
        record["subject"],
        parts,
        record["depth"],
        record["possible"],
        record["drawn"],
        impossible,
        record["calls"],
    )
    return f"| {' | '.join(map(str, cells))} |"
