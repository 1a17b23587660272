"""Sequences of unequal length on P ranks: how balanced each policy is, and how much faster that makes a prefill.

The workload has a sequence for each file of the standard library, with a 64th of its bytes. Exit code: 0 if every policy computed
the right logits and the balanced one's counted operations have max/mean below 1.05; 1 if not, or if a launch failed; 2 for options
that cannot be run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.balance import tables
from benchmarks.balance.workload import Setting, plans, predicted
from benchmarks.files import write_json
from benchmarks.launching import ROOT, commit, numbers_of_ranks, tail
from sp_core.launch import command as launch
from sp_core.llama.unequal import work_of
from sp_core.machine import busy_share, cores
from sp_core.scheduling import one_forward_one_backward, picture, timeline

RESULT = ROOT / "benchmarks" / "results" / "balance.json"
WORKER = ("python", "-m", "mpi4py", "-m", "benchmarks.balance.worker")
SCHEMA_VERSION = 1
WIDTH = 132


def parser() -> argparse.ArgumentParser:
    """The command line."""
    usual = Setting()
    made = argparse.ArgumentParser(prog="python -m benchmarks.balance", description=__doc__)
    made.add_argument("--ranks", default="2,4", metavar="P,P,...", help="numbers of ranks (default: %(default)s)")
    made.add_argument("--rounds", type=int, default=usual.rounds, metavar="N", help="timed rounds (default: %(default)s)")
    made.add_argument("--most", type=int, default=0, metavar="N", help="take only so many sequences; all if 0 (default)")
    made.add_argument("--seed", type=int, default=0, metavar="N", help="of weights and order (default: %(default)s)")
    made.add_argument("--out", type=Path, default=RESULT, metavar="FILE", help="default: benchmarks/results/balance.json")
    made.add_argument("--timeout", type=float, default=600.0, metavar="S", help="limit of a launch (default: %(default)g)")
    return made


def settings(options: argparse.Namespace) -> list[Setting]:
    """One launch for each number of ranks; with more ranks than cores nothing is timed.

    Raises:
        ValueError: options that cannot be run.
    """
    ranks = numbers_of_ranks(options.ranks, ValueError)
    if options.rounds < 0 or options.most < 0 or options.timeout <= 0:
        raise ValueError("--timeout must be positive, --rounds and --most at least 0.")
    given = {"most": options.most, "seed": options.seed}
    return [Setting(ranks=size, rounds=options.rounds if size <= cores() else 0, **given) for size in ranks]


def run_once(setting: Setting, timeout: float) -> dict[str, Any]:
    """Plan, start the ranks, wait for their end, and read their record.

    Raises:
        RuntimeError: they failed; the text has what they printed.
    """
    lengths = list(map(len, setting.sequences()))
    planned = {name: predicted(plan, work_of(setting.config)) for name, plan in plans(lengths, setting).items()}
    with tempfile.TemporaryDirectory(prefix="sp_core-balance-") as name, contextlib.chdir(ROOT):
        folder = Path(name)
        (folder / "setting.json").write_text(json.dumps(setting.as_dict()))
        code = launch.run(setting.ranks, [*WORKER, name], timeout=timeout)
        if code != 0 or not (folder / "record.json").exists():
            printed = "\n".join(tail(path.read_text(errors="replace")) for path in sorted(folder.glob("output-*")))
            raise RuntimeError(f"P = {setting.ranks}: exit code {code}; the ranks printed:\n{printed}")
        found = json.loads((folder / "record.json").read_text())
    return {"sequences": len(lengths), "tokens": sum(lengths), "planned": planned, **found}


def main(arguments: Sequence[str] | None = None) -> int:
    """Plan, count and time.

    Returns:
        The exit code.
    """
    from rich.console import Console

    options = parser().parse_args(arguments)
    try:
        chosen = settings(options)
    except ValueError as error:
        print(f"balance: {error}", file=sys.stderr)
        return 2
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    document: dict[str, Any] = {"schema_version": SCHEMA_VERSION, "commit": commit(), "busy_before": busy_share(), "launches": []}
    failed = False
    for setting in chosen:
        try:
            document["launches"].append(run_once(setting, options.timeout))
        except RuntimeError as error:
            failed = True
            console.print(f"balance: {error}", style="red", highlight=False, markup=False)
            continue
        write_json(options.out, document)
        show(console, document["launches"][-1])
    console.print(tables.LEGEND, style="dim", highlight=False, soft_wrap=True)
    wrong = tables.problems(document["launches"])
    for line in wrong:
        console.print(f"balance: {line}", style="red", highlight=False, soft_wrap=True)
    return int(failed or bool(wrong))


def show(console: Any, record: tables.Record) -> None:
    """The tables of one launch, and what its pipeline looks like."""
    console.print(tables.balance(record))
    if record["bubbles"]:
        console.print(tables.bubbles(record))
        shown = picture(timeline(one_forward_one_backward(record["setting"]["ranks"], 4)))
        console.print(f"1F1B with 4 micro-batches, a prime for a backward:\n{shown}", highlight=False, markup=False)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the ranks are ended too
    raise SystemExit(main())
