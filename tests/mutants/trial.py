"""Try one mutant: plant it in a copy of the package, and run tests until one goes red.

Tests with ranks as threads run in a fork of a process that has imported torch already: half of the
time of a short run would be that import. The standard library's fork server is single-threaded and
has imported `READY`, but nothing of ours: every child imports the copy that it is to try.
"""

from __future__ import annotations

import compileall
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib.util import cache_from_source
from pathlib import Path
from typing import Any

from kit.plugin import wanted
from mutants.apart import alone
from mutants.plugin import REACH, TESTS, WITNESS
from studies.commands import ROOT, on_ranks, run

OURS = tuple(f"{ROOT / name}{os.sep}" for name in ("sp_core", "tests", "benchmarks"))
UNCOPIED = (".git", ".[!g]*", "reports", "site", "*.tmp")
READY = ["torch", "numpy", "pytest", "hypothesis", "hypothesis.strategies", "mpi4py"]
PLUGINS = ("-p", "mutants.plugin", "-p", "no:cacheprovider")
EARLY = ("-W", "ignore::pytest.PytestAssertRewriteWarning")
"""Pytest would rather import its plugins itself."""
ON_RANKS = "ranks"
"""The stage that runs under mpiexec."""
MORE_SECONDS = 60.0
"""A launch ends itself; if it has not after this time more, it is killed."""
WATCHDOG = {"SP_WATCHDOG_S": "20", "SP_WATCHDOG_PHASE_S": "45"}
"""Examples take less than a second: the suite finds out soon that one hangs."""
TEST_SECONDS = 60
"""No test may take so long: pytest then writes all stacks and ends."""
LIMITED = ("-o", f"faulthandler_timeout={TEST_SECONDS}", "-o", "faulthandler_exit_on_timeout=true")
TIME_IS_UP = "the launch has not ended"
ENDED = "the launch was ended: "
UNENDED = "Timeout (0:"  # faulthandler's
NOTHING_FAILED = (0, 5)
TESTS_FAILED = 1


@dataclass(frozen=True)
class Outcome:
    """What became of a mutant.

    Args:
        verdict: "killed", "survived", "hung", "stale" or "broken" (the tests did not even begin).
        stage: at which.
        law: the test that went red.
        examples: drawn by it until then; 0 where it draws none, or by Hypothesis alone.
        seconds: from the start of the first stage.
        words: what it said.
    """

    verdict: str
    stage: str = ""
    law: str = ""
    examples: int = 0
    seconds: float = 0.0
    words: str = ""


@dataclass(frozen=True)
class Stage:
    """Tests that run in one session.

    Args:
        name: `ON_RANKS` for a launch under mpiexec; with any other name ranks are threads.
        files: of tests.
        seconds: the limit.
        tests: ids of the only tests that run, in order; empty for all of the files.
        variables: of the environment.
    """

    name: str
    files: Sequence[str]
    seconds: float
    tests: Sequence[str] = ()
    variables: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Ending:
    """How a stage ended.

    Args:
        code: exit code; None if the stage was killed.
        told: by the witness.
        printed: by pytest.
    """

    code: int | None
    told: Mapping[str, Any]
    printed: str


class Stale(Exception):
    """The text that a mutant replaces is not there exactly once."""


def tried(file: str, planted: Callable[[str], str], stages: Iterable[Stage]) -> Outcome:
    """Plant a fault, and run stage after stage until one decides.

    Args:
        file: that is changed, below the root of the repository.
        planted: makes its new text.
        stages: of tests.
    """
    begin = time.monotonic()
    outcome = Outcome("survived")
    with tempfile.TemporaryDirectory(prefix="sp_core-", ignore_cleanup_errors=True) as directory:
        copy = Path(directory)
        copy_package(copy)
        target = copy / file
        try:
            target.write_text(planted(target.read_text()))
        except (Stale, FileNotFoundError) as error:
            return Outcome("stale", words=str(error))
        Path(cache_from_source(str(target))).unlink(missing_ok=True)
        for stage in stages:
            outcome = judged(stage.name, run_stage(copy, stage), file)
            if outcome.verdict != "survived":
                break
    return replace(outcome, seconds=round(time.monotonic() - begin, 1))


def judged(stage: str, ending: Ending, file: str) -> Outcome:
    """Return what the end of a stage says of a fault in a file.

    A session that does not begin is red if it names the file; otherwise it says nothing.
    """
    printed, code = ending.printed, ending.code
    if ending.told:
        return Outcome("killed", stage, **ending.told)
    if code is None or TIME_IS_UP in printed:
        return Outcome("hung", stage, words="no end within its time")
    if code in NOTHING_FAILED:
        return Outcome("survived", stage)
    if ENDED in printed:
        words = printed.partition(ENDED)[2].splitlines()[0].strip(" =")
        return Outcome("killed", stage, "the launcher", words=words)
    if code < 0:
        return Outcome("killed", stage, "the process died", words=signal.Signals(-code).name)
    words = f"exit code {code}: {' '.join(printed.split())[-200:]}"
    if UNENDED in printed:
        words = "a test has not ended, and the session was ended with all stacks"
    elif code == TESTS_FAILED:
        words = "an error above half its bound"
    elif file not in printed:
        return Outcome("broken", stage, words=words)
    return Outcome("killed", stage, "the session", words=words)


def copy_package(copy: Path) -> None:
    """Copy the repository, with what Python has compiled of it."""
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(*UNCOPIED), dirs_exist_ok=True)


def compile_all() -> None:
    """Compile the package, and let pytest compile the tests: each copy would else do that again."""
    compileall.compile_dir(ROOT / "sp_core", quiet=1)
    variables = {**os.environ, "PYTHONDONTWRITEBYTECODE": ""}
    collect = [sys.executable, "-m", "pytest", "--collect-only", "-qq", "-p", "no:cacheprovider"]
    subprocess.run(collect, cwd=ROOT, env=variables, stdout=subprocess.DEVNULL, check=False)


def run_stage(copy: Path, stage: Stage) -> Ending:
    """Run the tests of a stage in a copy, to the first failure."""
    output, told = copy / f"{stage.name}.txt", copy / f"{stage.name}.json"
    variables = {"PYTHONPATH": f"{copy}{os.pathsep}{copy}/tests", WITNESS: str(told)}
    variables |= {"OMP_NUM_THREADS": "1", **WATCHDOG, **stage.variables}
    if stage.tests:
        variables[TESTS] = str(copy / "tests.txt")
        (copy / "tests.txt").write_text("\n".join(stage.tests))
    limited = () if REACH in variables else LIMITED
    options = ["-q", "-x", "--tb=short", *wanted(), *PLUGINS, *limited, *stage.files]
    if stage.name == ON_RANKS:
        command = [sys.executable, "-m", "mutants.apart", *on_ranks(stage.seconds, *options)]
        with output.open("w") as file:
            whole, limit = {**os.environ, **variables}, stage.seconds + MORE_SECONDS
            code = run(command, copy, file.fileno(), whole, limit)
    else:
        # As many examples as in `nox -s tests`.
        variables = {"SP_PROFILE": os.environ.get("SP_PROFILE", "quick"), **variables}
        code = forked([*EARLY, *options], copy, output, variables, stage.seconds)
    witness = json.loads(told.read_text()) if told.exists() else {}
    return Ending(code, witness, output.read_text(errors="replace"))


def forked(
    arguments: Sequence[str],
    folder: Path,
    output: Path,
    variables: Mapping[str, str],
    seconds: float,
) -> int | None:
    """Run pytest in a fork of a process that has imported torch.

    Args:
        arguments: of pytest.
        folder: the copy of the repository.
        output: the file that gets what is printed.
        variables: of the environment, beside those of this process.
        seconds: the limit.

    Returns:
        The exit code, negative for a signal; None if the time was up.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(READY)
    process = context.Process(target=_tests, args=(arguments, str(folder), str(output), variables))
    process.start()
    process.join(seconds)
    code = process.exitcode
    # The child leads a group of processes; after a clean end that group is empty.
    with suppress(ProcessLookupError):
        os.killpg(process.pid or 0, signal.SIGKILL)
    process.join()
    process.close()
    return code


def _tests(arguments: list[str], folder: str, output: str, variables: dict[str, str]) -> None:
    """Run pytest in this process, which ends with it.

    Forget the repository's modules first: they start programs of the repository, not of the copy.
    `__main__` stays, which `inspect` looks for.
    """
    for name, module in [*sys.modules.items()]:
        file = getattr(module, "__file__", None) or ""
        if file.startswith(OURS) and name != "__main__":
            del sys.modules[name]
    os.setsid()
    os.chdir(folder)
    with Path(output).open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.update(variables)
    sys.path[:0] = [folder, str(Path(folder) / "tests")]
    sys.dont_write_bytecode = True  # an edited file may have size and time of the one before
    sys.argv = ["pytest", *arguments]
    import pytest

    alone(lambda: int(pytest.main(arguments)))
