"""The command line: `sp-core doctor`, `sp-core generate`, `sp-core logits`, also as `python -m sp_core ...`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from sp_core import doctor, inference


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    parser = argparse.ArgumentParser(prog="sp-core", description="Sequence-parallel Transformers over MPI.")
    commands = parser.add_subparsers(dest="command", required=True)
    text = "say what this machine offers, try it, and name a remedy for what is broken (exit code 1)"
    examine = commands.add_parser("doctor", help=text, description=doctor.__doc__)
    examine.add_argument("--device", choices=("cpu", "cuda"), help="must work; without it whatever is there is tried")
    inference.add_arguments(commands)
    options = parser.parse_args(given)
    return doctor.main(options.device) if options.command == "doctor" else inference.main(options, given)


if __name__ == "__main__":
    raise SystemExit(main())
