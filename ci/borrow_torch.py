"""Let this environment use the torch and NumPy of another interpreter, or its own only.

    python ci/borrow_torch.py CONSTRAINTS [INTERPRETER]

A cluster's own torch fits its driver. Prints the path of the constraints file to install with,
which omits torch and NumPy if they are borrowed. All packages in the folder of the borrowed torch
can then be imported; the environment's own packages take precedence.
"""

import json
import re
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

BORROWED = ("torch", "numpy")
LINK = "borrowed_torch.pth"
PROBE = """
import json, pathlib, sys, numpy, torch
places = {str(pathlib.Path(module.__file__).parent.parent) for module in (numpy, torch)}
print(json.dumps([list(sys.version_info[:2]), sorted(places)]))
"""


class CannotBorrow(Exception):
    """Another interpreter's torch cannot be used; the text says why."""


def folders(interpreter: str) -> list[str]:
    """Return the folders in which an interpreter has its torch and NumPy."""
    try:
        answer = subprocess.run(
            [interpreter, "-c", PROBE], capture_output=True, text=True, timeout=300, check=False
        )
    except OSError as error:
        raise CannotBorrow(f"{interpreter} cannot be run: {error.strerror}") from error
    if answer.returncode:
        reason = answer.stderr.strip().rpartition("\n")[2]
        raise CannotBorrow(f"{interpreter} has no torch and NumPy that can be imported ({reason})")
    version, found = json.loads(answer.stdout.splitlines()[-1])
    if version != list(sys.version_info[:2]):
        theirs, ours = (".".join(map(str, one)) for one in (version, sys.version_info[:2]))
        raise CannotBorrow(
            f"{interpreter} is Python {theirs}, this environment Python {ours}; "
            "start nox with the same version"
        )
    return list(found)


def borrow(interpreter: str, constraints: Path, site: Path) -> Path:
    """Let the packages in `site` be joined by an interpreter's torch and NumPy.

    Return the path of the constraints without these two.
    """
    found = folders(interpreter)
    subprocess.run(
        [sys.executable, "-m", "pip", "uninstall", "--quiet", "--yes", *BORROWED],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    (site / LINK).write_text("".join(f"{folder}\n" for folder in found))
    lines = constraints.read_text().splitlines(keepends=True)
    rest = site / "borrowed_constraints.txt"
    rest.write_text(
        "".join(line for line in lines if re.split("[=<>~!; ]", line)[0].strip() not in BORROWED)
    )
    return rest


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the path of the constraints to install with. Return the exit code."""
    constraints, *interpreter = sys.argv[1:] if arguments is None else arguments
    site = Path(sysconfig.get_path("purelib"))
    if not interpreter:
        (site / LINK).unlink(missing_ok=True)
        print(constraints)
        return 0
    try:
        print(borrow(interpreter[0], Path(constraints), site))
    except CannotBorrow as error:
        print(f"SP_TORCH: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
