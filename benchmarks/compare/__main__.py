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
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.cases.setting import Setting
from benchmarks.compare.pairs import build
from benchmarks.compare.rule import RECORDS, Key, Result, Side, summary, table
from benchmarks.compare.sides import Bench, Session, commits, sides, uncommitted
from benchmarks.launching import (
    REPORTS,
    Launch,
    Options,
    UsageError,
    about,
    main as start,
    numbers_of_ranks,
    program,
    starting,
    writable,
)
from benchmarks.reporting import derive, tables
from benchmarks.reporting.__main__ import newest
from benchmarks.reporting.comparison import section
from benchmarks.reporting.page import Page, write

KEPT = "interrupted, so nothing is judged; the records so far are kept."
MEASURING: Options = {
    "--cases": about(
        nargs="+", default=[], metavar="TEXT", help="only cases with one of these in their name"
    ),
    "--full": about(action="store_true", help="all cases of `nox -s bench`"),
    **starting(ranks="1,2", timeout=300.0),
    "--out": about(
        type=Path, metavar="FOLDER", help="new folder (default: one in reports/compare)"
    ),
}
"""Say what is measured, and where files go."""

OPTIONS: Options = {
    **MEASURING,
    "base": about(metavar="BASE", help="branch or commit; base is where HEAD left it"),
    "head": about(metavar="HEAD", nargs="?", default="HEAD", help="default: HEAD"),
    "--strict": about(action="store_true", help="exit code 4 where a case is inconclusive"),
}


@program("compare", __doc__, OPTIONS, KEPT)
def main(options: argparse.Namespace) -> int:
    """Run the command line; return the exit code."""
    out = fresh_folder(options.out)
    hashes = commits(options.base, options.head)
    if uncommitted():
        print(
            "note: sp_core has changes that are not committed; they are not compared.",
            file=sys.stderr,
        )
    with sides(*hashes, (options.base, options.head)) as pair:
        return compare(pair, options, bench(options, out.name), out).exit_code


def bench(options: argparse.Namespace, run_id: str) -> Bench:
    """Return what measures as the options ask.

    Raises:
        UsageError: they cannot be followed.
    """
    device = {"device": options.device, "share_gpu": options.share_gpu}
    setting = Setting(run_id=run_id, quick=not options.full, **device)
    return Bench(setting, Launch(options.launcher, options.timeout))


def compare(
    pair: tuple[Side, Side], options: argparse.Namespace, measures: Bench, out: Path
) -> Result:
    """Measure two sides, judge, show the result, and write a report.

    Args:
        pair: base and head.
        options: those of `MEASURING`, and `strict`.
        measures: is launched.
        out: an empty folder.

    Raises:
        UsageError: options that cannot be run.
    """
    ranks, seed = numbers_of_ranks(options.ranks), secrets.randbits(32)
    listed = {side.name: chosen(measures.listed(side, ranks), options.cases) for side in pair}
    if not any(listed.values()):
        raise UsageError(
            f"no case has {' or '.join(options.cases)} in its name. "
            "`nox -s bench -- --list` names all."
        )
    screen = tables.console()
    tables.say(screen, f"files: {out}")
    heard = tables.following(screen, "compare")
    Session(measures, pair, seed, out / RECORDS, heard).run(listed["base"] & listed["head"])
    result = build(out, *pair, listed, strict=options.strict)
    sections = (section(result), *newest(derive.by_setting(result.records)))
    write(Page("Comparison of two commits", tuple(result.problems), sections), out, "report")
    tables.show(screen, table(result))
    for line in (*summary(result), *result.problems):
        tables.say(screen, line)
    return result


def chosen(keys: set[Key], texts: Sequence[str]) -> set[Key]:
    """Return the cases that have one of the texts in their name; all if there is no text."""
    return {name for name in keys if not texts or any(text in name[0] for text in texts)}


def fresh_folder(wanted: Path | None) -> Path:
    """Return an empty folder for the files of one comparison.

    Raises:
        UsageError: there is something in it, which must not be mixed with new records.
    """
    name = f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{secrets.token_hex(3)}"
    folder = wanted or REPORTS / "compare" / name
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(
            f"{folder} is not empty. Pass a new --out, so that no records are lost or mixed."
        )
    writable(folder / RECORDS)
    return folder


if __name__ == "__main__":
    start(main)
