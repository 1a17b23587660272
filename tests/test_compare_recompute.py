"""The recomputation comes to the same verdicts, and shows what was tampered with."""

from __future__ import annotations

import hashlib
import json
import math
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kit.comparison import CASES, RING, Machine, compared

from benchmarks.compare import recompute
from benchmarks.compare.result import RECORDS, RESULT
from benchmarks.compare.rule import Verdict, judge, suspicion

pytestmark = pytest.mark.mpi_skip  # no communication

Json = dict[str, Any]
CHANGES = {Verdict.REGRESSED: 1, Verdict.IMPROVED: -1}


def machine_at_random(seed: int) -> Machine:
    """Any mixture of changes, noise and faults."""
    draw = random.Random(seed)
    places = [(case, ranks) for case in CASES for ranks in (1, 2)]
    slower = {place: draw.choice((0.8, 1.07, 1.1, 1.13, 1.3)) for place in draw.sample(places, 3)}
    broken = {
        ("head", *draw.choice(places), draw.choice(("screen", "confirm")), draw.randrange(10))
        for _ in range(draw.randrange(2))
    }
    lost = {(draw.choice(("base", "head")), draw.choice(CASES))} if draw.random() < 0.2 else set()
    return Machine(
        seed,
        draw.choice((0.01, 0.03, 0.05, 0.1)),
        slower,
        broken,
        lost,
        cores=draw.choice((1, 2, 2, 2)),
    )


def test_a_stranger_comes_to_the_same_verdicts(tmp_path: Path) -> None:
    seen: Counter[str] = Counter()
    for seed in range(12):
        folder = tmp_path / str(seed)
        folder.mkdir()
        result = compared(folder, machine_at_random(seed), seed=seed, strict=bool(seed % 2))
        assert recompute.check(folder) == []
        seen.update(result.counts)
    assert set(seen) >= {
        "regressed",
        "improved",
        "no regression",
        "inconclusive",
        "ungateable",
        "oversubscribed",
        "missing",
    }


@pytest.mark.parametrize("stage", ["screen", "confirm"])
def test_the_stranger_counts_alike(stage: str) -> None:
    """At every count of slower pairs, and on both sides of the edge of the median."""
    words = {1: "slower", -1: "faster", 0: "nothing"}
    pairs, share = {"screen": (10, 0.8), "confirm": (20, 1.0)}[stage]
    for slower in range(pairs + 1):
        for size in (math.log1p(share * 0.1) * factor for factor in (0.999, 1.001, 5.0)):
            logs = [size] * slower + [-size] * (pairs - slower)
            screen, confirm = (
                (logs, ())
                if stage == "screen"
                else ([math.copysign(1, 2 * slower - pairs)] * 10, logs)
            )
            found = (
                suspicion(screen, 0.1)
                if stage == "screen"
                else CHANGES.get(judge(screen, confirm, 0.1).verdict, 0)
            )
            assert recompute.direction(stage, logs, 0.1) == words[found]


def edit_records(change: Callable[[list[Json]], object]) -> Callable[[Path], None]:
    """Change the stored records, and the hash that would betray it."""

    def edit(folder: Path) -> None:
        path = folder / RECORDS
        records = [json.loads(line) for line in path.read_text().splitlines()]
        change(records)
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        edit_result(lambda result: result.update(records_sha256=digest))(folder)

    return edit


def edit_result(change: Callable[[Json], object]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        result = json.loads((folder / RESULT).read_text())
        change(result)
        (folder / RESULT).write_text(json.dumps(result))

    return edit


def heads(records: list[Json]) -> list[Json]:
    return [
        record
        for record in records
        if record["pair"]["side"] == "head" and record["case"]["id"] == RING
    ]


def speed_up(records: list[Json]) -> None:
    for record in heads(records):
        record["timing"]["samples_s"] = [seconds / 1.3 for seconds in record["timing"]["samples_s"]]


@pytest.mark.parametrize(
    ("edit", "complaint"),
    [
        (edit_records(speed_up), "by these records, the result says ('regressed'"),
        (
            edit_records(lambda records: records.remove(heads(records)[3])),
            "('missing', None) by these records",
        ),
        (
            edit_records(lambda records: heads(records)[3]["pair"].update(coin=2)),
            "is not what the seed 11 throws",
        ),
        (
            edit_records(lambda records: records.reverse()),
            "do not come in the order of their slots",
        ),
        (edit_records(lambda records: records.append(records[-1])), "two records of"),
        (
            edit_records(lambda records: heads(records)[0]["env"].update(fingerprint="0" * 16)),
            "('mismatch', None) by these records",
        ),
        (edit_result(lambda result: result.update(seed=12)), "is not what the seed 12 throws"),
        (
            edit_result(lambda result: result["rows"][0].update(verdict="improved")),
            "the result says ('improved'",
        ),
        (
            edit_result(lambda result: result["rows"].pop(0)),
            "by these records, the result says None",
        ),
        (edit_result(lambda result: result.update(exit_code=0)), "exit code 1 by these verdicts"),
        (edit_result(lambda result: result["cases"]["head"].pop(0)), "the result says"),
        (lambda folder: (folder / RECORDS).write_text("\n"), "is not the file that was judged"),
    ],
)
def test_what_was_tampered_with_shows(
    edit: Callable[[Path], object], complaint: str, tmp_path: Path
) -> None:
    result = compared(tmp_path, Machine(slower={(RING, 2): 1.3}), (2,))
    assert result.rows[0].verdict == "regressed"
    edit(tmp_path)
    assert complaint in "\n".join(recompute.check(tmp_path))


def test_the_recomputation_is_a_script_of_its_own(tmp_path: Path) -> None:
    """It runs without anything installed, and what it reads may be anything."""
    compared(tmp_path, Machine(), (1,))
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / RESULT).write_text("[]")
    run = [sys.executable, "-I", "-S", recompute.__file__]
    good, bad = (
        subprocess.run([*run, str(f)], capture_output=True, text=True, timeout=60)
        for f in (tmp_path, tmp_path / "foreign")
    )
    assert (good.returncode, bad.returncode) == (0, 2)
    assert "every verdict agrees" in good.stdout
    assert "not the result and records of a comparison" in bad.stderr
