"""Shrink an example that ends its launch.

`python -m sp_core.testing.shrink_crash -n 4 tests/test_x.py::test_y`.

Hypothesis runs in this process, without MPI. A launch of the same test takes its examples one by
one. When the launch dies or hangs, the example has failed, and the next one gets a new launch.
"""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from sp_core.launch.command import Launch
from sp_core.testing import session
from sp_core.testing.carriers import patiently
from sp_core.testing.outcome import FINISHED, Kind, Outcome
from sp_core.testing.plan import Example, Fed, Result, Spec, hand_over, taken
from sp_core.testing.session import Remarks

LOSSES = 25
END_SECONDS = 20.0
# this module, and with it the package, is there before pytest
IMPORTED_BEFORE = "ignore::pytest.PytestAssertRewriteWarning"


class Lost(Exception):
    """A launch has ended in the middle of an example.

    Args:
        report: what is known of every rank.
        rank: the first to die, where one died.
    """

    def __init__(self, report: str, rank: int | None) -> None:
        super().__init__(report)
        self.rank = rank


class NotStarted(BaseException):
    """No example is to blame. No `Exception`: Hypothesis must not look for a smaller one."""


class Job:
    """One launch of one test, which takes examples until it is lost.

    Args:
        ranks: how many.
        test: its id.
        options: for pytest.
    """

    def __init__(self, ranks: int, test: str, options: Sequence[str]) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="sp_core-")
        self._directory = Path(self._folder.name)
        (self._directory / Fed.UNASKED).touch()
        command = ["python", "-m", "pytest", "--with-mpi", *options, test]
        self._printed = self._directory / "printed"
        with self._printed.open("w") as output:
            self._launch = Launch(ranks, command, (), self._directory, output=output.fileno())

    def ask(self, example: Example) -> Result:
        """Have an example tried.

        Raises:
            Lost: the launch has not outlived it.
            NotStarted: it has not come so far.
        """
        hand_over(self._directory / Fed.EXAMPLE, example)
        result: Result = patiently(self._answer)[0]
        return result

    def _answer(self) -> tuple[Result] | None:
        """Return the result, if it is there. Raise if the launch has ended or hangs."""
        if (result := taken(self._directory / Fed.RESULT)) is not None:
            return result
        reason = self._launch.trouble(0.0)
        if not reason and self._launch.process.poll() is not None:
            reason = f"a rank died (mpiexec: exit code {self._launch.process.returncode})"
        if reason:
            report = self._launch.report(reason)
            if not (self._directory / Fed.UNASKED).exists():
                raise Lost(report, self._launch.deaths.first())
            raise NotStarted(
                f"the launch has ended before it asked for an "
                f"example:\n{self._printed.read_text()}\n{report}"
            )
        return None

    def close(self, patience: float = END_SECONDS) -> None:
        """End the launch, which may first end by itself for some seconds."""
        hand_over(self._directory / Fed.EXAMPLE, None)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._launch.process.wait(patience)
        self._launch.end()
        self._folder.cleanup()


class Jobs:
    """Launches, one after the other, and what they have found.

    As a plugin of pytest it has every test run by launches.

    Args:
        ranks: of each.
        options: for pytest.
        losses: launches that may be lost. Then the smallest example so far is reported.
    """

    def __init__(self, ranks: int, options: Sequence[str], losses: int = LOSSES) -> None:
        self.ranks, self.launches, self.lost = ranks, 0, 0
        self._options, self._most = options, losses
        self._known: dict[tuple[str, str], Result] = {}
        self._test = ""
        self._job: Job | None = None

    def attempt(self, spec: Spec, example: Example) -> Result:
        """Return what comes of an example. The same one is not run twice."""
        key = (spec.test_id, str(example))
        if key not in self._known:
            self._known[key] = self._ask(spec.test_id, example)
        return self._known[key]

    def _ask(self, test: str, example: Example) -> Result:
        if self.lost >= self._most:
            return Result([FINISHED] * len(example.ranks), Remarks())
        if self._job is None or self._test != test:
            self.pytest_sessionfinish()
            self._test, self._job = test, Job(self.ranks, test, self._options)
            self.launches += 1
        try:
            return self._job.ask(example)
        except Lost as lost:
            self.lost += 1
            self._job.close(patience=0.0)
            self._job = None
            return Result(outcomes(example, lost), Remarks())

    @pytest.hookimpl(trylast=True)
    def pytest_configure(self) -> None:
        """Let tests be run by launches, now that the session is there."""
        session.current.ranks, session.current.attempt = self.ranks, self.attempt

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self) -> None:
        """End the processes of the latest launch."""
        if self._job is not None:
            self._job.close()
            self._job = None

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Write how many times mpiexec was started."""
        terminalreporter.write_line(
            f"{self.launches} launches of {self.ranks} ranks, {self.lost} of them lost"
        )


def outcomes(example: Example, lost: Lost) -> list[Outcome]:
    """How the ranks of an example left it when their launch was lost; one class for all ways.

    Not every system tells them.
    """
    fallen = lost.rank if lost.rank in example.ranks else example.ranks[0]
    crash = Outcome(Kind.FAIL, "RankCrashed", str(lost))
    return [crash if rank == fallen else Outcome(Kind.WOKEN) for rank in example.ranks]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return pytest's exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m sp_core.testing.shrink_crash", description=__doc__
    )
    parser.add_argument(
        "-n", "--ranks", type=int, required=True, help="number of ranks of each launch"
    )
    parser.add_argument(
        "--losses",
        type=int,
        default=LOSSES,
        help="launches that may be lost (default: %(default)s)",
    )
    parser.add_argument("tests", help="id of a test, or a file")
    parser.add_argument("options", nargs="*", help="after --: options for pytest")
    options = parser.parse_args(arguments)
    jobs = Jobs(options.ranks, options.options, options.losses)
    arguments = ["-W", IMPORTED_BEFORE, *options.options, options.tests]
    return int(pytest.main(arguments, plugins=[jobs]))


if __name__ == "__main__":
    sys.exit(main())
