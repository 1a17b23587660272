"""One rank of a run of mpi4py's tests.

`python -m mpi4py_suite.rank FOLDER plain|checked OUT MODULE...` under mpiexec.
"""

from __future__ import annotations

import json
import sys
import unittest
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import mpi4py
from mpi4py import MPI
from mpi4py_suite.results import Result, is_known


class Results(unittest.TestResult):
    """Writes down each test as it ends: a rank that dies leaves what it has done."""

    def __init__(self, file: TextIO) -> None:
        super().__init__()
        self._file = file

    def startTest(self, test: unittest.TestCase) -> None:
        super().startTest(test)
        self._word, self._problem = "passed", ""

    def addError(self, test: unittest.TestCase, err: Any) -> None:
        super().addError(test, err)
        self._fail(err)
        if not isinstance(test, unittest.TestCase):  # a module or a class that cannot be set up
            self._write(str(test))

    def addFailure(self, test: unittest.TestCase, err: Any) -> None:
        super().addFailure(test, err)
        self._fail(err)

    def addSubTest(self, test: unittest.TestCase, subtest: unittest.TestCase, err: Any) -> None:
        super().addSubTest(test, subtest, err)
        if err is not None:
            self._fail(err)

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        super().addSkip(test, reason)
        self._word, self._problem = "skipped", reason

    def stopTest(self, test: unittest.TestCase) -> None:
        super().stopTest(test)
        self._write(test.id())

    def _fail(self, err: Any) -> None:
        self._word, self._problem = "failed", f"{err[0].__name__}: {err[1]}"

    def _write(self, name: str) -> None:
        self._file.write(
            json.dumps(Result(name, self._word, self._problem.partition("\n")[0])) + "\n"
        )
        self._file.flush()


def tests_of(suite: unittest.TestSuite) -> Iterator[unittest.TestCase]:
    """The tests of a suite, one by one."""
    for each in suite:
        if isinstance(each, unittest.TestSuite):
            yield from tests_of(each)
        else:
            yield each


def check_communicators(modules: tuple[str, ...]) -> None:
    """Put checked communicators in the place of those that the tests begin with."""
    from sp_core.testing import CheckedComm

    for name in ("COMM_WORLD", "COMM_SELF"):
        setattr(MPI, name, CheckedComm(getattr(MPI, name)))
    if (
        "test_comm_topo" in modules
    ):  # what is made from a number has mpi4py's class, so its class is not compared

        def same(self: unittest.TestCase, comm: Any) -> None:
            assert MPI.Comm.fromint(comm.toint()) == comm

        topo: Any = __import__("test_comm_topo").BaseTestTopo
        topo.checkHandle = same


def main(folder: str, communicators: str, out: str, *modules: str) -> None:
    """Run test modules; a test that is known to leave messages when it fails runs last."""
    rank = MPI.COMM_WORLD.rank
    sys.path.insert(0, folder)
    if communicators == "checked":
        check_communicators(modules)
    tests = sorted(
        tests_of(unittest.defaultTestLoader.loadTestsFromNames(modules)),
        key=lambda test: is_known(test.id()),
    )
    with (Path(out) / f"rank{rank}.jsonl").open("w") as file:
        name, version = MPI.get_vendor()
        file.write(
            json.dumps([f"{name} {'.'.join(map(str, version))}", mpi4py.__version__, len(tests)])
            + "\n"
        )
        unittest.TestSuite(tests).run(Results(file))


if __name__ == "__main__":
    main(*sys.argv[1:])
