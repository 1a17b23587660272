"""Trying one mutant: a copy of the package with the fault in it, and the suite until a test goes red."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from mutants.catalogue import ROOT, Mutant, Stale

COPIED = (
    "sp_core",
    "tests",
    "benchmarks",
    "ci",
    "docs",
    "pyproject.toml",
    "README.md",
    "noxfile.py",
)
ELSEWHERE = (
    *(
        "append_history",
        "bench",
        "ci_scripts",
        "compare*",
        "conformance",
        "counters",
        "doctor",
        "explore",
        "history",
    ),
    *(
        "kit_*",
        "layout",
        "llama_command",
        "mutants*",
        "peers*",
        "promote_pr",
        "readme",
        "records",
        "reporting*",
        "scaling*",
    ),
    *("slurm", "trace", "workflows"),
)
"""Tests of benchmarks, commands, CI and the kit itself: `test_*.py` that say nothing about a fault of the library."""

FILE = "SP_MUTANTS_WITNESS"
"""Names the file that the witness writes."""
RANKS, RANK = 4, ("OMPI_COMM_WORLD_RANK", "PMI_RANK")
SECONDS = {"chosen": 240.0, "threads": 900.0, "ranks": 900.0}
"""Limits of the stages: the files that a mutant names, all with ranks as threads, all under mpiexec."""
STAGES = tuple(SECONDS)
GRACE_SECONDS = 20.0
TIME_IS_UP = "the launch has not ended"
ENDED = "the launch was ended: "
UNENDED = "Timeout (0:"  # faulthandler's, when pytest is told how long a test may take
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

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


@dataclass(frozen=True)
class Ending:
    """How a stage ended: its exit code (None: it had to be shot), what the witness told, and what was printed last."""

    code: int | None
    told: dict[str, Any]
    printed: str


def judged(stage: str, ending: Ending) -> Outcome | None:
    """What the end of a stage says; None where the next one has to decide."""
    if ending.told:
        told = ending.told
        return Outcome("killed", stage, told["law"], told["examples"], words=told["words"])
    if ending.code is None or TIME_IS_UP in ending.printed:
        return Outcome("hung", stage, words="no end within its time")
    if ending.code in NOTHING_FAILED:
        return None
    if ENDED in ending.printed:
        return Outcome(
            "killed",
            stage,
            "the launcher",
            words=ending.printed.partition(ENDED)[2].splitlines()[0].strip(" ="),
        )
    if ending.code < 0:
        return Outcome("killed", stage, "the process died", words=signal.Signals(-ending.code).name)
    if UNENDED in ending.printed:
        return Outcome(
            "killed",
            stage,
            "the session",
            words="a test has not ended, and the session was ended with all stacks",
        )
    if ending.code == TESTS_FAILED:
        return Outcome("killed", stage, "the session", words="an error above half its bound")
    return Outcome(
        "broken", stage, words=f"exit code {ending.code}: {' '.join(ending.printed.split())[-200:]}"
    )


def tried(mutant: Mutant, until: str = STAGES[-1]) -> Outcome:
    """Plant a mutant, and run stage after stage until one decides."""
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="sp_core-mutant-") as directory:
        copy = Path(directory)
        copy_package(copy)
        try:
            text = mutant.planted((copy / mutant.file).read_text())
        except (Stale, FileNotFoundError) as error:
            return Outcome("stale", words=str(error))
        (copy / mutant.file).write_text(text)
        outcome = decided(copy, mutant.tests, until)
    return Outcome(**{**outcome.as_dict(), "seconds": round(time.monotonic() - begin, 1)})


def unharmed(files: Sequence[str]) -> Outcome:
    """The same without a fault: what is red here cannot kill anything."""
    with tempfile.TemporaryDirectory(prefix="sp_core-mutant-") as directory:
        copy_package(Path(directory))
        found = (decided(Path(directory), [file], STAGES[0]) for file in files)
        return next(
            (outcome for outcome in found if outcome.verdict != "survived"),
            Outcome("survived", STAGES[0]),
        )


def decided(copy: Path, files: Sequence[str], until: str) -> Outcome:
    """Run the stages on a copy."""
    for stage in STAGES[: STAGES.index(until) + 1]:
        outcome = judged(stage, run_stage(copy, stage, files))
        if outcome is not None:
            return outcome
    return Outcome("survived", until)


def copy_package(copy: Path) -> None:
    """The package and its tests, with what Python has compiled of them."""
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, copy / name, ignore=shutil.ignore_patterns("results", "*.tmp"))
        else:
            shutil.copy2(source, copy / name)


def run_stage(copy: Path, stage: str, files: Sequence[str]) -> Ending:
    """Run the tests of a stage to the first failure."""
    witness = copy / f"{stage}.json"
    arguments = command(stage, [*test_files(copy, stage, files)])
    with (copy / f"{stage}.txt").open("w") as output:
        code = run(
            arguments, copy, output.fileno(), environment(copy, witness, stage), SECONDS[stage]
        )
    told = json.loads(witness.read_text()) if witness.exists() else {}
    return Ending(code, told, (copy / f"{stage}.txt").read_text(errors="replace"))


def test_files(copy: Path, stage: str, chosen: Sequence[str]) -> Iterator[str]:
    """The test files of a stage, in order: those chosen, or all of the library that have not run yet."""
    if stage == "chosen":
        yield from (f"tests/{name}" for name in chosen)
        return
    elsewhere = {
        path.name for pattern in ELSEWHERE for path in copy.glob(f"tests/test_{pattern}.py")
    }
    first = [f"tests/{name}" for name in chosen] if stage == "ranks" else []
    rest = [
        f"tests/{p.name}"
        for p in sorted(copy.glob("tests/test_*.py"))
        if p.name not in {*elsewhere, *chosen}
    ]
    yield from (*first, *rest)


def command(
    stage: str,
    files: Sequence[str],
    seconds: float = SECONDS["ranks"] - 60,
    extra: Sequence[str] = (),
) -> list[str]:
    """What a stage runs. Under mpiexec the launch ends itself after some seconds."""
    suite = ["-m", "pytest", "-q", "-x", "--tb=short", *plugins(), *extra]
    if stage != "ranks":
        return [sys.executable, *suite, *files]
    launch = [
        "-m",
        "sp_core.testing.launch",
        "-n",
        str(RANKS),
        "--timeout",
        f"{seconds:g}",
        "--",
        "python",
    ]
    return [sys.executable, *launch, *suite, "--only-mpi", "--sp-expect-ranks", str(RANKS), *files]


def plugins() -> list[str]:
    """The plugins of every stage."""
    installed = any(
        entry.value == "sp_core.testing.plugin" for entry in entry_points(group="pytest11")
    )
    return [
        *([] if installed else ["-p", "sp_core.testing.plugin"]),
        "-p",
        "mutants.witness",
        "-p",
        "no:cacheprovider",
    ]


def environment(copy: Path, witness: Path, stage: str) -> dict[str, str]:
    """The copy comes before what is installed; ranks as threads draw as many examples as in `nox -s tests`."""
    paths = [str(copy), str(copy / "tests")]
    profile = {} if stage == "ranks" else {"SP_PROFILE": os.environ.get("SP_PROFILE", "quick")}
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(paths),
        FILE: str(witness),
        **profile,
    }


def run(
    arguments: Sequence[str], folder: Path, output: int, variables: dict[str, str], seconds: float
) -> int | None:
    """Run a command to its end, or to the end of its time.

    Returns:
        The exit code; None where the time was up.
    """
    process = subprocess.Popen(
        arguments,
        cwd=folder,
        env=variables,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a command and what it has started; the launcher needs a moment to end its ranks."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(GRACE_SECONDS)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue
