"""One run of the suite in its short profile, with a seed of its own: what it runs, and what came of it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from kit.plugin import wanted
from mutants.catalogue import ROOT
from mutants.trial import run as run_command
from soak.laws import LEFT_OUT, THREADS_ONLY

STAGES = ("threads", "ranks")
RANKS = 4
"""As in `nox -s tests`: there are tests that need four. P is drawn from 1 to 4."""
SECONDS = 900.0
"""Limit of a stage, which takes half a minute on two idle cores."""
SPIN = "import os\nparent = os.getppid()\nwhile os.getppid() == parent: pass"
LONGEST = 300


@dataclass(frozen=True)
class Run:
    """What a run is to be.

    Args:
        kind: "idle", or "loaded" with a busy process on each core beside it.
        number: among those of its kind.
        seed: of all its examples.
    """

    kind: str
    number: int
    seed: int

    @property
    def key(self) -> tuple[str, int]:
        """What tells it from the others of a soak."""
        return self.kind, self.number


@dataclass(frozen=True)
class Failure:
    """A test that went red, or a stage that came to no end, and the command that does it again."""

    stage: str
    test: str
    words: str
    command: str


@dataclass(frozen=True)
class Ended:
    """How a run ended: in each stage its seconds, its number of tests, and what went red; the machine's load when it began."""

    run: Run
    seconds: dict[str, float] = field(default_factory=dict)
    tests: dict[str, int] = field(default_factory=dict)
    failures: tuple[Failure, ...] = ()
    load: float = 0.0

    @property
    def passed(self) -> bool:
        """Whether there were tests in each stage and none went red."""
        return not self.failures and bool(self.tests) and all(self.tests.values())

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        plain = asdict(self)
        return {**plain.pop("run"), "verdict": "passed" if self.passed else "failed", **plain}

    @classmethod
    def from_dict(cls, plain: dict[str, Any]) -> Ended:
        """What `as_dict` has told."""
        run = Run(plain["kind"], plain["number"], plain["seed"])
        return cls(
            run,
            plain["seconds"],
            plain["tests"],
            tuple(Failure(**told) for told in plain["failures"]),
            plain["load"],
        )


def carried_out(run: Run, files: Sequence[str], stages: Sequence[str], folder: Path) -> Ended:
    """Run the stages, one after the other.

    Args:
        run: which.
        files: of tests.
        stages: some of STAGES.
        folder: for what they print.
    """
    ended = Ended(run, load=round(os.getloadavg()[0], 1))
    with load((os.cpu_count() or 1) if run.kind == "loaded" else 0):
        for stage in stages:
            seconds, tests, failures = run_stage(stage, run, files, folder)
            more = {
                "seconds": {**ended.seconds, stage: seconds},
                "tests": {**ended.tests, stage: tests},
            }
            ended = replace(ended, **more, failures=(*ended.failures, *failures))
    return ended


def run_stage(
    stage: str, run: Run, files: Sequence[str], folder: Path
) -> tuple[float, int, list[Failure]]:
    """Run one stage.

    Returns:
        Its seconds, its number of tests, and what went red.
    """
    files = [file for file in files if stage == "threads" or file not in THREADS_ONLY]
    name = f"{run.kind}-{run.number}-{stage}"
    xml, log = folder / f"{name}.xml", folder / f"{name}.txt"
    xml.unlink(missing_ok=True)
    arguments = [*command(stage, run.seed, files), "-o", "junit_family=xunit1", f"--junitxml={xml}"]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "SP_PROFILE": "soak"}
    begin = time.monotonic()
    with log.open("w") as output:
        code = run_command([sys.executable, *arguments], ROOT, output.fileno(), variables, SECONDS)
    seconds = round(time.monotonic() - begin, 1)
    tests, failed = read_junit(xml)
    failures = [
        Failure(stage, test, words, repeated(stage, run.seed, [test])) for test, words in failed
    ]
    if not failures and (code != 0 or not tests):
        failures = [
            Failure(stage, f"the {stage}", _end_of(log, code), repeated(stage, run.seed, files))
        ]
    if not failures:
        log.unlink()
        xml.unlink()
    return seconds, tests, failures


def command(stage: str, seed: int, files: Sequence[str]) -> list[str]:
    """What a stage runs, after the interpreter."""
    suite = ["-m", "pytest", "-q", *wanted(), "-p", "no:cacheprovider", f"--hypothesis-seed={seed}"]
    suite += [word for test in LEFT_OUT for word in ("--deselect", test)]
    if stage == "threads":
        return [
            *suite,
            "-n",
            str(os.cpu_count() or 1),
            "--dist",
            "loadfile",
            "-m",
            "not starts_mpi",
            *files,
        ]
    launch = [
        "-m",
        "sp_core.testing.launch",
        "-n",
        str(RANKS),
        "--timeout",
        f"{SECONDS - 60:g}",
        "--",
        "python",
    ]
    return [*launch, *suite, "--only-mpi", "--sp-expect-ranks", str(RANKS), *files]


def repeated(stage: str, seed: int, tests: Sequence[str]) -> str:
    """The command that runs these tests again with the same examples."""
    launch = f"python -m sp_core.testing.launch -n {RANKS} -- " if stage == "ranks" else ""
    options = ["--only-mpi"] if stage == "ranks" else []
    chosen = " ".join(f'"{test}"' for test in tests)
    return f"SP_PROFILE=soak {launch}python -m pytest {' '.join([*options, f'--hypothesis-seed={seed}'])} {chosen}"


def read_junit(xml: Path) -> tuple[int, list[tuple[str, str]]]:
    """The number of tests, and those that failed with what they said."""
    if not xml.exists():
        return 0, []
    cases = [*ET.parse(xml).getroot().iter("testcase")]
    failed = [
        (_node_id(case), _words(bad))
        for case in cases
        for bad in case
        if bad.tag in ("failure", "error")
    ]
    return len(cases), failed


def _node_id(case: ET.Element) -> str:
    file = case.get("file") or ""
    module = file.removesuffix(".py").replace("/", ".")
    inner = (case.get("classname") or "").removeprefix(module).strip(".")
    return "::".join(part for part in (file, *inner.split("."), case.get("name") or "") if part)


def _words(bad: ET.Element) -> str:
    text = " ".join((bad.text or bad.get("message") or "").split())
    return text if len(text) <= 2 * LONGEST else f"{text[:LONGEST]} ... {text[-LONGEST:]}"


def _end_of(log: Path, code: int | None) -> str:
    ended = f"no end after {SECONDS:g} s" if code is None else f"exit code {code}"
    return f"{ended}: {' '.join(log.read_text(errors='replace').split())[-2 * LONGEST :]}"


@contextmanager
def load(processes: int) -> Iterator[None]:
    """Processes that do nothing but take time.

    Raises:
        RuntimeError: one of them has ended too soon, so the load was smaller than said.
    """
    spinning = [subprocess.Popen([sys.executable, "-c", SPIN]) for _ in range(processes)]
    try:
        yield
        if any(one.poll() is not None for one in spinning):
            raise RuntimeError("a process that was to keep a core busy has ended too soon")
    finally:
        for one in spinning:
            one.kill()
            one.wait()
