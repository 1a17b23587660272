"""The `parallel_benchmark` fixture: pytest-benchmark under mpiexec, where every rank is a session and rank 0 keeps the results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from benchmarks import ranks, records
from benchmarks.harness.case import Build, Case
from benchmarks.harness.measured import measure, problem
from benchmarks.harness.outcome import meet, status_of
from benchmarks.harness.sampling import QUICK, Budget
from benchmarks.harness.setting import Setting
from benchmarks.harness.suite import of_module

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

SETTING = "--bench-setting"
SAVED_BY_RANK_0 = {"benchmark_json": None, "benchmark_save": None, "benchmark_autosave": False, "benchmark_histogram": None}
_HARNESS: pytest.StashKey[Harness] = pytest.StashKey()


class CaseFailed(Exception):
    """A case that went wrong on some rank, or whose result is wrong; raised on all ranks."""


class Harness:
    """What all cases of a session share.

    Args:
        setting: what the runner asked for.
        world: the ranks; cases never send on it.
    """

    def __init__(self, setting: Setting, world: Intracomm) -> None:
        torch.set_num_threads(ranks.THREADS)
        torch.set_float32_matmul_precision("highest")  # no TF32
        self.setting, self.world = setting, world
        self.device = ranks.device(setting.device, world, share_gpu=setting.share_gpu)
        self.total = self.done = 0
        self._common = setting.common()

    def run(self, case: Case, build: Build, benchmark: Any) -> None:
        """Measure a case, and have rank 0 write its record, whatever becomes of it.

        Raises:
            CaseFailed: on all ranks.
        """
        self._tell(case)
        found: dict[str, Any] = {}
        error = None
        facts = self._facts(case)
        try:
            budget = QUICK if self.setting.quick else Budget()
            found, samples = measure(case, build, self.world, self.device, budget, benchmark.pedantic)
        except Exception as raised:  # noqa: BLE001  # whatever it is, the other ranks must learn of it
            error = raised
        failures = meet(self.world, error)
        status, reason = _status(found, failures)
        self._write({**facts, **(_NOTHING if failures else found), "status": status, "reason": reason}, case)
        self.done += 1
        if reason is not None:
            raise CaseFailed(reason) from error
        benchmark.stats.stats.data[:] = [seconds / samples.inner for seconds in samples.makespans]  # rank 0's own clock sees less
        benchmark.group = case.layer
        benchmark.extra_info.update(case=case.id, ranks=case.ranks, inner=samples.inner)

    def _facts(self, case: Case) -> dict[str, Any]:
        found = ranks.facts(self.world, self.device, case.transport)
        found["env"]["fingerprint"] = records.fingerprint(found["env"], found["device"], found["transport"])
        return found

    def _write(self, parts: dict[str, Any], case: Case) -> None:
        if self.world.rank == 0 and self.setting.out:
            records.append(Path(self.setting.out), {**self._common, "case": case.as_dict(), **parts})

    def _tell(self, case: Case) -> None:
        """Say what is measured now; the runner shows it, and knows where a launch ended."""
        if self.world.rank == 0 and self.setting.progress:
            Path(self.setting.progress).write_text(json.dumps({"case": case.id, "done": self.done, "total": self.total}))


_NOTHING = dict.fromkeys(("timing", "phases", "comm", "memory", "work"))


def _status(found: dict[str, Any], failures: list[str]) -> tuple[str, str | None]:
    if failures:
        return status_of(failures[0]), records.reason("\n".join(failures))
    wrong = problem(found)
    if wrong is not None:
        return "wrong", wrong
    return ("skew_limited" if found["timing"]["skew_limited"] else "ok"), None


def pytest_addoption(parser: pytest.Parser) -> None:
    """The option by which the runner speaks to the ranks."""
    parser.getgroup("sp_core benchmarks").addoption(SETTING, type=Path, metavar="FILE", help="of benchmarks.record")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Start MPI, and leave all files to rank 0."""
    from mpi4py import MPI

    path = config.getoption(SETTING)
    config.stash[_HARNESS] = Harness(Setting() if path is None else Setting.load(path), MPI.COMM_WORLD.Dup())
    if MPI.COMM_WORLD.rank != 0:
        for option, value in SAVED_BY_RANK_0.items():
            setattr(config.option, option, value)
        config.option.benchmark_quiet = True


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A module's cases are those that it has for this number of ranks."""
    if "case" in metafunc.fixturenames:
        harness = metafunc.config.stash[_HARNESS]
        cases = of_module(f"benchmarks.{metafunc.module.__name__.rsplit('.', 1)[-1]}", harness.world.size, harness.setting)
        harness.total += len(cases)
        metafunc.parametrize("case", cases, ids=[case.id for case in cases])


@pytest.fixture
def parallel_benchmark(benchmark: Any, pytestconfig: pytest.Config) -> Any:
    """Time a case on all ranks: `parallel_benchmark(case, build)`."""
    return lambda case, build: pytestconfig.stash[_HARNESS].run(case, build, benchmark)
