"""Run pytest-benchmark under mpiexec: rank 0 keeps results, all ranks learn how a case ended."""

import os
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from benchmarks.cases.case import Work, measure as measure_case, meshes, problem, wait_for
from benchmarks.cases.setting import Setting, listed, module_of
from benchmarks.launching import NO_MEMORY, Record
from benchmarks.machine import device, facts
from benchmarks.records import Case, append, reason as reason_of
from benchmarks.sample import QUICK, Budget
from benchmarks.worker import Intracomm, Rank

PATIENCE_SECONDS = 10.0
SHOWN = 1500  # characters of an error that a record keeps


class Harness:
    """A pytest plugin that gives pytest-benchmark the cases, and times them on all ranks.

    Args:
        setting: the launch's setting.
        rank: this rank, with the communicator of all.
    """

    def __init__(self, setting: Setting, rank: Rank) -> None:
        self.setting, self.rank = setting, rank
        self.world = rank.world.Dup()  # cases never send on it
        self.device = device(setting.device, self.world, share_gpu=setting.share_gpu)
        self.total = self.done = 0

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Give `bench_case` the cases for this number of ranks."""
        cases = listed(self.world.size, self.setting)
        self.total = len(cases)
        runs = [partial(self.run, case) for case in cases]
        metafunc.parametrize("run", runs, ids=[case.id for case in cases])

    def run(self, case: Case, benchmark: Any) -> None:
        """Measure a case, and let rank 0 write its record, also if the case fails.

        Raises:
            RuntimeError: on all ranks, if the case failed on one or its result is wrong.
        """
        self.rank.tell(f"measuring {case.id}", self.done, self.total, case=case.id)
        found, error = Record(), None
        said = facts(self.world, self.device, case.transport)
        try:
            budget = QUICK if self.setting.quick else Budget()
            # a comparison has many launches, and asks for times only
            memory = self.setting.pair is None
            with meshes(case, self.world, self.device) as mesh:
                sync = partial(wait_for, self.device)
                work: Work = module_of(case.layer).build(case, mesh, sync)
                found = measure_case(work, self.world, self.device, budget, memory=memory)
        except Exception as raised:  # noqa: BLE001  # the other ranks must learn of any exception
            error = raised
        failures = meet(self.world, error)
        status, reason = status_of(found, failures)
        if self.world.rank == 0 and self.setting.out:
            parts = {**said, **({} if failures else found), "status": status, "reason": reason}
            append(self.setting.out, self.setting.record(case, **parts))
        self.done += 1
        if reason is not None:
            raise RuntimeError(reason) from error
        benchmark.pedantic(lambda: None)  # makes the statistics; their samples are replaced
        benchmark.stats.stats.data[:] = found["timing"]["samples_s"]
        benchmark.group = case.layer
        benchmark.extra_info.update(case=case.id, ranks=case.ranks, inner=found["timing"]["inner"])


def bench_case(run: Callable[[Any], None], benchmark: Any) -> None:
    """Time one case; pytest collects this function as a test."""
    run(benchmark)


def status_of(found: Record, failures: list[str]) -> tuple[str, str | None]:
    """Return a case's status and its reason, from the measured parts and the ranks' error texts."""
    if failures:
        status = "oom" if any(sign in failures[0] for sign in NO_MEMORY) else "failed"
        return status, reason_of("\n".join(failures))
    wrong = problem(found)
    if wrong is not None:
        return "wrong", wrong
    return ("skew_limited" if found["timing"]["skew_limited"] else "ok"), None


def meet(world: Intracomm, error: Exception | None) -> list[str]:
    """Exchange with all ranks how the case ended.

    A rank that failed waits `PATIENCE_SECONDS` at most, because the others may be waiting for it
    inside the case. Then it ends the whole launch.

    Args:
        world: a communicator that the case did not use.
        error: the exception of the case on this rank, if there was one.

    Returns:
        A text for each rank that failed; the same list on all ranks.
    """
    mine = "" if error is None else f"rank {world.rank}: {type(error).__name__}: {error}"[:SHOWN]
    arrived = world.Ibarrier()
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not arrived.Test():
        if error is not None and time.monotonic() > deadline:
            traceback.print_exception(error)
            print(
                f"{mine}\nThe others did not arrive in {PATIENCE_SECONDS:g} s: the launch ends.",
                file=sys.stderr,
                flush=True,
            )
            world.Abort(1)
        time.sleep(0.001)
    told: list[str] = world.allgather(mine)
    return [text for text in told if text]


def measure(values: Any, rank: Rank) -> Record:
    """Run all cases of a launch in this rank's pytest session.

    Args:
        values: the plain values of a `Setting`.
        rank: this rank, with the communicator of all ranks.

    Returns:
        An empty record, because each case appends its own record to a file.

    Raises:
        SystemExit: a case failed, or its result is wrong.
    """
    setting = msgspec.convert(values, Setting)
    if rank.world.rank != 0:  # rank 0's pytest prints enough; the runner shows errors of the others
        with Path(os.devnull).open("w") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
    # sp_core is imported before pytest finds the plugin in it
    ignored = ("-W", "ignore::pytest.PytestAssertRewriteWarning")
    options = ["-q", "--capture=no", "--no-header", "-p", "no:cacheprovider", *ignored]
    if setting.pair is None and rank.world.rank == 0:  # a comparison leaves records only
        saved = f"{Path(setting.out).with_suffix('')}-{setting.run_id}-p{rank.world.size}"
        options.append(f"--benchmark-json={saved}.pytest-benchmark.json")
    code = pytest.main([*options, __file__], plugins=[Harness(setting, rank)])
    if code:
        raise SystemExit(int(code))
    return {}
