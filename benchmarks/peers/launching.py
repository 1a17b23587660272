"""One launch: two ranks in processes of their own, and the record that they leave."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.launching import ROOT, tail
from benchmarks.peers.setting import RANKS, Setting
from sp_core.launch import command as launch

WORKER = ("python", "-m", "mpi4py", "-m", "benchmarks.peers.worker")


def run_once(setting: Setting, timeout: float) -> dict[str, Any]:
    """Start the ranks, wait for their end, and read their record; "status" is "ok" or "failed", then with a "reason"."""
    start, load = time.monotonic(), os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="sp_core-peers-") as name, contextlib.chdir(ROOT):
        folder = Path(name)
        (folder / "setting.json").write_text(json.dumps(setting.as_dict()))
        code = launch.run(RANKS, [*WORKER, name], timeout=timeout)
        found = _outcome(folder, code)
    return {"seed": setting.seed, "load_before": load, "seconds": time.monotonic() - start, **found}


def _outcome(folder: Path, code: int) -> dict[str, Any]:
    record = folder / "record.json"
    if code == 0 and record.exists():
        return {"status": "ok", **json.loads(record.read_text())}
    printed = "\n".join(tail(path.read_text(errors="replace")) for path in sorted(folder.glob("output-*")))
    return {"status": "failed", "reason": f"exit code {code}; the ranks printed:\n{printed}"}
