"""Compare the speed of two commits: `python -m benchmarks.compare BASE [HEAD]`.

Base is where HEAD left BASE. Every case is launched in pairs, base and head in the order of a
thrown coin; what looks changed after 10 pairs is looked at in 20 more. Exit code: 0 fine, 1
something regressed, 2 usage, 3 something is missing or does not match, or nothing could be judged,
4 inconclusive under --strict.
"""

from __future__ import annotations

import argparse
import secrets
import sys
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks import launching
from benchmarks.cases.setting import Setting
from benchmarks.compare.result import RECORDS, Compared, build
from benchmarks.compare.rule import GATEABLE_SHARE
from benchmarks.compare.running import Bench, Runner, Session, Told
from benchmarks.compare.sides import Side, commits, sides, uncommitted
from benchmarks.launching import ROOT, Launch, UsageError, add_launching, numbers_of_ranks, writable
from benchmarks.reporting import terminal
from benchmarks.reporting.tables import DASH, Table, make
from benchmarks.reporting.terminal import Console

COLUMNS = (
    "case",
    "P",
    "verdict",
    "head / base",
    "interval",
    "slower",
    "counts from",
    "base (ms)",
    "head (ms)",
    "remarks",
)
CODES = {
    0: "nothing got slower",
    1: "something got slower",
    3: "not everything could be compared",
    4: "not everything could be decided",
}


def table(result: Mapping[str, Any]) -> Table:
    """Return a line for each row of a result."""
    names = [
        f"{side} {result[side]['ref']} ({(result[side]['sha'] or 'changed')[:10]})"
        for side in ("base", "head")
    ]
    title = " against ".join(names) + (": the same commit" if result["same_commit"] else "")
    return make(title, COLUMNS, map(cells, result["rows"]))


def cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the texts of one line."""
    remarks = [text for text in (row["reason"], row["explanation"], *row["flags"]) if text]
    head = (row["case"], str(row["ranks"]), row["verdict"])
    if row["ratio"] is None:
        return (*head, *[DASH] * 6, "; ".join(remarks))
    interval = f"{row['low']:.3f} to {row['high']:.3f}"
    times = (f"{row[side] * 1e3:.3f}" for side in ("base_s", "head_s"))
    slower = f"{row['slower']} of {row['pairs']}"
    return (
        *head,
        f"{row['ratio']:.3f}",
        interval,
        slower,
        f"{row['delta']:.1%}",
        *times,
        "; ".join(remarks),
    )


def summary(result: Mapping[str, Any]) -> Iterator[str]:
    """Sum up a result in a few lines."""
    counts = (
        ", ".join(f"{count} {verdict}" for verdict, count in result["counts"].items()) or "no case"
    )
    yield f"{counts}. Exit code {result['exit_code']}: {CODES[result['exit_code']]}."
    if 0 < result["gateable_share"] < GATEABLE_SHARE:
        yield (
            f"Only {result['gateable_share']:.0%} of the cases are quiet enough to be judged, {GATEABLE_SHARE:.0%} should be: "
            "is something else running on this machine?"
        )
    if result["same_commit"]:
        yield "Base and head are the same commit, so this measures the comparison itself."
    yield from result["problems"]


USAGE, INTERRUPTED = 2, 130
REPORTS = ROOT / "reports" / "compare"


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(prog="compare", description=(__doc__ or "").partition("\n")[0])
    made.add_argument(
        "base",
        metavar="BASE",
        help="branch or commit that HEAD is compared with; base is where HEAD left it",
    )
    made.add_argument(
        "head", metavar="HEAD", nargs="?", default="HEAD", help="branch or commit (default: HEAD)"
    )
    made.add_argument(
        "--strict", action="store_true", help="exit code 4 where a case is inconclusive"
    )
    add_measuring(made)
    return made


def add_measuring(made: argparse.ArgumentParser) -> None:
    """Add the options that say what is measured, and where files go."""
    made.add_argument(
        "--cases",
        nargs="+",
        default=[],
        metavar="TEXT",
        help="only cases with one of these in their name",
    )
    made.add_argument(
        "--full",
        action="store_true",
        help="all cases that `nox -s bench` has, instead of the quick ones",
    )
    add_launching(made, ranks="1,2", timeout=300.0)
    made.add_argument(
        "--out",
        type=Path,
        metavar="FOLDER",
        help="new folder for files (default: one in reports/compare)",
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    options = parser().parse_args(arguments)
    try:
        out = fresh_folder(options.out)
        hashes = commits(options.base, options.head)
        if uncommitted():
            print(
                "note: sp_core has changes that are not committed; they are not compared.",
                file=sys.stderr,
            )
        with sides(*hashes, (options.base, options.head)) as pair:
            result = compare(pair, options, runner(options, out.name), out)
    except UsageError as error:
        print(f"compare: {error}", file=sys.stderr)
        return USAGE
    except KeyboardInterrupt:
        print(
            "\ncompare: interrupted, so nothing is judged; the records so far are kept.",
            file=sys.stderr,
        )
        return INTERRUPTED
    return int(result["exit_code"])


def runner(options: argparse.Namespace, run_id: str) -> Bench:
    """Return what measures as the options ask.

    Raises:
        UsageError: they cannot be followed.
    """
    Launch(options.launcher, options.timeout)
    setting = Setting(
        run_id=run_id, quick=not options.full, device=options.device, share_gpu=options.share_gpu
    )
    return Bench(setting, options.launcher, options.timeout)


def compare(
    pair: tuple[Side, Side], options: argparse.Namespace, measures: Runner, out: Path
) -> dict[str, Any]:
    """Measure two sides, judge, write the result, and show it.

    Args:
        pair: base and head.
        options: from `add_measuring`, and `strict`.
        measures: is launched.
        out: an empty folder.

    Raises:
        UsageError: options that cannot be run.
    """
    ranks = numbers_of_ranks(options.ranks)
    listed = {side.name: chosen(measures.listed(side, ranks), options.cases) for side in pair}
    seed = secrets.randbits(32)
    if not any(listed.values()):
        raise UsageError(
            f"no case has {' or '.join(options.cases)} in its name. `nox -s bench -- --list` names all."
        )
    screen = terminal.console()
    terminal.say(screen, f"files: {out}")
    with terminal.bar(screen) as bar:
        Session(measures, pair, seed, out / RECORDS, heard(screen, bar)).run(
            listed["base"] & listed["head"]
        )
    compared = Compared(pair[0].told, pair[1].told, seed, ranks, listed)
    result = build(out, compared, strict=options.strict)
    terminal.show(screen, table(result))
    for line in summary(result):
        terminal.say(screen, line)
    return result


def heard(screen: Console, bar: Any) -> Told:
    """Return a listener that shows how far a comparison is: in a bar on a terminal, else as a line now and then."""
    tasks: dict[str, Any] = {}

    def told(what: str, done: int, total: int, seconds_left: float) -> None:
        left = f"about {duration(seconds_left)} left in this stage"
        stage = what.partition(" ")[0]
        if not screen.is_terminal and (done == 1 or done % 10 == 0 or done == total):
            terminal.say(screen, f"{stage}: {done} of {total} launches, {left}")
        if stage not in tasks:
            tasks[stage] = bar.add_task(what, total=total)
        bar.update(tasks[stage], description=f"{what}, {left}", completed=done, total=total)

    return told


def duration(seconds: float) -> str:
    """Return seconds for a person: 40 s, 3 min."""
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"


def chosen(keys: set[tuple[str, int]], texts: Sequence[str]) -> set[tuple[str, int]]:
    """The cases that have one of the texts in their name; all where there is no text."""
    return {name for name in keys if not texts or any(text in name[0] for text in texts)}


def fresh_folder(wanted: Path | None) -> Path:
    """An empty folder for the files of one comparison.

    Raises:
        UsageError: there is something in it, which must not be mixed with new records.
    """
    name = f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{secrets.token_hex(3)}"
    folder = wanted or REPORTS / name
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(
            f"{folder} is not empty. Pass a new --out, so that no records are lost or mixed."
        )
    writable(folder / RECORDS)
    return folder


if __name__ == "__main__":
    launching.main(main)
