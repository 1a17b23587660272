"""Parse and run the command line: `sp-core run`, `doctor`, `plan`, `generate` and `logits`.

`python -m sp_core ...` does the same.
"""

import argparse
import errno
import io
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from sp_core import __version__
from sp_core.launch import command
from sp_core.machine import leave_step

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm


def main(arguments: Sequence[str] | None = None, comm: "Intracomm | None" = None) -> int:
    """Run a command of `sp-core` and return its exit code.

    Args:
        arguments: the words after the program's name. None: those of this process.
        comm: the mpi4py communicator whose ranks run `generate` or `logits`. None:
            MPI.COMM_WORLD; but outside of an MPI job, if several ranks are asked for, mpiexec
            starts them.

    Returns:
        The exit code, 0 if the command succeeded.

    Raises:
        SystemExit: the arguments are wrong, or ask for help.
    """
    given = sys.argv[1:] if arguments is None else list(arguments)
    if given[:1] == ["run"]:  # before torch is imported
        return command.main(given[1:])
    if isinstance(sys.stdout, io.TextIOWrapper):  # escape characters that its encoding lacks
        sys.stdout.reconfigure(errors="backslashreplace")
    from sp_core import doctor, inference

    parser = make_parser()
    options = parser.parse_args(given)
    leave_step()
    try:
        if options.command == "doctor":
            return doctor.main(options.device, measure=options.measure)
        if options.command == "plan":
            return _plan(parser, options)
        return inference.main(options, given, comm)
    except OSError as error:
        is_full = error.errno == errno.ENOSPC
        if error.filename is not None or not (is_full or isinstance(error, BrokenPipeError)):
            raise  # not an error of standard output
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if is_full:  # else the reader has closed the pipe, as in `sp-core plan ... | head`
            print(f"sp-core: the output cannot be written: {error}.", file=sys.stderr)
        return 1


def make_parser() -> argparse.ArgumentParser:
    """Return the argument parser of all commands. `run` has options of its own, which it parses."""
    from sp_core import doctor, inference, projection

    parser = argparse.ArgumentParser(
        prog="sp-core", description="Sequence-parallel Transformers over MPI."
    )
    parser.add_argument("--version", action="version", version=f"sp_core {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser(
        "run",
        help="start a program on several ranks, and say where each is if it hangs",
        add_help=False,
    )
    text = (
        "say what this machine offers, try it, and name a remedy for what is broken (exit code 1)"
    )
    examine = commands.add_parser("doctor", help=text, description=doctor.__doc__)
    examine.add_argument(
        "--device", choices=("cpu", "cuda"), help="fail if this device does not work"
    )
    examine.add_argument(
        "--measure",
        action="store_true",
        help="measure the times by which algorithm='auto' chooses, on the ranks of this job or on "
        "two that mpiexec starts, and write them to a file in SP_TUNING_DIR or ~/.cache/sp_core",
    )
    projection.add_arguments(commands)
    inference.add_arguments(commands)
    return parser


def _plan(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    from sp_core import projection
    from sp_core.machine import node_name
    from sp_core.tuning import find, latest

    auto = os.environ.get("SP_TUNING", "auto") in ("", "auto")  # any MPI library's may be used
    try:
        tuning = latest(node_name()) if auto else find(dict)
        print(projection.main(options, tuning), flush=True)
    except ValueError as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
