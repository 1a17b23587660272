"""`nox -s device`: test the code for CUDA on a device without hardware, or on a GPU.

Ranks are threads first, then processes of `mpiexec -n 4`. Other arguments go to pytest.
"""

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path

from device.build import NAME, compile_library

ASKS = re.compile(
    r"^from (sp_core.testing|llama_cases) import (\([^)]*|.*)\b(device|mesh_of)\b", re.MULTILINE
)
"""A pattern that matches test files which ask the kit for the device of their tensors."""

TESTS = Path(__file__).resolve().parent.parent
DOMAINS, LAW = "test_domains", "test_every_part_of_every_domain_is_drawn"
"""A test file that draws tensors on the kit's device in one law; its other tests need none."""

RANKS = 4
LAUNCH = ("-m", "sp_core.testing.launch", "-n", str(RANKS), "--timeout", "1200", "--")


def main(words: list[str]) -> int:
    """Run the tests on threads and on processes. Return the largest exit code or signal number."""
    parser = argparse.ArgumentParser("python -m device", description=__doc__)
    parser.add_argument("--on", default=NAME, help="the kind of device (default: %(default)s)")
    parser.add_argument("--only", default="test_*", metavar="PATTERN", help="names of test files")
    parser.add_argument("--ranks", choices=("threads", "processes"), help="default: one by one")
    options, rest = parser.parse_known_args(words)
    files = sorted(TESTS.glob(f"{options.only}.py"))
    tests = [str(path) for path in files if ASKS.search(path.read_text())]
    tests += [f"{path}::{LAW}" for path in files if path.stem == DOMAINS]
    if not tests:
        # pytest would run all files
        parser.error(f"no file {options.only}.py has: from sp_core.testing import device")
    if options.on == NAME:
        compile_library()
        own = [str(TESTS / "device")] if options.only == "test_*" else []
        tests += [*own, "-p", "device.plugin"]
    pytest = (sys.executable, "-m", "pytest", *tests, "--sp-device", options.on, "--sp-share-gpu")
    ranks = ("--only-mpi", "--sp-expect-ranks", str(RANKS))
    environment = {"SP_PROFILE": "brief", **os.environ}
    commands = {
        "threads": (*pytest, *rest),
        "processes": (sys.executable, *LAUNCH, *pytest, *ranks, *rest),
    }
    chosen = [commands[options.ranks]] if options.ranks else commands.values()
    return max(
        abs(subprocess.run(command, env=environment, check=False).returncode) for command in chosen
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
