"""Run mpi4py's tests on one rank.

Start it under mpiexec: `python -m mpi4py_suite.rank FOLDER plain|checked OUT MODULE...`.
"""

import json
import sys
import unittest
from pathlib import Path
from typing import Any, TextIO

import mpi4py
from mpi4py import MPI
from mpi4py_suite.results import is_known


class Results(unittest.TestResult):
    """Write down each test as it ends, so that a rank that dies leaves its results."""

    def __init__(self, file: TextIO) -> None:
        super().__init__()
        self._file = file

    def startTest(self, test: unittest.TestCase) -> None:
        self._told = ("passed", "")

    def addError(self, test: unittest.TestCase, err: Any) -> None:
        self._told = ("failed", f"{err[0].__name__}: {err[1]}".partition("\n")[0])
        if not isinstance(test, unittest.TestCase):  # a module or a class that cannot be set up
            self.stopTest(test)

    addFailure = addError

    def addSubTest(self, test: unittest.TestCase, subtest: unittest.TestCase, err: Any) -> None:
        if err is not None:
            self.addError(test, err)

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        self._told = ("skipped", reason.partition("\n")[0])

    def stopTest(self, test: unittest.TestCase) -> None:
        self._file.write(json.dumps([test.id(), *self._told]) + "\n")
        self._file.flush()


def tests_of(suite: Any) -> list[unittest.TestCase]:
    """Return the tests of a suite, one by one."""
    if isinstance(suite, unittest.TestCase):
        return [suite]
    return [test for part in suite for test in tests_of(part)]


def check_communicators(modules: tuple[str, ...]) -> None:
    """Replace `MPI.COMM_WORLD` and `MPI.COMM_SELF` by checked communicators."""
    from sp_core.testing import CheckedComm

    for name in ("COMM_WORLD", "COMM_SELF"):
        setattr(MPI, name, CheckedComm(getattr(MPI, name)))
    if "test_comm_topo" in modules:  # see `results.ADAPTED`

        def same(self: unittest.TestCase, comm: Any) -> None:
            assert MPI.Comm.fromint(comm.toint()) == comm

        __import__("test_comm_topo").BaseTestTopo.checkHandle = same


def main(folder: str, communicators: str, out: str, *modules: str) -> None:
    """Run test modules. Tests in `KNOWN` run last, because they may leave messages if they fail."""
    sys.path.insert(0, folder)
    if communicators == "checked":
        check_communicators(modules)
    tests = tests_of(unittest.defaultTestLoader.loadTestsFromNames(modules))
    tests.sort(key=lambda test: is_known(test.id()))
    name, version = MPI.get_vendor()
    about = [f"{name} {'.'.join(map(str, version))}", mpi4py.__version__, len(tests)]
    with (Path(out) / f"rank{MPI.COMM_WORLD.rank}.jsonl").open("w") as file:
        file.write(json.dumps(about) + "\n")
        unittest.TestSuite(tests).run(Results(file))


if __name__ == "__main__":
    main(*sys.argv[1:])
