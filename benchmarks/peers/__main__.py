"""This project's attention schemes against torch's ring, DeepSpeed's Ulysses and one process: causal, two ranks.

All contestants share one pair of processes and take turns in random order; what is timed is forward and backward. Each is checked
against one process before it is timed, and one that is wrong has no time. Exit code: 0 if every contestant that is installed was
right, whatever the ratios; 1 if one was wrong or a launch failed; 2 for options that cannot be run.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.files import write_json
from benchmarks.launching import ROOT, commit
from benchmarks.peers import memory, tables
from benchmarks.peers.launching import run_once
from benchmarks.peers.ratios import LAUNCHES
from benchmarks.peers.setting import RANKS, REFERENCE_SEQ, Setting, SettingError
from sp_core.machine import cores

if TYPE_CHECKING:
    from rich.console import Console

SCHEMA_VERSION = 1
RESULT = ROOT / "benchmarks" / "results" / "peers.json"
WIDTH = 170  # of a table that goes into a file


def parser() -> argparse.ArgumentParser:
    """The command line."""
    usual = Setting()
    made = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__)
    made.add_argument("--launches", type=int, default=LAUNCHES, metavar="N", help="how often processes start (%(default)s)")
    made.add_argument("--seq", default=",".join(map(str, usual.seqs)), metavar="S,S,...", help="lengths (default: %(default)s)")
    made.add_argument("--rounds", type=int, default=usual.rounds, metavar="N", help="samples per launch at 4096 (%(default)s)")
    made.add_argument("--heads", type=int, default=usual.heads, metavar="H", help="default: %(default)s")
    made.add_argument("--head-dim", type=int, default=usual.head_dim, metavar="D", help="default: %(default)s")
    made.add_argument("--seed", type=int, default=usual.seed, metavar="N", help="of inputs and order (default: %(default)s)")
    made.add_argument("--check", action="store_true", help="compare results with one process, time nothing, write no file")
    made.add_argument("--out", type=Path, default=RESULT, metavar="FILE", help="default: benchmarks/results/peers.json")
    made.add_argument("--resume", action="store_true", help="go on with the launches of --out, up to --launches in all")
    made.add_argument("--timeout", type=float, default=1800.0, metavar="S", help="limit of a launch (default: %(default)g)")
    return made


def setting(options: argparse.Namespace) -> Setting:
    """What the options ask for.

    Raises:
        SettingError: options that cannot be run.
    """
    try:
        seqs = tuple(int(part) for part in options.seq.split(","))
    except ValueError:
        raise SettingError(f"--seq {options.seq!r} is not a list of numbers; pass one such as 1024,4096.") from None
    if options.launches < 1 or options.timeout <= 0 or options.head_dim < 1:
        raise SettingError("--launches, --timeout and --head-dim must be positive.")
    sizes = {"heads": options.heads, "head_dim": options.head_dim, "rounds": options.rounds, "seed": options.seed}
    return Setting(seqs=seqs, check_only=options.check, **sizes)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the comparison.

    Returns:
        The exit code.
    """
    from rich.console import Console

    options = parser().parse_args(arguments)
    try:
        chosen = setting(options)
        document = _begun(options.out, chosen) if options.resume else _document(chosen)
    except SettingError as error:
        print(f"peers: {error}", file=sys.stderr)
        return 2
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    launches: list[dict[str, Any]] = document["launches"]
    try:
        measure(console, chosen, 1 if options.check else options.launches, options, document)
    except KeyboardInterrupt:
        console.print("\npeers: interrupted; what is complete follows.", style="red")
        tables.show(console, launches, chosen)
        return 130
    tables.show(console, launches, chosen)
    if REFERENCE_SEQ in chosen.seqs and not chosen.check_only:
        _memory(console, options.out, document)
    return 0 if all(map(_right, launches)) else 1


def _memory(console: Console, path: Path, document: dict[str, Any]) -> None:
    """What the ring holds at once, beside its times."""
    peaks = memory.measure()
    console.print(memory.table(peaks))
    write_json(path, {**document, "ring_live_bytes": peaks})


def _document(chosen: Setting) -> dict[str, Any]:
    return {"schema_version": SCHEMA_VERSION, "commit": commit(), "setting": chosen.as_dict(), "launches": []}


def _begun(path: Path, chosen: Setting) -> dict[str, Any]:
    """What an earlier run has written, if it measured the same."""
    fresh = _document(chosen)
    if not path.exists():
        return fresh
    try:
        found: dict[str, Any] = json.loads(path.read_text())
        differing = [name for name in fresh if name != "launches" and found[name] != fresh[name]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SettingError(f"--resume: {path} cannot be read ({error!r}); pass another --out.") from None
    if differing:
        raise SettingError(f"--resume: {path} differs in {', '.join(differing)} from what is asked for; pass another --out.")
    return found


def measure(console: Console, chosen: Setting, count: int, options: argparse.Namespace, document: dict[str, Any]) -> None:
    """The launches that are missing; the file is written anew after each, so that an interruption loses one at most."""
    if cores() < RANKS and not chosen.check_only:
        console.print(f"note: {cores()} core for {RANKS} ranks; these times say nothing about schemes.", style="yellow")
    launches: list[dict[str, Any]] = document["launches"]
    for index in range(len(launches), count):
        launches.append(run_once(replace(chosen, seed=chosen.seed + index), options.timeout))
        _report(console, index, count, launches[-1])
        if not chosen.check_only:
            write_json(options.out, document)


def _report(console: Console, index: int, count: int, record: dict[str, Any]) -> None:
    busy = " The machine was busy with something else." if record["load_before"] > cores() / 2 and index == 0 else ""
    text = f"launch {index + 1} of {count}: {record['status']}, {record['seconds']:.0f} s.{busy}"
    console.print(text, highlight=False, soft_wrap=True)
    if record["status"] != "ok":
        console.print(record["reason"], style="red", highlight=False, markup=False, soft_wrap=True)


def _right(record: dict[str, Any]) -> bool:
    """Whether a launch was completed and every contestant that is installed was right."""
    checks = [check["status"] for heat in record.get("seqs", {}).values() for check in heat.values()]
    return record["status"] == "ok" and all(status in ("ok", "not installed") for status in checks)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the ranks are ended too
    raise SystemExit(main())
