"""Record what drawing every pair of parts has found for each call, and write the report.

`REPORT.json` is also the inventory of parts: a test fails if a part was never explored, or if an
explored part is no longer declared.
"""

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from studies.records import table

from domains import subjects
from domains.declared import Pair, Subject
from domains.differing import every_difference
from domains.trial import Tried, every_pair

COMMITTED = Path(__file__).with_name("REPORT.json")
Record = dict[str, Any]


def parts_of(subject: Subject) -> dict[str, list[str]]:
    """Return the names of a subject's parts by factor."""
    return {factor: list(parts) for factor, parts in subject.factors.items()}


def changed(declared: Iterable[Subject], records: Iterable[Record]) -> list[str]:
    """Return the factors whose parts are not those that a report lists."""
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
    """Return the pairs of a subject that a report calls impossible.

    What `host` cannot do, the transports of a device that send messages cannot do either.
    """
    texts = [
        text.replace("(transport)=host", f"(transport)={transport}")
        for record in records
        if record["subject"] == name
        for pairs in record["impossible"].values()
        for text in pairs
        for transport in ("host", "staged", "pipelined")
    ]
    split = [[tuple(one.split("=", 1)) for one in text.split(" & ", 1)] for text in texts]
    return {((a, b), (c, d)) for (a, b), (c, d) in split}


def explored(name: str, seed: int) -> Record:
    """Draw the pairs of one subject.

    Returns:
        The record: the subject's parts, counts, impossible pairs by the library's error, and faults
        in one text, which is empty if there is none.
    """
    torch.set_num_threads(1)
    subject = subjects.BY_NAME[name]
    tried, fault = Tried(), ""
    try:
        every_pair(subject, seed, tried)
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
        "depth": "pairs",
        "parts": parts_of(subject),
        "possible": len(subject.pairs()) - len(tried.impossible),
        "drawn": len(subject.pairs() & tried.pairs),
        "calls": tried.rows,
        "impossible": impossible,
        "fault": "\n".join([*filter(None, [fault]), *tally.pop("faults")]),
    }


def count(parts: Mapping[str, Sequence[str]]) -> int:
    """Return how many names there are in all lists."""
    return sum(map(len, parts.values()))


def cells(record: Record) -> tuple[object, ...]:
    """Return the cells of a call's line in the table."""
    drawn = (record["depth"], record["possible"], record["drawn"])
    impossible = count(record["impossible"])
    return record["subject"], count(record["parts"]), *drawn, impossible, record["calls"]


def markdown(records: Sequence[Record], seed: int) -> list[str]:
    """Return the lines of the report."""
    drawn, possible, calls = (
        sum(r[key] for r in records) for key in ("drawn", "possible", "calls")
    )
    differing = [(r["subject"], *r["differing"].values()) for r in records]
    tried = [row for row in differing if any(row[1:])]
    arguments, compared, unchecked = (sum(row[place] for row in tried) for place in (1, 2, 3))
    reasons = Counter(
        {text: len(pairs) for r in records for text, pairs in r["impossible"].items()}
    )
    return [
        "# Domains: the parts of every parameter, drawn in pairs",
        "",
        f"Seed {seed}: {drawn} of {possible} possible pairs of {len(records)} functions "
        f"drawn and judged, {calls} calls.",
        "A pair is impossible where the library refuses it in the base row; "
        "the reasons below are the library's.",
        "`REPORT.json` lists the parts and the impossible pairs.",
        "",
        *table(
            ("call", "parts", "drawn in", "possible pairs", "drawn", "impossible", "calls"),
            map(cells, records),
        ),
        "",
        "## Ranks that differ",
        "",
        f"{len(tried)} calls with {arguments} arguments: {compared} situations in which an "
        "argument of one rank, or of all, is another or a wrong one, "
        f'{unchecked} with `check="off"`.',
        "",
        *table(("call", "arguments", "situations", "with check off"), tried),
        "",
        "## Reasons why pairs are impossible",
        "",
        *(f"- {number} pairs: {reason}" for reason, number in reasons.most_common()),
    ]
