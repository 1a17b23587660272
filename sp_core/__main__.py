"""The command line: `python -m sp_core doctor`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from sp_core import doctor


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m sp_core", description="Sequence-parallel Transformers over MPI.")
    commands = parser.add_subparsers(dest="command", required=True)
    text = "say what this machine offers, try it, and name a remedy for what is broken (exit code 1)"
    examine = commands.add_parser("doctor", help=text, description=doctor.__doc__)
    examine.add_argument("--device", choices=("cpu", "cuda"), help="must work; without it whatever is there is tried")
    options = parser.parse_args(arguments)
    return doctor.main(options.device)


if __name__ == "__main__":
    raise SystemExit(main())
