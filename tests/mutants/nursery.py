"""Pytest in a fork of a process that has imported torch already: half of the time of a short run would be that import.

The standard library's fork server is single-threaded and has imported what `READY` says, but
nothing of ours: every child imports the copy of the package that it is to try.
"""

from __future__ import annotations

import compileall
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from mutants import trial
from mutants.apart import alone

READY = [
    "torch",
    "numpy",
    "pytest",
    "hypothesis",
    "_pytest.assertion.rewrite",
    "hypothesis.strategies",
    "mpi4py",
]
CHOSEN = ("-p", "mutants.chosen")
EARLY = ("-W", "ignore::pytest.PytestAssertRewriteWarning")
"""Pytest would rather import its plugins itself."""


def plugins() -> list[str]:
    """What pytest is told beside the tests."""
    return [*CHOSEN, *trial.plugins(), *EARLY]


def prepared() -> multiprocessing.context.ForkServerContext:
    """The server; it starts with the first child."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(READY)
    return context


def run(
    arguments: Sequence[str], folder: Path, output: Path, variables: dict[str, str], seconds: float
) -> int | None:
    """Run pytest to its end, or to the end of its time.

    Args:
        arguments: of pytest.
        folder: the copy of the repository.
        output: the file that gets what is printed.
        variables: of the environment, beside those of this process.
        seconds: the limit.

    Returns:
        The exit code, negative for a signal; None where the time was up.
    """
    process = prepared().Process(
        target=_tests, args=([*arguments], str(folder), str(output), variables)
    )
    process.start()
    process.join(seconds)
    code = process.exitcode
    with suppress(ProcessLookupError):
        os.killpg(
            process.pid or 0, signal.SIGKILL
        )  # with what it has started; after a clean end there is nothing
    process.join()
    process.close()
    return code


def compile_all(root: Path) -> None:
    """Compile the package, and let pytest compile the tests: each copy would else do that again."""
    compileall.compile_dir(root / "sp_core", quiet=1)
    variables = {**os.environ, "PYTHONDONTWRITEBYTECODE": ""}
    collect = [sys.executable, "-m", "pytest", "--collect-only", "-qq", "-p", "no:cacheprovider"]
    subprocess.run(collect, cwd=root, env=variables, stdout=subprocess.DEVNULL, check=False)


def _tests(arguments: list[str], folder: str, output: str, variables: dict[str, str]) -> None:
    """What the child does."""
    os.setsid()
    os.chdir(folder)
    with open(output, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.update(variables)
    sys.path[:0] = [folder, str(Path(folder) / "tests")]
    sys.dont_write_bytecode = True  # an edited file may have size and time of the one before
    sys.argv = ["pytest", *arguments]
    import pytest

    alone(lambda: int(pytest.main(arguments)))
