"""One launch for each number of ranks: what it will measure, how it is started, and records for what it did not reach."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import records
from benchmarks.harness.setting import Setting
from benchmarks.launching import ROOT, Launch, Progress, failure, tail, watch
from benchmarks.records import Record

LIST_SECONDS = 120
NOTHING: dict[str, Any] = dict.fromkeys(("device", "transport", "env", "timing", "phases", "comm", "memory", "work"))
Plan = dict[int, list[dict[str, Any]]]
"""The cases of each number of ranks, as records hold them."""


class UsageError(ValueError):
    """Options that cannot be run; the text says why and what to pass instead."""


def listing(setting: Setting, ranks: Sequence[int], root: Path) -> Plan:
    """The chosen cases, asked of the library that will be measured.

    Raises:
        UsageError: it cannot be imported, or does not have what the cases need.
    """
    with tempfile.TemporaryDirectory(prefix="sp_core-bench-") as name:
        setting.save(Path(name) / "setting.json")
        command = [sys.executable, "-m", "benchmarks.harness.suite", str(root), f"{name}/setting.json", *map(str, ranks)]
        answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIST_SECONDS, check=False)
    if answer.returncode != 0:
        raise UsageError(f"the cases cannot be listed for {root}:\n{tail(answer.stderr)}")
    return {int(size): cases for size, cases in json.loads(answer.stdout).items()}


def run_launch(
    ranks: int,
    cases: list[dict[str, Any]],
    setting: Setting,
    launch: Launch,
    root: Path,
    progress: Progress,
    *,
    saves: Sequence[str] = (),
) -> str:
    """Measure the cases of one P; every case has a record afterwards, however the launch ends.

    Args:
        ranks: P.
        cases: what the ranks will find to measure.
        setting: of the run; its `out` is appended to.
        launch: how ranks are started.
        root: the checkout whose library is measured.
        progress: told which case is measured.
        saves: options for pytest-benchmark's own files.

    Returns:
        What the ranks printed, where the launch went wrong.
    """
    out = Path(setting.out)
    before = len(_written(out))
    problem = {"status": "missing", "reason": "interrupted"}
    told: dict[str, Any] = {}

    def tell(news: dict[str, Any]) -> None:
        told.update(news)
        progress(news)

    with tempfile.TemporaryDirectory(prefix="sp_core-bench-") as name:
        folder = Path(name)
        replace(setting, progress=f"{folder}/progress").save(folder / "setting.json")
        command = launch.command(ranks, "benchmarks.harness.worker", str(root), f"{folder}/setting.json", *saves)
        try:
            code, output = watch(command, folder, launch.timeout, tell)
            problem = failure(code, output, launch.timeout, "measuring " + told.get("case", "nothing yet"))
        finally:
            complete(cases, _written(out)[before:], setting, problem, doing=told.get("case"))
    return output if code != 0 else ""


def complete(
    cases: list[dict[str, Any]], done: list[Record], setting: Setting, problem: dict[str, Any], doing: str | None = None
) -> None:
    """Write a record for every case that has none.

    Args:
        cases: all that were planned for the launch.
        done: records that its ranks have written.
        setting: of the launch.
        problem: status and reason of its end.
        doing: id of the case that was measured last.
    """
    problem = {**problem, "reason": records.reason(problem["reason"])}
    have = {record["case"]["id"] for record in done}
    unreached = {"status": "missing", "reason": f"the launch ended before this case: {problem['reason']}"}
    for case in cases:
        if case["id"] not in have:
            ended = problem if case["id"] == doing else unreached
            records.append(setting.out, {**setting.common(), "case": case, **NOTHING, **ended})


def _written(out: Path) -> list[Record]:
    return records.read(out).records if out.exists() else []
