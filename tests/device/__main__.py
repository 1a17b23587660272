"""`nox -s device`: test the code for CUDA on a device without hardware.

Arguments go to pytest. Ranks are threads first, then processes of `mpiexec -n 4`.
"""

from __future__ import annotations

import os
import subprocess
import sys

from device.build import NAME, compile_library

FILES = ("schemes", "scheme_laws", "tp_sp", "layers", "dropout", "algorithms")
"""Those that ask the kit for the device of their tensors."""

TESTS = ("tests/device", *(f"tests/test_{name}.py" for name in FILES))
RANKS = 4
LAUNCH = ("-m", "sp_core.testing.launch", "-n", str(RANKS), "--timeout", "1200", "--")


def main(arguments: list[str]) -> int:
    """Run the tests on threads and on processes. Return the first exit code that is not 0."""
    compile_library()
    device = ("-p", "device.plugin", "--sp-device", NAME, "--sp-share-gpu")
    pytest = (sys.executable, "-m", "pytest", *TESTS, *device)
    ranks = ("--only-mpi", "--sp-expect-ranks", str(RANKS))
    environment = {"SP_PROFILE": "brief", **os.environ}
    commands = (*pytest, *arguments), (sys.executable, *LAUNCH, *pytest, *ranks, *arguments)
    codes = [subprocess.run(command, env=environment).returncode for command in commands]
    return max(codes)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
