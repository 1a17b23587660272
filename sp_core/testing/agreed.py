"""Pytest under mpiexec: what all ranks agree on, and what only rank 0 writes."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Generator, Sequence
from typing import Any, NoReturn, TextIO

import pytest

from sp_core.launch import watch
from sp_core.testing import remarks, unchecked
from sp_core.testing.diary import Diary
from sp_core.testing.lockstep import Call, Record, until
from sp_core.testing.mpi import MpiCarrier
from sp_core.testing.outcome import Kind
from sp_core.testing.session import Session

_RESULT_FILES = ("xmlpath", "benchmark_json", "benchmark_save", "benchmark_autosave", "sp_tally")
_MAX_LISTED = 5
_Report = tuple[str, bool, str]


class Ranks:
    """The ranks of a launch as one pytest session. Every rank makes this at the same point.

    Args:
        config: pytest's.
        session: gets its control communicator and the command that runs a test again.

    Raises:
        pytest.UsageError: on every rank, where the launch is not the one asked for.
    """

    def __init__(self, config: pytest.Config, session: Session) -> None:
        import mpi4py

        mpi4py.rc.fast_reduce = False  # the shortcut duplicates a communicator while it holds the interpreter's lock
        from mpi4py import MPI

        unchecked.install()  # before any test takes a class out of mpi4py
        world = MPI.COMM_WORLD
        self.config, self.rank, self.size = config, world.rank, world.size
        self._nowhere = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
        self._stdout: TextIO | None = None
        self._lost = False
        self._complaints: list[str] = []
        self._refuse()
        self._watch = watch.start(self.rank)
        watch.limit_phases()
        config.pluginmanager.register(Diary(self._watch.directory, config, self.rank), "sp_core_diary")
        self.control = session.control = MpiCarrier(world.Dup())
        session.command = self._command(session)
        if self.rank:
            self._be_quiet()

    def close(self) -> None:
        """End the watch over this rank."""
        watch.stop()

    def leave_result(self, exitstatus: int) -> None:
        """Tell the launcher that the session has come to its end."""
        if self.rank == 0:
            (self._watch.directory / watch.RESULT).write_text(str(exitstatus))

    def _refuse(self) -> None:
        expected = self.config.getoption("--sp-expect-ranks")
        if expected is not None and expected != self.size:
            self._usage(
                f"--sp-expect-ranks {expected} was given, but MPI says that this launch has {self.size}. Start it with mpiexec "
                f"-n {expected}, the one of the MPI library that this Python's mpi4py uses: another one starts single processes."
            )
        if self.config.getoption("numprocesses", None):
            self._usage("pytest-xdist (-n) and --with-mpi cannot be combined: all ranks must run the same tests. Leave -n out.")

    def _usage(self, text: str) -> NoReturn:
        raise pytest.UsageError(*([] if self.rank else [text]))  # every rank raises; pytest prints each text it is given

    def _command(self, session: Session) -> str:
        options = ["--with-mpi"]
        if session.device != "cpu":
            options.append(f"--sp-device {session.device}")
        if session.share_gpu:
            options.append("--sp-share-gpu")
        if session.seed is not None:
            options.append(f"--hypothesis-seed={session.seed}")
        return f"python -m sp_core.testing.launch -n {self.size} -- python -m pytest {' '.join(options)} {{test}}"

    def _be_quiet(self) -> None:
        """Only rank 0 writes: to the terminal, to result files and to the cache."""
        option = self.config.option
        for name in _RESULT_FILES:
            if hasattr(option, name):
                setattr(option, name, None)
        option.basetemp = str(
            self._watch.directory / f"tmp-rank{self.rank}"
        )  # processes that share one clear it under each other's feet
        self._stdout, sys.stdout = sys.stdout, self._nowhere  # until the terminal reporter has taken it

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionstart(self) -> None:
        """The terminal reporter has its stream now; tests get the real one back."""
        (self._watch.directory / watch.STARTED).touch()
        self._watch.enable()  # pytest's own plugin has taken it
        if self._stdout is not None:
            if sys.stdout is self._nowhere:
                sys.stdout = self._stdout
            if getattr(self.config, "cache", None) is not None:  # ranks may read what failed last time, and must agree on it
                vars(self.config.cache).update(set=lambda key, value: None)

    def pytest_report_header(self) -> str:
        """Which launch this is."""
        from mpi4py import MPI

        library = MPI.Get_library_version().split(",")[0].splitlines()[0].strip("\0 ")
        return f"sp_core.testing: {self.size} ranks, {library}"

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Keep what a rank could not collect: only rank 0 shows it by itself."""
        if report.failed:
            self._complaints.append(f"could not collect {report.nodeid}:\n{report.longreprtext}")

    def pytest_internalerror(self, excrepr: object) -> None:
        """Keep what ends this rank's session."""
        self._complaints.append(str(excrepr))

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Ranks that would run different tests would wait for each other for ever."""
        if (error := sys.exc_info()[1]) is not None:  # pytest calls this also on its way out
            self._complaints.append("left collection:\n" + "".join(traceback.format_exception(error)))
        everyone = self._everyone("the end of collection", ([item.nodeid for item in session.items], self._complaints))
        ids = [found for found, _ in everyone]
        different = [rank for rank in range(self.size) if ids[rank] != ids[0]]
        if different:
            self._usage(
                "the ranks collected different tests, or in another order:"
                + "".join(_difference(ids, rank) for rank in different)
                + "".join(f"\nrank {rank} {text}" for rank, (_, complaints) in enumerate(everyone) for text in complaints)
            )

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, pytest.TestReport]:
        """One outcome for all ranks."""
        report: pytest.TestReport = yield
        watch.progress()
        if not self._lost:
            mine = (str(report.outcome), hasattr(report, "wasxfail"), report.longreprtext if report.failed else "")
            self._agree(
                report,
                self._everyone(f"{item.nodeid} {report.when}", mine, quiet=report.passed and not hasattr(report, "wasxfail")),
            )
        return report

    def _everyone(self, point: str, mine: Any, *, quiet: bool = False) -> list[Any]:
        """Every rank's value, or nothing where all are quiet.

        Raises:
            pytest.exit.Exception: the ranks are at different points, so nothing they say to each other makes sense any more.
        """
        record = Record(Kind.OK if quiet else Kind.SKIP, Call(point).record().digest)
        records = self.control.drive(until(self.control.post(record)), point)
        if len({record.digest for record in records}) > 1:
            self._lost = True
            told = self.control.gather("\n".join([point, *self._complaints]))
            lines = "".join(f"\n  rank {rank} is at {text}" for rank, text in enumerate(told))
            pytest.exit(f"the ranks have lost each other:{lines}", returncode=pytest.ExitCode.INTERNAL_ERROR)
        return [] if all(record.kind is Kind.OK for record in records) else self.control.gather(mine)

    def _agree(self, report: pytest.TestReport, reports: Sequence[_Report]) -> None:
        kinds = {(outcome, xfail) for outcome, xfail, _ in reports}
        failed = [rank for rank, (outcome, _, _) in enumerate(reports) if outcome == "failed"]
        if len(kinds) > 1 and not failed:
            said = ", ".join(f"rank {rank}: {_word(outcome, xfail)}" for rank, (outcome, xfail, _) in enumerate(reports))
            _fail(report, f"the ranks disagree about the outcome of this test: {said}")
        elif failed and (len(failed) < self.size or len({text for _, _, text in reports}) > 1):
            _fail(report, self._failures(reports, failed))

    def _failures(self, reports: Sequence[_Report], failed: Sequence[int]) -> str:
        first = 0 if 0 in failed else failed[0]
        text = reports[first][2]
        if len(failed) < self.size:
            text += f"\n\nfailed on rank {', '.join(map(str, failed))} of {self.size}; this is what rank {first} says"
        others = [f"\nrank {rank}: {_last_line(reports[rank][2])}" for rank in failed if rank != first]
        return text + "".join(line for line in others if "rank 0 has the whole report" not in line)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """One exit status for all ranks: the worst."""
        watch.progress()
        try:
            mine = int(session.exitstatus), remarks.session
            everyone = [] if self._lost else self._everyone("the end of the session", mine)
        except pytest.exit.Exception as lost:  # raised here, it would keep other plugins from writing what they know
            everyone = []
            if self.rank == 0:
                print(lost, file=sys.__stderr__)
        session.exitstatus = max((status for status, _ in everyone), default=pytest.ExitCode.INTERNAL_ERROR)
        for _, told in everyone:
            remarks.session.merge(told)


def _fail(report: pytest.TestReport, text: str) -> None:
    report.outcome = "failed"
    report.longrepr = text
    vars(report).pop("wasxfail", None)


def _word(outcome: str, xfail: bool) -> str:
    return {"passed": "xpassed", "skipped": "xfailed"}.get(outcome, outcome) if xfail else outcome


def _last_line(text: str) -> str:
    return next((line for line in reversed(text.splitlines()) if line.strip()), "failed")


def _difference(everyone: Sequence[Sequence[str]], rank: int) -> str:
    mine, first = set(everyone[rank]), set(everyone[0])
    if mine == first:
        return f"\n  rank {rank} has the tests of rank 0 in another order"
    only = [f"only rank {rank}: {name}" for name in sorted(mine - first)] + [
        f"only rank 0: {name}" for name in sorted(first - mine)
    ]
    return "".join(f"\n  {line}" for line in only[:_MAX_LISTED])
