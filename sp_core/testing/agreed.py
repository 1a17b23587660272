"""Make one pytest session of the ranks of a launch.

Every rank runs pytest. The ranks check that they have collected the same tests, and combine the
outcomes of each test. Only rank 0 writes reports.
"""

import os
import sys
import traceback
from collections.abc import Generator, Sequence
from typing import Any, NoReturn

import pytest

from sp_core import failing
from sp_core.launch import watch
from sp_core.launch.results import Ledger
from sp_core.machine import started_tasks
from sp_core.testing import requests
from sp_core.testing.carriers import MpiCarrier
from sp_core.testing.session import Session, find_shared_gpu, keep_largest

_RESULT_FILES = {
    *("xmlpath", "report_log", "htmlpath", "json_report_file"),
    *("benchmark_json", "benchmark_save", "benchmark_autosave", "benchmark_histogram"),
}
_MOST_SAID = 20_000
"""The most characters of captured output that a rank tells the others, of each kind."""


def _passes(item: pytest.Item, report: pytest.TestReport) -> bool:
    """Return whether a test that is marked as expected to fail has passed."""
    has_passed = report.outcome == "passed" or report.longreprtext.startswith("[XPASS(strict)]")
    return has_passed and item.get_closest_marker("xfail") is not None


class Ranks:
    """A pytest plugin that combines the sessions of all ranks into one.

    Every rank constructs it at the same point, because the constructor duplicates MPI.COMM_WORLD.
    Some hooks note a rank's last place: a text, such as the id of the running test. The launcher
    prints it if it has to end the launch.

    Args:
        config: pytest's configuration.
        session: this rank's session. The constructor sets `session.control` to a carrier, which
            exchanges values between all ranks.

    Raises:
        pytest.UsageError: on every rank: the launch does not have the number of ranks
            that `--sp-expect-ranks` gives; mpiexec or srun started several processes, each of which
            is alone in MPI; or pytest-xdist, pytest-cov or allure-pytest is in use.
    """

    def __init__(self, config: pytest.Config, session: Session) -> None:
        import mpi4py

        # the shortcut duplicates a communicator while it holds Python's global lock
        mpi4py.rc.fast_reduce = False
        from mpi4py import MPI

        requests.install()  # before any test imports a class from mpi4py
        failing.hooked = True  # errors of tests do not end the ranks
        world = MPI.COMM_WORLD
        self.config, self.rank, self.size = config, world.rank, world.size
        self._session, self._lost = session, False
        self._complaints: list[str] = []
        expected = config.getoption("--sp-expect-ranks")
        if expected is not None and expected != self.size:
            self._usage(
                f"--sp-expect-ranks {expected} was given, but MPI says that this launch has "
                f"{self.size}. Start it with mpiexec -n {expected}, the one of the MPI library "
                "that this Python's mpi4py uses: another one starts single processes."
            )
        if expected is None and self.size == 1 < (tasks := started_tasks()):
            self._usage(
                f"mpiexec or srun started {tasks} processes, but MPI says that each is alone. Use "
                "the mpiexec of the MPI library that this Python's mpi4py uses, or pass srun "
                "--mpi= and a protocol of that library (srun --mpi=list shows all). If one rank is "
                "meant, add --sp-expect-ranks 1."
            )
        self._refuse_plugins()
        self._watch = watch.start(self.rank)
        watch.limit_phases()
        config.add_cleanup(watch.stop)
        self._stdout = sys.stdout
        if self.rank:
            self._be_quiet()
        else:
            xml = config.getoption("xmlpath", None)
            suite = config.getini("junit_suite_name") if xml else ""
            config.pluginmanager.register(Ledger(self._watch.directory, xml, suite))
        find_shared_gpu(session, world)
        self.control = session.control = MpiCarrier(world.Dup())

    def _usage(self, text: str) -> NoReturn:
        # every rank raises, and only rank 0 prints the text
        raise pytest.UsageError(*([] if self.rank else [text]))

    def _refuse_plugins(self) -> None:
        """Raise a usage error on every rank if a plugin is in use that ranks cannot share."""
        option = self.config.getoption
        if option("numprocesses", None):
            self._usage(
                "pytest-xdist (-n) and --with-mpi cannot be combined: all ranks must run the same "
                "tests. Leave -n out."
            )
        if option("cov_source", None) and not option("no_cov", False):
            self._usage(
                "pytest-cov (--cov) and --with-mpi cannot be combined: all ranks would write one "
                "file. Leave --cov out, or add --no-cov if addopts has it. Start -- python -m "
                "coverage run -p -m pytest --with-mpi, then coverage combine."
            )
        if option("allure_report_dir", None):
            self._usage(
                "allure-pytest (--alluredir) and --with-mpi cannot be combined: each rank would "
                "report its own outcomes. Leave --alluredir out, and pass --junitxml instead."
            )

    def _be_quiet(self) -> None:
        """Stop pytest on this rank from writing to the terminal and to result files."""
        option = self.config.option
        vars(option).update(dict.fromkeys(_RESULT_FILES & vars(option).keys()))
        option.log_file = os.devnull  # None would stand for that of the ini file
        # pytest clears this folder at the start, also while other ranks use it
        option.basetemp = str(self._watch.directory / f"tmp-rank{self.rank}")
        sys.stdout = open(os.devnull, "w")  # noqa: PTH123, SIM115  until the terminal reporter has taken it

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionstart(self) -> Generator[None, object, object]:
        """Mark the session as started, and restore the standard output of ranks other than 0.

        The result of an earlier session of this launch says nothing about this one.
        pytest's terminal reporter has taken its own stream by now. Ranks other than 0 also stop
        writing to pytest's cache.

        Raises:
            pytest.exit.Exception: on every rank: another plugin's hook has raised an error on this
                rank, and not on all.
        """
        (self._watch.directory / watch.STARTED).touch()
        self._watch.enable()  # pytest's faulthandler plugin has redirected it
        if self.rank == 0:
            (self._watch.directory / watch.RESULT).unlink(missing_ok=True)
        else:
            sys.stdout = self._stdout
            if (cache := getattr(self.config, "cache", None)) is not None:
                # ranks may read which tests failed last time, and must read the same
                vars(cache).update(set=lambda key, value: None)
        try:
            return (yield)
        except BaseException:
            self._complaints.append(f"left the start of the session:\n{traceback.format_exc()}")
            self._everyone("an error at the start of the session", None)
            raise

    def pytest_collectstart(self, collector: pytest.Collector) -> None:
        """Note, for the report of a hang, which file or folder this rank collects.

        Restart the time limit, which holds for each of them.
        """
        watch.note(f"collects {collector.nodeid or 'tests'}")
        watch.progress()

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Keep the text of a collection error, because pytest shows only errors of rank 0."""
        if report.failed:
            self._complaints.append(f"could not collect {report.nodeid}:\n{report.longreprtext}")

    def pytest_internalerror(self, excrepr: object) -> None:
        """Keep the text of the internal error that ends this rank's session."""
        self._complaints.append(str(excrepr))

    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        """Keep the reason why this rank's session ends early, such as that of `pytest.exit`."""
        self._complaints.append(excinfo.exconly())

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Compare the collected tests of all ranks, and raise on every rank if they differ.

        Ranks that ran different tests would wait for each other for ever.

        Raises:
            pytest.UsageError: on every rank: the ranks collected different tests, or the same tests
                in different orders.
            pytest.exit.Exception: on every rank: the ranks are at different points of the session.
        """
        if sys.exc_info()[1] is not None:  # pytest calls this hook also after an error
            self._complaints.append(f"left collection:\n{traceback.format_exc()}")
        mine = [item.nodeid for item in session.items], self._complaints
        everyone = self._everyone("the end of collection", mine)
        common = set.intersection(*(set(ids) for ids, _ in everyone))
        if any(ids != everyone[0][0] for ids, _ in everyone):
            lines = ["the ranks collected different tests, or in another order:"]
            for rank, (ids, complaints) in enumerate(everyone):
                lines += [f"rank {rank} {text}" for text in complaints]
                only = [name for name in ids if name not in common][:5]
                lines += [f"  not on all ranks, but on rank {rank}: {name}" for name in only]
            if all(set(ids) == common for ids, _ in everyone):
                lines += [
                    "All ranks have the same tests, in different orders. If pytest-randomly orders "
                    "them, pass -p no:randomly or one --randomly-seed. If pytest.mark.parametrize "
                    "gets a set, give it a list."
                ]
            self._usage("\n".join(lines))

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Note, for the report of a hang, that this rank has begun this test.

        Restart the time limit, which pytest's `faulthandler_timeout` has replaced by its own.
        """
        watch.note(f"in {nodeid}")
        watch.progress()

    @pytest.hookimpl(trylast=True)
    def pytest_exception_interact(self) -> None:
        """Restart the time limit, which pytest's faulthandler plugin has cancelled."""
        watch.progress()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, Any, pytest.TestReport]:
        """Combine all ranks' reports on a test's setup, call or teardown. Every rank waits for all.

        If a rank has failed, or the outcomes differ, the report fails on every rank. It then has
        the captured output of all ranks that failed. If a test marked `xfail` fails on some ranks
        and passes on all others, it has failed as expected on every rank.
        """
        report: pytest.TestReport = yield
        watch.progress()
        if not self._lost:
            known = hasattr(report, "wasxfail")
            words = {"passed": "xpassed", "skipped": "xfailed"} if known else {}
            mine = words.get(report.outcome, report.outcome), report.longreprtext
            said = [
                (name, text if len(text) <= _MOST_SAID else f"...{text[-_MOST_SAID:]}")
                for name, text in report.sections
                if report.outcome == "failed"
            ]
            told = mine, said, getattr(report, "wasxfail", ""), _passes(item, report)
            everyone = self._everyone(f"{item.nodeid} {report.when}", told)
            outcomes = ["passes" if passes else word for (word, _), *_, passes in everyone]
            if {*outcomes} == {"passes", "xfailed"}:
                first = outcomes.index("xfailed")
                (_, text), _, reason, _ = everyone[first]
                text += f"\n\nxfailed on rank {first} of {self.size}"
                vars(report).update(outcome="skipped", longrepr=text, wasxfail=reason)
            elif text := self._judged([each for each, *_ in everyone]):
                report.outcome, report.longrepr = "failed", text
                vars(report).pop("wasxfail", None)
            report.sections += [
                (f"{name} on rank {rank}", text)
                for rank, (_, sections, *_) in enumerate(everyone)
                for name, text in sections
                if rank != self.rank
            ]
        return report

    @pytest.hookimpl(optionalhook=True, tryfirst=True)
    def pytest_timeout_set_timer(self, settings: Any) -> bool | None:
        """Keep pytest-timeout from taking SIGALRM and its timer, which `watch` needs, and say so.

        Return None, which lets it set a timer, if its method is "thread".
        """
        if settings.method != "signal":
            return None
        note = "pytest-timeout sets no limit here; pass --timeout-method=thread"
        self._session.notes[note] = None
        return True

    def _everyone(self, point: str, mine: Any) -> list[Any]:
        """Return the values `mine` of all ranks, in rank order. Every rank calls this and waits.

        Args:
            point: names the point of the session that this rank has come to.
            mine: this rank's value, which must be picklable.

        Raises:
            pytest.exit.Exception: on every rank: the ranks are at different points, so that their
                sessions cannot continue together.
        """
        everyone = self.control.gather((point, self._complaints, mine))
        if len({point for point, *_ in everyone}) > 1:
            self._lost = True
            lines = ["the ranks are at different points of the session:"]
            for rank, (place, complaints, _) in enumerate(everyone):
                lines += [f"  rank {rank} is at {place}", *complaints]
            pytest.exit("\n".join(lines))  # with a returncode pytest would not show the failures
        return [value for *_, value in everyone]

    def _judged(self, reports: Sequence[tuple[str, str]]) -> str:
        """Return the text with which every rank fails, or "" if this rank's own report is enough.

        Args:
            reports: (outcome, text) of each rank, in rank order.
        """
        failed = [rank for rank, (word, _) in enumerate(reports) if word == "failed"]
        if len(set(reports)) == 1 or not (failed or len({word for word, _ in reports}) > 1):
            return ""
        if not failed:
            said = ", ".join(f"rank {rank}: {word}" for rank, (word, _) in enumerate(reports))
            return f"the ranks disagree about the outcome of this test: {said}"
        first, *others = failed
        text = reports[first][1]
        if len(failed) < self.size:
            numbers = ", ".join(map(str, failed))
            text += f"\n\nfailed on rank {numbers} of {self.size}; this is what rank {first} says"
        for rank in others:
            last = ["failed", *filter(str.strip, reports[rank][1].splitlines())][-1]
            text += "" if "rank 0 has the whole report" in last else f"\nrank {rank}: {last}"
        return text

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> Generator[None, object, object]:
        """Set this rank's exit status to the worst of all ranks. Every rank waits for all.

        This rank also gets all ranks' notes, and for each name the greatest ratio of error to
        bound. Rank 0 prints the internal errors of other ranks.
        At the end rank 0 writes the exit status to the launcher's file, which tells the launcher
        that the session has ended regularly.
        """
        watch.progress()
        try:
            told = self._session.tally.ratios, self._session.notes, self._complaints
            mine = int(session.exitstatus), *told
            everyone = [] if self._lost else self._everyone("the end of the session", mine)
        # raised here, it would keep other plugins from writing their files
        except pytest.exit.Exception as lost:
            everyone = []
            if self.rank == 0:
                print(lost, file=sys.__stderr__)
        session.exitstatus = max(
            (status for status, *_ in everyone), default=pytest.ExitCode.INTERNAL_ERROR
        )
        for rank, (status, ratios, notes, complaints) in enumerate(everyone):
            keep_largest(self._session.tally.ratios, ratios)
            self._session.notes |= notes
            is_odd = status == pytest.ExitCode.INTERNAL_ERROR and complaints != self._complaints
            if is_odd and self.rank == 0:
                print(f"rank {rank}:", *complaints, sep="\n", file=sys.__stderr__)
        try:
            return (yield)
        except BaseException as error:  # of another plugin, such as a benchmark that is too slow
            code = getattr(error, "returncode", None) or session.exitstatus  # of pytest.exit
            session.exitstatus = code or pytest.ExitCode.INTERNAL_ERROR
            raise
        finally:
            if self.rank == 0:
                (self._watch.directory / watch.RESULT).write_text(str(int(session.exitstatus)))
