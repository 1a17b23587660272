"""Measure all cases on several numbers of ranks, and keep one record for each: one launch per P, JSON lines, a table at the end.

A record is on the disk as soon as its case is done. A case that fails, and one that a dying launch did not reach, are records too.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

from benchmarks import records
from benchmarks.harness.launches import Plan, UsageError, check_notes, complete, listing, run_launch
from benchmarks.harness.setting import LAYERS, Setting
from benchmarks.launching import ROOT, Launch, commit, git, numbers_of_ranks, tail

RESULTS = ROOT / "benchmarks" / "results"
BRANCHES = ("origin/main", "main")
FINE = ("ok", "skew_limited")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(prog="python -m benchmarks.record", description=__doc__)
    made.add_argument("--ranks", default="1,2,4", metavar="P,P,...", help="numbers of ranks (default: %(default)s)")
    made.add_argument(
        "--out", type=Path, metavar="FILE", help="records are appended to it (default: a new one in benchmarks/results)"
    )
    made.add_argument("--only", action="append", default=[], metavar="PART", help="cases whose id contains it; may be repeated")
    made.add_argument("--layer", action="append", default=[], choices=LAYERS, help="only this suite; may be repeated")
    made.add_argument("--quick", action="store_true", help="a small selection of cases, each for longer")
    made.add_argument("--list", action="store_true", help="print the cases and numbers of ranks, and measure nothing")
    made.add_argument(
        "--root", type=Path, default=ROOT, metavar="FOLDER", help="a checkout: its sp_core is measured (default: this)"
    )
    made.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="default: cpu")
    made.add_argument("--share-gpu", action="store_true", help="let several ranks use one GPU")
    made.add_argument(
        "--timeout", type=float, default=300.0, metavar="S", help="limit for each P in seconds (default: %(default)g)"
    )
    made.add_argument("--launcher", default="", metavar="COMMAND", help="instead of mpiexec, such as 'srun --ntasks={ranks}'")
    made.add_argument("--no-json", action="store_true", help="leave no file for `pytest-benchmark compare`")
    notes = made.add_argument_group("what records say of a launch that is part of something larger")
    notes.add_argument("--pair", type=json.loads, metavar="JSON", help="which measurement of a comparison it is")
    notes.add_argument("--launch", type=int, default=0, metavar="N", help="its number within the run (default: 0)")
    notes.add_argument("--run-id", default="", metavar="ID", help="made of time and chance if not given")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure; 0 where every case came out well, 1 where one did not, 2 for options that cannot be run."""
    options = parser().parse_args(arguments)
    try:
        ranks = numbers_of_ranks(options.ranks, UsageError)
        setting = _setting(options)
        plan = listing(setting, ranks, options.root)
        if not any(plan.values()):
            raise UsageError("no case has that name. `--list` without `--only` and `--layer` prints all.")
        check_notes(setting, next(case for cases in plan.values() for case in cases))
    except UsageError as error:
        print(f"record: {error}", file=sys.stderr)
        return 2
    if options.list:
        for size, cases in plan.items():
            print("\n".join(f"{case['id']} {size}" for case in cases))
        return 0
    Path(setting.out).parent.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that what was started is ended, and recorded
    return _run_all(plan, setting, Launch(options.launcher, options.timeout), options)


def _run_all(plan: Plan, setting: Setting, launch: Launch, options: argparse.Namespace) -> int:
    from benchmarks.harness.show import Display

    out = Path(setting.out)
    display = Display(plan)
    earlier = len(records.read(out).records) if out.exists() else 0
    left = dict(plan)
    try:
        for ranks, cases in plan.items():
            del left[ranks]
            with display.launch(ranks, len(cases)) as progress:
                output = run_launch(ranks, cases, setting, launch, options.root, progress, saves=_saves(options, ranks, out))
            display.problem(ranks, tail(output))
    except KeyboardInterrupt:
        for cases in left.values():
            complete(cases, [], setting, {"status": "missing", "reason": "interrupted"})
        print("\nrecord: interrupted; what is complete is kept.", file=sys.stderr)
    mine = records.read(out).records[earlier:]
    display.tables(mine)
    print(f"records: {out}")
    return 0 if all(record["status"] in FINE for record in mine) else 1


def _saves(options: argparse.Namespace, ranks: int, out: Path) -> list[str]:
    """Where pytest-benchmark's own file goes, beside the records."""
    return [] if options.no_json or options.pair else [f"--benchmark-json={out.with_suffix('')}-p{ranks}.pytest-benchmark.json"]


def _setting(options: argparse.Namespace) -> Setting:
    now = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    out = options.out or RESULTS / f"bench-{now}.jsonl"
    root = options.root.resolve()
    if not (root / "sp_core").is_dir():
        raise UsageError(f"--root {root} has no folder sp_core. Pass a checkout of this repository.")
    if options.launcher and "{ranks}" not in options.launcher:
        raise UsageError(f"--launcher {options.launcher!r} does not say where the number of ranks goes; write {{ranks}} in it.")
    if options.timeout <= 0:
        raise UsageError(f"--timeout is {options.timeout:g}; pass more than 0.")
    return Setting(
        out=str(out.resolve()),
        run_id=options.run_id or f"{now}-{uuid4().hex[:6]}",
        launch=options.launch,
        pair=options.pair,
        commit=_commit(root),
        only=tuple(options.only),
        layers=tuple(options.layer),
        quick=options.quick,
        device=options.device,
        share_gpu=options.share_gpu,
    )


def _commit(root: Path) -> dict[str, Any]:
    """What is checked out there, and where it left the main branch."""
    bases = (git(root, "merge-base", "HEAD", branch) for branch in BRANCHES)
    branch = git(root, "branch", "--show-current")
    return {**commit(root), "merge_base": next(filter(None, bases), None), "branch": branch or None}


if __name__ == "__main__":
    raise SystemExit(main())
