"""This project's attention schemes against torch's ring, DeepSpeed's Ulysses and one process: causal, two ranks.

All contestants share one pair of processes and take turns in random order; forward and backward are
timed. Each is checked against one process before it is timed, and one that is wrong has no time.
Exit code: 0 if every contestant that is installed was right, whatever the ratios; 1 if one was
wrong or a launch failed; 2 for options that cannot be run.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.contests.contest import RESULTS, Entry, compete, new_document, refused
from benchmarks.contests.peers import memory
from benchmarks.contests.peers.setting import (
    LAUNCHES,
    RANKS,
    REFERENCE_SEQ,
    Setting,
    best,
    lines,
    ratio,
    typical,
)
from benchmarks.files import write_json
from benchmarks.launching import Launch, Options, Record, UsageError, about, main, parse, writable
from benchmarks.reporting import terminal
from benchmarks.reporting.tables import Table, make
from benchmarks.reporting.terminal import Console
from sp_core.machine import cores

LEGEND = (
    "One launch gives one number per contestant, the median of its samples; a ratio is the median over the launches, in brackets "
    "its exact interval (order statistics; 95 %, or the widest with fewer than 6 launches). open: the interval crosses the bound. "
    "Times: forward and backward, last rank's end minus first rank's start."
)
USUAL = Setting()
OPTIONS: Options = {
    "--launches": about(
        type=int, default=LAUNCHES, metavar="N", help="how often processes start (%(default)s)"
    ),
    "--seq": about(
        default=",".join(map(str, USUAL.seqs)),
        metavar="S,S,...",
        help="lengths (default: %(default)s)",
    ),
    "--rounds": about(
        type=int, default=USUAL.rounds, metavar="N", help="samples per launch at 4096 (%(default)s)"
    ),
    "--heads": about(type=int, default=USUAL.heads, metavar="H", help="default: %(default)s"),
    "--head-dim": about(type=int, default=USUAL.head_dim, metavar="D", help="default: %(default)s"),
    "--seed": about(
        type=int, default=USUAL.seed, metavar="N", help="of inputs and order (default: %(default)s)"
    ),
    "--check": about(
        action="store_true", help="compare results with one process, time nothing, write no file"
    ),
    "--out": about(
        type=Path, default=RESULTS / "peers.json", metavar="FILE", help="default: %(default)s"
    ),
    "--resume": about(
        action="store_true", help="go on with the launches of --out, up to --launches in all"
    ),
    "--timeout": about(
        type=float, default=1800.0, metavar="S", help="limit of a launch (default: %(default)g)"
    ),
}


def chosen(options: argparse.Namespace) -> Setting:
    """Return the sizes that the options ask for.

    Raises:
        UsageError: they cannot be run.
    """
    try:
        seqs = tuple(int(part) for part in options.seq.split(","))
    except ValueError:
        raise UsageError(
            f"--seq {options.seq!r} is not a list of numbers; pass one such as 1024,4096."
        ) from None
    if options.launches < 1:
        raise UsageError("--launches must be positive.")
    sizes = {
        "heads": options.heads,
        "head_dim": options.head_dim,
        "rounds": options.rounds,
        "seed": options.seed,
    }
    return Setting(seqs=seqs, check_only=options.check, **sizes)


def begun(path: Path, fresh: Record) -> Record:
    """Return the document of an earlier run, if it measured the same.

    Raises:
        UsageError: the file holds something else.
    """
    if not path.exists():
        return fresh
    try:
        found: Record = json.loads(path.read_text())
        differing = [
            name for name in ("schema_version", "commit", "setting") if found[name] != fresh[name]
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"--resume: {path} cannot be read ({error!r}); pass another --out."
        ) from None
    if differing:
        raise UsageError(
            f"--resume: {path} differs in {', '.join(differing)} from what is asked for; pass another --out."
        )
    return found


def peers(arguments: Sequence[str] | None = None) -> int:
    """Run the comparison; return the exit code."""
    options = parse("peers", __doc__, OPTIONS, arguments)
    try:
        setting, launch = chosen(options), Launch(timeout=options.timeout)
        document = new_document(setting=json.loads(msgspec.json.encode(setting)))
        document = begun(options.out, document) if options.resume else document
        out = None if options.check else writable(options.out)
    except UsageError as error:
        return refused("peers", error)
    seeds = range(
        setting.seed + len(document["launches"]),
        setting.seed + (1 if options.check else options.launches),
    )
    entries = [
        Entry(
            f"seed {seed}",
            RANKS,
            f"{__package__}.heat:measure",
            msgspec.structs.replace(setting, seed=seed),
            launch,
        )
        for seed in seeds
    ]

    def show(screen: Console, done: Record) -> Iterator[str]:
        if cores() < RANKS:
            terminal.say(
                screen,
                f"note: {cores()} core for {RANKS} ranks; these times say nothing about schemes.",
                "yellow",
            )
        for table in tables(done["launches"], setting):
            terminal.show(screen, table)
        if out is not None and REFERENCE_SEQ in setting.seqs:
            peaks = memory.measure()
            terminal.show(screen, memory.table(peaks))
            write_json(out, {**document, "ring_live_bytes": peaks})
        for launch in done["launches"]:
            for heat in launch["seqs"].values():
                bad = {name: check["status"] for name, check in heat.items()}
                yield from (
                    f"{name}: {status}"
                    for name, status in bad.items()
                    if status not in ("ok", "not installed")
                )

    return compete("peers", entries, document, out, show)


def tables(launches: Sequence[Record], setting: Setting) -> Iterator[Table]:
    """Yield a table for each length, its quickest contestant first, and the requirements."""
    for seq in setting.seqs:
        winner = best(launches, seq)
        names = sorted(
            launches[0]["seqs"][str(seq)],
            key=lambda name: typical(launches, seq, name) or float("inf"),
        )
        columns = ("contestant", "ms", f"time / {winner or 'ours'}", "max error", "status")
        rows = [_cells(launches, seq, name, winner) for name in names]
        yield make(f"sequence {seq}, {len(launches)} launches", columns, rows)
    if not setting.check_only:
        required = lines(
            launches, setting.seqs, [seq for seq in setting.seqs if setting.extras(seq)]
        )
        shown = [(line.text, *line.cells()) for line in required]
        yield make("required", ("requirement", "must be", "median, interval", ""), shown, LEGEND)


def _cells(launches: Sequence[Record], seq: int, name: str, winner: str | None) -> tuple[str, ...]:
    time, against = typical(launches, seq, name), ratio(launches, seq, name, winner)
    errors = [
        x for launch in launches for x in launch["seqs"][str(seq)][name].get("errors", {}).values()
    ]
    worst = "-" if not errors else "not finite" if None in errors else f"{max(errors):.1e}"
    milliseconds = "-" if time is None else f"{time * 1e3:.2f}"
    return (
        name,
        milliseconds,
        str(against or "-"),
        worst,
        state([launch["seqs"][str(seq)][name] for launch in launches]),
    )


def state(found: Sequence[dict[str, Any]]) -> str:
    """Say how the checks of a contestant came out."""
    bad = [check for check in found if check["status"] != "ok"]
    if not bad:
        return "ok"
    often = "" if len(bad) == len(found) else f" in {len(bad)} of {len(found)} launches"
    reason = f": {bad[0]['reason']}" if "reason" in bad[0] else ""
    return f"{bad[0]['status']}{often}{reason}"


if __name__ == "__main__":
    main(peers)
