"""Make one pytest session of the ranks of a launch: they agree on tests and outcomes, and only rank 0 writes."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Generator, Sequence
from typing import Any, NoReturn, TextIO

import pytest

from sp_core.launch import watch
from sp_core.launch.results import Ledger
from sp_core.testing import remarks, requests
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
        pytest.UsageError: the launch is not the one asked for; on every rank.
    """

    def __init__(self, config: pytest.Config, session: Session) -> None:
        import mpi4py

        mpi4py.rc.fast_reduce = (
            False  # the shortcut duplicates a communicator while it holds the interpreter's lock
        )
        from mpi4py import MPI

        requests.install()  # before any test takes a class out of mpi4py
        world = MPI.COMM_WORLD
        self.config, self.rank, self.size = config, world.rank, world.size
        self._lost = False
        self._complaints: list[str] = []
        self._refuse()
        self._watch = watch.start(self.rank)
        watch.limit_phases()
        self._stdout: TextIO | None = None
        self._ledger: Ledger | None = None
        if self.rank:
            self._be_quiet()
        else:
            xml = config.getoption("xmlpath", None)
            self._ledger = Ledger(
                self._watch.directory, xml, config.getini("junit_suite_name") if xml else ""
            )
        self.control = session.control = MpiCarrier(world.Dup())
        session.command = f"python -m sp_core.testing.launch -n {self.size} -- python -m pytest {_options(session)} {{test}}"

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
            self._usage(
                "pytest-xdist (-n) and --with-mpi cannot be combined: all ranks must run the same tests. Leave -n out."
            )

    def _usage(self, text: str) -> NoReturn:
        raise pytest.UsageError(
            *([] if self.rank else [text])
        )  # every rank raises; pytest prints each text it is given

    def _be_quiet(self) -> None:
        """Write nothing to the terminal, to result files and to the cache."""
        option = self.config.option
        for name in _RESULT_FILES:
            if hasattr(option, name):
                setattr(option, name, None)
        option.basetemp = str(
            self._watch.directory / f"tmp-rank{self.rank}"
        )  # processes that share one clear it for each other
        self._stdout, sys.stdout = sys.stdout, open(os.devnull, "w")  # noqa: SIM115  until the terminal reporter has taken it

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionstart(self) -> None:
        """Give tests the real standard output back, now that the terminal reporter has its own."""
        (self._watch.directory / watch.STARTED).touch()
        self._watch.enable()  # pytest's own plugin has taken it
        if self._stdout is not None:
            sys.stdout = self._stdout
            if (
                getattr(self.config, "cache", None) is not None
            ):  # ranks may read what failed last time, and must agree on it
                vars(self.config.cache).update(set=lambda key, value: None)

    def pytest_report_header(self) -> str:
        """Write which launch this is."""
        from mpi4py import MPI

        library = MPI.Get_library_version().split(",")[0].splitlines()[0].strip("\0 ")
        return f"sp_core.testing: {self.size} ranks, {library}"

    def pytest_collectstart(self, collector: pytest.Collector) -> None:
        """Note that a file or folder is collected."""
        watch.note(f"collects {collector.nodeid or 'tests'}")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Keep a failure to collect: only rank 0 shows its own."""
        if report.failed:
            self._complaints.append(f"could not collect {report.nodeid}:\n{report.longreprtext}")

    def pytest_internalerror(self, excrepr: object) -> None:
        """Keep the error that ends this rank's session."""
        self._complaints.append(str(excrepr))

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Refuse to run different tests, in which ranks would wait for each other for ever."""
        if (error := sys.exc_info()[1]) is not None:  # pytest calls this also on its way out
            self._complaints.append(
                "left collection:\n" + "".join(traceback.format_exception(error))
            )
        everyone = self._everyone(
            "the end of collection", ([item.nodeid for item in session.items], self._complaints)
        )
        ids = [found for found, _ in everyone]
        different = "".join(
            _difference(ids, rank) for rank in range(self.size) if ids[rank] != ids[0]
        )
        if different:
            told = "".join(
                f"\nrank {rank} {text}"
                for rank, (_, complaints) in enumerate(everyone)
                for text in complaints
            )
            self._usage(
                f"the ranks collected different tests, or in another order:{different}{told}"
            )

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Note that fixtures are set up."""
        watch.note(f"in the set-up of {item.nodeid}")

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> None:
        """Note that a test runs."""
        watch.note(f"in {item.nodeid}")

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> None:
        """Note that fixtures are torn down."""
        watch.note(f"in the tear-down of {item.nodeid}")

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Keep that a test begins."""
        self._keep(test=nodeid)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """Keep that a test has ended."""
        self._keep(test=nodeid, ended=True)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep the outcome of a phase of a test."""
        outcome = "error" if report.failed and report.when != "call" else report.outcome
        text = report.longreprtext if report.failed else ""
        self._keep(test=report.nodeid, outcome=outcome, seconds=report.duration, text=text)

    def _keep(self, **line: object) -> None:
        if self._ledger is not None:
            self._ledger.add(**line)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, Any, pytest.TestReport]:
        """Make one outcome of those of all ranks."""
        report: pytest.TestReport = yield
        watch.progress()
        if not self._lost:
            xfail = hasattr(report, "wasxfail")
            mine = (str(report.outcome), xfail, report.longreprtext if report.failed else "")
            self._agree(
                report,
                self._everyone(
                    f"{item.nodeid} {report.when}", mine, quiet=report.passed and not xfail
                ),
            )
        return report

    def _everyone(self, point: str, mine: Any, *, quiet: bool = False) -> list[Any]:
        """Return every rank's value, or nothing if all are quiet.

        Raises:
            pytest.exit.Exception: the ranks are at different points, so their messages make no
            sense any more.
        """
        record = Record(Kind.OK if quiet else Kind.SKIP, Call(point).record().digest)
        records = self.control.drive(until(self.control.post(record)), point)
        if len({record.digest for record in records}) > 1:
            self._lost = True
            told = self.control.gather("\n".join([point, *self._complaints]))
            lines = "".join(f"\n  rank {rank} is at {text}" for rank, text in enumerate(told))
            pytest.exit(
                f"the ranks have lost each other:{lines}", returncode=pytest.ExitCode.INTERNAL_ERROR
            )
        return (
            [] if all(record.kind is Kind.OK for record in records) else self.control.gather(mine)
        )

    def _agree(self, report: pytest.TestReport, reports: Sequence[_Report]) -> None:
        failed = [rank for rank, (outcome, _, _) in enumerate(reports) if outcome == "failed"]
        if failed and (len(failed) < self.size or len({text for _, _, text in reports}) > 1):
            text = self._failures(reports, failed)
        elif not failed and len({(outcome, xfail) for outcome, xfail, _ in reports}) > 1:
            said = ", ".join(
                f"rank {rank}: {_word(outcome, xfail)}"
                for rank, (outcome, xfail, _) in enumerate(reports)
            )
            text = f"the ranks disagree about the outcome of this test: {said}"
        else:
            return
        report.outcome, report.longrepr = "failed", text
        vars(report).pop("wasxfail", None)

    def _failures(self, reports: Sequence[_Report], failed: Sequence[int]) -> str:
        first = failed[0]
        text = reports[first][2]
        if len(failed) < self.size:
            text += f"\n\nfailed on rank {', '.join(map(str, failed))} of {self.size}; this is what rank {first} says"
        last_lines = {
            rank: [line for line in reports[rank][2].splitlines() if line.strip()] or ["failed"]
            for rank in failed[1:]
        }
        others = [f"\nrank {rank}: {lines[-1]}" for rank, lines in last_lines.items()]
        return text + "".join(line for line in others if "rank 0 has the whole report" not in line)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Make one exit status for all ranks: the worst."""
        watch.progress()
        try:
            mine = int(session.exitstatus), remarks.session
            everyone = [] if self._lost else self._everyone("the end of the session", mine)
        except (
            pytest.exit.Exception
        ) as lost:  # raised here, it would keep other plugins from writing their results
            everyone = []
            if self.rank == 0:
                print(lost, file=sys.__stderr__)
        session.exitstatus = max(
            (status for status, _ in everyone), default=pytest.ExitCode.INTERNAL_ERROR
        )
        for _, told in everyone:
            remarks.session.merge(told)


def _options(session: Session) -> str:
    """Return the options of pytest that run a test again as in this session."""
    seed = [] if session.seed is None else [f"--hypothesis-seed={session.seed}"]
    device = [] if session.device == "cpu" else [f"--sp-device {session.device}"]
    return " ".join(
        ["--with-mpi", *device, *(["--sp-share-gpu"] if session.share_gpu else []), *seed]
    )


def _word(outcome: str, xfail: bool) -> str:
    return {"passed": "xpassed", "skipped": "xfailed"}.get(outcome, outcome) if xfail else outcome


def _difference(everyone: Sequence[Sequence[str]], rank: int) -> str:
    mine, first = set(everyone[rank]), set(everyone[0])
    if mine == first:
        return f"\n  rank {rank} has the tests of rank 0 in another order"
    only = [f"only rank {rank}: {name}" for name in sorted(mine - first)]
    only += [f"only rank 0: {name}" for name in sorted(first - mine)]
    return "".join(f"\n  {line}" for line in only[:_MAX_LISTED])
