"""Compare the speed of two commits: `python -m benchmarks.compare BASE [HEAD]`.

Base is where HEAD left BASE. Every case is launched in pairs, base and head in the order of a thrown coin; what looks changed after
10 pairs is looked at in 20 more. Exit code: 0 fine, 1 something regressed, 2 usage, 3 something is missing or does not match, or
nothing could be judged, 4 inconclusive under --strict.
"""

from __future__ import annotations

import argparse
import secrets
import signal
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.compare.launches import Bench
from benchmarks.compare.progress import Shown
from benchmarks.compare.result import RECORDS, Compared, build
from benchmarks.compare.running import Runner, Session
from benchmarks.compare.sides import CompareError, Side, commits, sides, uncommitted
from benchmarks.compare.tables import summary, table
from benchmarks.launching import ROOT, numbers_of_ranks

USAGE = 2
REPORTS = ROOT / "reports" / "compare"


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(prog="compare", description=(__doc__ or "").partition("\n")[0])
    made.add_argument("base", metavar="BASE", help="branch or commit that HEAD is compared with; base is where HEAD left it")
    made.add_argument("head", metavar="HEAD", nargs="?", default="HEAD", help="branch or commit (default: HEAD)")
    made.add_argument("--strict", action="store_true", help="exit code 4 where a case is inconclusive")
    add_measuring(made)
    return made


def add_measuring(made: argparse.ArgumentParser) -> None:
    """The options that say what is measured, and where files go."""
    made.add_argument("--cases", nargs="+", default=[], metavar="TEXT", help="only cases with one of these in their name")
    made.add_argument("--ranks", default="1,2", metavar="LIST", help="numbers of ranks (default: %(default)s)")
    made.add_argument("--full", action="store_true", help="all cases that `nox -s bench` has, instead of the quick ones")
    made.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="default: cpu")
    made.add_argument("--share-gpu", action="store_true", help="let several ranks use one GPU; such times are shown, never judged")
    made.add_argument("--launcher", default="", metavar="COMMAND", help="instead of mpiexec, such as 'srun --ntasks={ranks}'")
    made.add_argument("--timeout", type=float, default=300.0, metavar="S", help="limit for one launch (default: %(default)g)")
    made.add_argument("--out", type=Path, metavar="FOLDER", help="new folder for files (default: one in reports/compare)")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; the exit code."""
    options = parser().parse_args(arguments)
    try:
        out = fresh_folder(options.out)
        hashes = commits(options.base, options.head)
        if uncommitted():
            print("note: sp_core has changes that are not committed; they are not compared.", file=sys.stderr)
        with sides(*hashes, (options.base, options.head)) as pair:
            result = compare(pair, options, runner(options, out.name), out)
    except CompareError as error:
        print(f"compare: {error}", file=sys.stderr)
        return USAGE
    except KeyboardInterrupt:
        print("\ncompare: interrupted, so nothing is judged; the records so far are kept.", file=sys.stderr)
        return 128 + signal.SIGINT
    return int(result["exit_code"])


def catch_termination() -> None:
    """Let SIGTERM end the program as an exception does, so that worktrees are taken away and ranks are ended."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def runner(options: argparse.Namespace, run_id: str) -> Bench:
    """What measures, as the options ask.

    Raises:
        CompareError: they cannot be followed.
    """
    if options.launcher and "{ranks}" not in options.launcher:
        raise CompareError(f"--launcher {options.launcher!r} does not say where the number of ranks goes; write {{ranks}} in it.")
    if options.timeout <= 0:
        raise CompareError(f"--timeout is {options.timeout:g}; pass more than 0.")
    return Bench(run_id, not options.full, options.device, options.share_gpu, options.launcher, options.timeout)


def compare(pair: tuple[Side, Side], options: argparse.Namespace, measures: Runner, out: Path) -> dict[str, Any]:
    """Measure two sides, judge, write the result, and show it.

    Args:
        pair: base and head.
        options: from `add_measuring`, and `strict`.
        measures: what is launched.
        out: an empty folder.

    Raises:
        CompareError: what is asked for cannot be run.
    """
    ranks = numbers_of_ranks(options.ranks, CompareError)
    listed = {side.name: chosen(measures.listed(side, ranks), options.cases) for side in pair}
    seed = secrets.randbits(32)
    keys = listed["base"] & listed["head"]
    if not any(listed.values()):
        raise CompareError(f"no case has {' or '.join(options.cases)} in its name. `nox -s bench -- --list` names all.")
    with Shown(out) as shown:
        Session(measures, pair, seed, out / RECORDS, shown).run(keys)
    compared = Compared(pair[0].told, pair[1].told, seed, ranks, listed)
    result = build(out, compared, strict=options.strict)
    shown.console.print(table(result))
    for line in summary(result):
        shown.console.print(line, highlight=False, soft_wrap=True, markup=False)
    return result


def chosen(keys: set[tuple[str, int]], texts: Sequence[str]) -> set[tuple[str, int]]:
    """The cases that have one of the texts in their name; all where there is no text."""
    return {name for name in keys if not texts or any(text in name[0] for text in texts)}


def fresh_folder(wanted: Path | None) -> Path:
    """An empty folder for the files of one comparison.

    Raises:
        CompareError: there is something in it, which must not be mixed with new records.
    """
    name = f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{secrets.token_hex(3)}"
    folder = wanted or REPORTS / name
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CompareError(f"{folder} is not empty. Pass a new --out, so that no records are lost or mixed.")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


if __name__ == "__main__":
    catch_termination()
    raise SystemExit(main())
