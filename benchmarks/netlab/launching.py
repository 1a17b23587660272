"""One launch: hosts up, ranks on them, their record, hosts down."""

from __future__ import annotations

import contextlib
import json
import shlex
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.launching import failure, tail, watch
from benchmarks.netlab import mpis
from benchmarks.netlab.hosts import AGENT, cluster
from benchmarks.netlab.setting import Setting

TIMEOUT = 90.0
WORKER = ("-m", "mpi4py", "-m", "benchmarks.netlab.worker")


def run_once(setting: Setting, mpi: str) -> dict[str, Any]:
    """Run the ranks of a setting; "status" is "ok", or else there is a "reason"."""
    with tempfile.TemporaryDirectory(prefix="sp_core-netlab-") as name, _launcher(setting, mpi, name) as command:
        folder = Path(name)
        setting.save(folder)
        code, output = watch(command, folder, TIMEOUT, lambda told: None)
        record = folder / "record.json"
        if code == 0 and record.exists():
            return {"status": "ok", **json.loads(record.read_text())}
        return {**failure(code, output, TIMEOUT, "measuring"), "output": tail(output)}


@contextlib.contextmanager
def _launcher(setting: Setting, mpi: str, folder: str) -> Iterator[list[str]]:
    """The command that starts the ranks; the hosts are there as long as the block lasts."""
    if setting.modelled:
        yield launch_command(setting, folder, ())
        return
    with cluster(setting.hosts, setting.wire) as up:
        across = mpis.across(mpi, AGENT, up.plan.names, setting.per_host)
        variables = [f"{name}={value}" for name, value in across.environment.items()]
        yield ["env", *variables, *up.on(up.plan.names[0], shlex.join(launch_command(setting, folder, across.arguments)))]


def launch_command(setting: Setting, folder: str, arguments: tuple[str, ...]) -> list[str]:
    """The kit's launcher, which ends what it has started, with mpiexec under it."""
    limits = ("-n", str(setting.ranks), "--timeout", f"{TIMEOUT:g}")
    given = (f"--mpi-args={shlex.join(arguments)}",) if arguments else ()
    return [sys.executable, "-m", "sp_core.testing.launch", *limits, *given, "--", sys.executable, *WORKER, folder]
