"""Find the smallest example that crashes or hangs the ranks of a test.

`python -m sp_core.testing.shrink_crash -n 4 tests/test_x.py::test_y`.

Hypothesis runs in this process, without MPI. It sends examples, one by one, to a launch: the same
test under mpiexec. When the launch dies or hangs, the example has failed, and the next example gets
a new launch.
"""

import argparse
import contextlib
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from sp_core.launch.command import Launch
from sp_core.launch.signals import on_ending
from sp_core.machine import leave_step
from sp_core.testing import session
from sp_core.testing.outcome import FINISHED, Kind, Outcome
from sp_core.testing.plan import EXAMPLE, RESULT, UNASKED, Example, Result, Spec, hand_over, taken

LOSSES = 25
"""Number of launches that may be lost before the search ends."""
POLL_SECONDS = 5e-3
"""Time between two looks for the result of an example, in seconds."""
START_SECONDS = 600.0
"""Time in which a launch must ask for its first example, in seconds."""
END_SECONDS = 20.0
"""Time that a launch has to end by itself, in seconds."""


class Lost(Exception):
    """A launch has ended in the middle of an example.

    Its arguments are a report on every rank, and the rank that died first (None if none died).
    """


class NotStarted(BaseException):
    """A launch has ended before it asked for an example, so no example is to blame.

    It is no subclass of `Exception`, because Hypothesis would look for a smaller example.
    """


class Job:
    """One launch of one test, which takes examples until it ends.

    Args:
        ranks: number of ranks.
        test: pytest's id of the test.
        options: more arguments for pytest.
    """

    def __init__(self, ranks: int, test: str, options: Sequence[str]) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="sp_core-")
        self._directory = Path(self._folder.name)
        (self._directory / UNASKED).touch()
        command = ["python", "-m", "pytest", "--with-mpi", *options, test]
        self._printed, self.begin = self._directory / "printed", time.monotonic()
        with self._printed.open("w") as output:
            self._launch = Launch(ranks, command, (), self._directory, output=output.fileno())

    def ask(self, example: Example) -> Result:
        """Have the launch run an example, wait for the result, and return it.

        Raises:
            Lost: the launch has died or hung in the example.
            NotStarted: the launch has ended before it took its first example, or has not asked for
                it in time, so this example is not at fault.
        """
        hand_over(self._directory / EXAMPLE, example)
        unasked = self._directory / UNASKED
        while (result := taken(self._directory / RESULT)) is None:
            reason = self._launch.trouble(POLL_SECONDS)
            if not reason and (code := self._launch.ended()) is not None:
                reason = f"a rank died (mpiexec: exit code {code})"
            late = time.monotonic() > self.begin + START_SECONDS
            if not reason and late and unasked.exists():
                self._launch.deaths.dump()
                reason = f"no example was asked for within {START_SECONDS:g} s"
            if reason and unasked.exists():
                printed = self._printed.read_text(errors="replace")
                raise NotStarted(
                    f"the launch has ended before it asked for an "
                    f"example:\n{printed}\n{self._launch.report(reason)}"
                )
            if reason:
                raise Lost(self._launch.report(reason), self._launch.deaths.first())
        answer: Result = result[0]
        return answer

    def close(self, patience: float = END_SECONDS) -> None:
        """End the launch. Before that it has `patience` seconds to end by itself."""
        try:
            hand_over(self._directory / EXAMPLE, None)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._launch.process.wait(patience)
        finally:
            self._launch.end()
            self._folder.cleanup()


class Jobs:
    """Launches, one after the other, and the results of their examples.

    As a plugin of pytest it makes every test of this process run its examples in launches.

    Args:
        ranks: number of ranks of each launch.
        options: more arguments for pytest in the launches.
        losses: number of launches that may be lost. After that every new example passes unrun, so
            Hypothesis reports the smallest failure so far.
    """

    def __init__(self, ranks: int, options: Sequence[str], losses: int = LOSSES) -> None:
        self.ranks, self.launches, self.lost = ranks, 0, 0
        self._options, self._most = options, losses
        self._known: dict[tuple[str, bytes], Result] = {}
        self._test = ""
        self._job: Job | None = None

    def attempt(self, spec: Spec, example: Example) -> Result:
        """Return the result of an example. An example is run once; later its result is repeated."""
        example.check_values()
        key = (spec.test_id, example.key())
        if key not in self._known:
            self._known[key] = self._ask(spec.test_id, example)
        return self._known[key]

    def _ask(self, test: str, example: Example) -> Result:
        """Run an example in the launch of its test, and return the result.

        A lost launch is a failure of the example; the next example then starts a new launch. The
        rank that died first has failed, or the example's first rank if none of its ranks died; the
        others were stopped. All lost launches have one class of failure, because not every system
        tells how a rank died.
        """
        if self.lost >= self._most:
            return Result([FINISHED] * len(example.ranks), {})
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
            report, first = lost.args
            fallen = first if first in example.ranks else example.ranks[0]
            crash, woken = Outcome(Kind.FAIL, "RankCrashed", report), Outcome(Kind.WOKEN)
            return Result([crash if rank == fallen else woken for rank in example.ranks], {})

    @pytest.hookimpl(trylast=True)
    def pytest_configure(self, config: pytest.Config) -> None:
        """Make the session of `sp_core.testing` run examples with `attempt`.

        Raises:
            pytest.UsageError: `--with-mpi` makes this process a rank, which would start no launch;
                or pytest-xdist runs the tests in processes that start no launch.
        """
        if session.current.control is not None:
            raise pytest.UsageError(
                "--with-mpi or --only-mpi was given. Leave it out: only the launches use MPI, and "
                "they get --with-mpi. If addopts has it, write -- -o addopts= at the end."
            )
        if config.getoption("numprocesses", None):
            raise pytest.UsageError(
                "pytest-xdist (-n) cannot send examples to launches. Leave -n out of the options "
                "for pytest. If addopts has it, add -- -n 0 at the end."
            )
        session.current.ranks, session.current.attempt = self.ranks, self.attempt

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Remove the skip that pytest-mpi adds without --with-mpi: the launches have MPI."""
        for item in items:
            item.own_markers[:] = [
                mark
                for mark in item.own_markers
                if mark.kwargs.get("reason") != "need --with-mpi option to run"
            ]

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self) -> None:
        """End the latest launch."""
        if self._job is not None:
            self._job.close()
            self._job = None

    def pytest_terminal_summary(self, terminalreporter: "pytest.TerminalReporter") -> None:
        """Write how many launches were started, and how many of them were lost."""
        terminalreporter.write_line(
            f"{self.launches} launches of {self.ranks} ranks, {self.lost} of them lost"
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Search for the smallest example that crashes or hangs the ranks of a test.

    Return the exit code of pytest in this process: 0 if every example has passed, 1 if one failed,
    5 if no example was sent to a launch.

    Args:
        arguments: the words after the program's name; None: those of this process.
    """
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
        help="how many launches may die or hang (default: %(default)s)",
    )
    parser.add_argument("tests", help="id of a test, or a file")
    parser.add_argument("options", nargs="*", help="after --: options for pytest")
    options = parser.parse_args(arguments)
    leave_step()
    jobs = Jobs(options.ranks, options.options, options.losses)
    # this module and its package are imported before pytest can rewrite assertions
    quiet = ("-W", "ignore::pytest.PytestAssertRewriteWarning")
    with on_ending(signal.default_int_handler):  # as Ctrl-C, after which pytest ends the launch
        code = int(pytest.main([*quiet, *options.options, options.tests], plugins=[jobs]))
    if code == 0 and not jobs.launches:
        print(
            "no example was sent to a launch. Name a test of `given` or `spmd`, and add -- -rs to "
            "see why a test is skipped.",
            file=sys.stderr,
        )
        return int(pytest.ExitCode.NO_TESTS_COLLECTED)
    return code


if __name__ == "__main__":
    sys.exit(main())
