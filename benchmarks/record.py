"""Measure all cases on several numbers of ranks: a launch for each, a record for each case.

A record is on the disk as soon as its case is done. A case that fails has a record, too, and so has
a case that was not reached because its launch ended early.
"""

import argparse
import subprocess
import sys
from collections.abc import Collection, Iterable, Sequence
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from typing import Any
from uuid import uuid4

import msgspec

from benchmarks import launching, records
from benchmarks.cases.setting import LAYERS, Setting
from benchmarks.checkout import commit
from benchmarks.launching import (
    REPORTS,
    ROOT,
    Launch,
    Options,
    Progress,
    UsageError,
    about,
    numbers_of_ranks,
    tail,
    writable,
)
from benchmarks.machine import busy_share
from benchmarks.records import MEASURED, Case, Record
from benchmarks.reporting import derive, tables
from sp_core.machine import cores

BUSY_SHARE = 0.2
INTERRUPTED = {"status": "missing", "reason": "interrupted"}
Plan = dict[int, list[Case]]
"""The cases of each number of ranks."""

OPTIONS: Options = {
    "--out": about(
        type=Path,
        metavar="FILE",
        help="records are appended to it (default: a new one in reports)",
    ),
    "--only": about(
        action="append",
        default=[],
        metavar="PART",
        help="cases whose id contains it; may be repeated",
    ),
    "--layer": about(
        action="append", default=[], choices=LAYERS, help="only this suite; may be repeated"
    ),
    "--quick": about(action="store_true", help="a small selection of cases, each for longer"),
    "--list": about(
        action="store_true", help="print the cases and numbers of ranks, and measure nothing"
    ),
    "--root": about(
        type=Path,
        default=ROOT,
        metavar="FOLDER",
        help="a checkout: its sp_core is measured (default: this)",
    ),
    **launching.starting(ranks="1,2,4", timeout=300.0),
}


@launching.program("bench", __doc__, OPTIONS)
def main(options: argparse.Namespace) -> int:
    """Measure. Return 0 if every case ended well, 1 if one did not, 2 for bad options."""
    ranks = numbers_of_ranks(options.ranks)
    launch, setting = Launch(options.launcher, options.timeout), _setting(options)
    out = Path(setting.out)
    earlier = records.read(out) if out.exists() else records.Reading()
    if earlier.problems and not earlier.records:
        raise UsageError(f"--out {earlier.problems[0].rstrip('.')}. Pass another file.")
    plan = listing(setting, ranks, options.root)
    each_found(options.only, {case.id for cases in plan.values() for case in cases})
    if options.list:
        for size, cases in plan.items():
            print("\n".join(f"{case.id} {size}" for case in cases))
        return 0
    writable(out)
    return _run_all(plan, setting, launch, options.root)


def each_found(texts: Sequence[str], names: Collection[str]) -> None:
    """Check that each text is in the name of a case; without texts, that there is a case.

    Raises:
        UsageError: a text is in no name.
    """
    if missing := [text for text in texts or [""] if not any(text in name for name in names)]:
        raise UsageError(
            f"no case has {' or '.join(map(repr, missing))} in its name, of those that the other "
            "options choose. `nox -s bench -- --list` names all."
        )


def listing(setting: Setting, ranks: Sequence[int], root: Path) -> Plan:
    """Return the chosen cases for each number of ranks, as the library in `root` lists them.

    Raises:
        UsageError: the library cannot be imported, or lacks something that the cases need.
    """
    asked = (str(root), msgspec.json.encode(setting).decode(), *map(str, ranks))
    answer = subprocess.run(
        [sys.executable, "-m", "benchmarks.cases.setting", *asked],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    if answer.returncode != 0:
        raise UsageError(f"the cases cannot be listed for {root}:\n{tail(answer.stderr)}")
    return msgspec.json.decode(answer.stdout, type=Plan)


def run_launch(
    ranks: int,
    cases: list[Case],
    setting: Setting,
    launch: Launch,
    root: Path,
    progress: Progress = lambda **_: None,
) -> str:
    """Measure the cases of one P; every case has a record afterwards, however the launch ends.

    Args:
        ranks: P, the number of ranks.
        cases: the cases to measure on P ranks.
        setting: the run's setting; records are appended to the file `out` in it.
        launch: how ranks are started.
        root: the checkout whose library is measured.
        progress: called with the case that is being measured.

    Returns:
        The last lines of the ranks' output if the launch failed, else an empty text.
    """
    found = dict(INTERRUPTED)
    job = (ranks, "benchmarks.cases.session:measure", setting, launch)
    try:
        found = launching.run(*job, progress, root=root)
    finally:
        complete(cases, own(setting).records, setting, found)
    return str(found.get("output", ""))


def own(setting: Setting) -> records.Reading:
    """Read the records of a launch from its file, into which other runs may write meanwhile."""
    reading, mine = records.read(setting.out), (setting.run_id, setting.launch)
    reading.records = [one for one in reading.records if (one.run_id, one.launch) == mine]
    return reading


def complete(
    cases: Iterable[Case], done: Iterable[Record], setting: Setting, problem: dict[str, Any]
) -> None:
    """Write a record for every case that has none.

    Args:
        cases: all cases that were planned.
        done: records that the ranks have written.
        setting: the launch's setting.
        problem: "status" and "reason" of the launch's end, and "news", the last progress of rank 0.
    """
    reason = records.reason(problem.get("reason", "nothing was measured"))
    unreached = f"the launch ended before this case: {reason}"
    have, doing = {record.key for record in done}, problem.get("news", {}).get("case")
    for case in cases:
        if (case.id, case.ranks) not in have:
            note = {"status": "missing", "reason": unreached}
            if case.id == doing:
                note = {"status": problem["status"], "reason": reason}
            records.append(setting.out, setting.record(case, **note))


def _run_all(plan: Plan, setting: Setting, launch: Launch, root: Path) -> int:
    total, counts = sum(map(len, plan.values())), ", ".join(map(str, plan))
    tables.say(f"{total} measurements: P = {counts}; this machine offers {cores()} cores.")
    warn_of_load()
    problem = ""
    try:
        _launch_all(plan, setting, launch, root)
    except OSError as error:
        problem = str(error)  # with the file, if there is one
    reading = own(setting)
    found = reading.records
    for table in [*tables.per_ranks(derive.rows(found)), *tables.failures(found)]:
        tables.show(table)
    tables.say(f"records: {setting.out}")
    if len(found) < total:
        told = problem or "; ".join(reading.problems)
        print(f"bench: {told}; {len(found)} of {total} records are kept.", file=sys.stderr)
    return int(len(found) < total or any(record.status not in MEASURED for record in found))


def _launch_all(plan: Plan, setting: Setting, launch: Launch, root: Path) -> None:
    """Run all launches; if interrupted, record what was not reached."""
    try:
        for ranks, cases in plan.items():
            name = f"P = {ranks}"
            output = run_launch(ranks, cases, setting, launch, root, tables.following(name))
            tables.say(f"{name}: done")
            if output:
                tables.say(f"{name} went wrong; the last lines of its output:\n{output}", "red")
    except KeyboardInterrupt:
        print("\nbench: interrupted; what is complete is kept.", file=sys.stderr)
        complete(chain(*plan.values()), own(setting).records, setting, INTERRUPTED)


def warn_of_load() -> None:
    """Warn if other work keeps the machine busy, because the timings do not show that."""
    if (busy := busy_share()) > BUSY_SHARE:
        tables.say(
            f"note: other work keeps {busy:.0%} of this machine busy; timings will suffer.",
            "yellow",
        )


def _setting(options: argparse.Namespace) -> Setting:
    now, root = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ"), options.root.resolve()
    run_id = f"{now}-{uuid4().hex[:6]}"
    out = options.out or REPORTS / f"bench-{run_id}.jsonl"
    if not (root / "sp_core").is_dir():
        raise UsageError(
            f"--root {root} has no folder sp_core. Pass a checkout of this repository."
        )
    return Setting(
        out=str(out.resolve()),
        run_id=run_id,
        commit=commit(root),
        only=tuple(options.only),
        layers=tuple(options.layer),
        quick=options.quick,
        device=options.device,
        share_gpu=options.share_gpu,
    )
