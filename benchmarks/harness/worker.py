"""One rank of one launch: `mpiexec -n P python -m mpi4py -m benchmarks.harness.worker LIBRARY SETTING [pytest arguments]`.

The library that is measured is the `sp_core` of the folder LIBRARY; harness and cases are those of this checkout.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from benchmarks.harness.library import take_library
from benchmarks.harness.setting import LAYERS

BENCHMARKS = Path(__file__).resolve().parent.parent


def keep_quiet() -> None:
    """What rank 0's pytest prints is enough; the runner shows errors of the others."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def main(library: Path, setting: Path, *arguments: str) -> int:
    """Run the benchmarks in this rank's pytest session; its exit code."""
    take_library(library)
    import pytest
    from mpi4py import MPI

    if MPI.COMM_WORLD.rank != 0:
        keep_quiet()
    suites = [str(BENCHMARKS / f"bench_{layer}.py") for layer in LAYERS]
    options = ["-q", "--capture=no", "--no-header", "-p", "no:cacheprovider", "--bench-setting", str(setting)]
    options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # sp_core is imported before the plugin in it is found
    return int(pytest.main([*options, *arguments, *suites]))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:]))
