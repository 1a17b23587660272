"""Run the suite once in its short profile with a seed, and return the outcome."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from soak.laws import LEFT_OUT, THREADS_ONLY
from studies.commands import RANKS, ROOT, on_ranks, printed
from studies.records import junit

STAGES = ("threads", "ranks")
SECONDS = 900.0
"""Limit of a stage in seconds; it takes half a minute on two idle cores."""
SPIN = "import os\nparent = os.getppid()\nwhile os.getppid() == parent: pass"
LONGEST = 300


class Run(NamedTuple):
    """Describe a run.

    Args:
        kind: "idle", or "loaded" if other processes keep all cores busy during the run.
        number: the run's number among those of its kind.
        seed: the seed of all its examples.
    """

    kind: str
    number: int
    seed: int


def carried_out(
    wanted_run: Run, files: Sequence[str], stages: Sequence[str], folder: Path
) -> dict[str, Any]:
    """Run the stages, one after the other; return the outcome of the run as plain data.

    The run has passed if each stage had tests and none failed.

    Args:
        wanted_run: the run to make.
        files: the test files.
        stages: some of STAGES.
        folder: the folder for the output of stages that fail.
    """
    folder.mkdir(parents=True, exist_ok=True)
    ended: dict[str, Any] = {"seconds": {}, "tests": {}, "failures": []}
    ended["load"] = round(os.getloadavg()[0], 1)
    with load((os.cpu_count() or 1) if wanted_run.kind == "loaded" else 0):
        for stage in stages:
            begin = time.monotonic()
            number, failures = run_stage(stage, wanted_run, files, folder)
            ended["seconds"][stage] = round(time.monotonic() - begin, 1)
            ended["tests"][stage] = number
            ended["failures"] += failures
    passed = all(ended["tests"].values()) and not ended["failures"]
    return {**wanted_run._asdict(), "verdict": "passed" if passed else "failed", **ended}


def run_stage(
    stage: str, wanted_run: Run, files: Sequence[str], folder: Path
) -> tuple[int, list[dict[str, str]]]:
    """Run one stage.

    Returns:
        The number of its tests, and those that failed, or the stage if it did not end, each with
        the command that repeats it.
    """
    files = of_stage(stage, files)
    name, seed = f"{wanted_run.kind}-{wanted_run.number}-{stage}", wanted_run.seed
    xml = folder / f"{name}.xml"
    arguments = [*command(stage, seed, files), "-o", "junit_family=xunit1", f"--junitxml={xml}"]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "SP_PROFILE": "soak"}
    code, text = printed(arguments, ROOT, variables, SECONDS)
    tests = junit(xml)
    xml.unlink(missing_ok=True)
    failed = [(test, said, [test]) for test, said in tests if said is not None]
    if not failed and (code != 0 or not tests):
        ended = f"no end after {SECONDS:g} s" if code is None else f"exit code {code}"
        failed = [(f"the {stage}", f"{ended}: {' '.join(text.split())}", files)]
    if failed:
        (folder / f"{name}.txt").write_text(text)
    return len(tests), [
        {"stage": stage, "test": test, "words": short(said), "command": repeated(stage, seed, ids)}
        for test, said, ids in failed
    ]


def of_stage(stage: str, files: Sequence[str]) -> list[str]:
    """Return the files that run in a stage."""
    return [file for file in files if stage == "threads" or file not in THREADS_ONLY]


def short(words: str) -> str:
    """Return the beginning and the end of a long text."""
    return words if len(words) <= 2 * LONGEST else f"{words[:LONGEST]} ... {words[-LONGEST:]}"


def command(stage: str, seed: int, files: Sequence[str]) -> list[str]:
    """Return the command of a stage."""
    suite = ["-q", "-p", "no:cacheprovider", f"--hypothesis-seed={seed}", *files]
    suite += [word for test in LEFT_OUT for word in ("--deselect", test)]
    if stage == "ranks":
        return on_ranks(SECONDS - 60, *suite)
    spread = ["-n", str(os.cpu_count() or 1), "--dist", "loadfile", "-m", "not starts_mpi"]
    return [sys.executable, "-m", "pytest", *spread, *suite]


def repeated(stage: str, seed: int, tests: Sequence[str]) -> str:
    """Return the command that runs these tests again with the same examples."""
    launch = f"python -m sp_core.testing.launch -n {RANKS} -- " if stage == "ranks" else ""
    options = "--only-mpi " if stage == "ranks" else ""
    chosen = " ".join(f'"{test}"' for test in tests)
    pytest = f"python -m pytest {options}--hypothesis-seed={seed} {chosen}"
    return f"SP_PROFILE=soak {launch}{pytest}"


@contextmanager
def load(processes: int) -> Iterator[None]:
    """Keep cores busy with `processes` processes that only spin."""
    spinning = [subprocess.Popen([sys.executable, "-c", SPIN]) for _ in range(processes)]
    try:
        yield
    finally:
        for one in spinning:
            one.kill()
            one.wait()
