"""Trace one step of a transformer block on P ranks: `python -m benchmarks.reporting.trace --ranks 4 --scheme ring`."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.case import DEVICES, ITEM_BYTES, LAYOUTS, Case, CaseError
from benchmarks.launching import ROOT
from sp_core.launch import command as launch

SCHEMES = ("allgather_kv", "ring", "ulysses")
WORKER = ("python", "-m", "mpi4py", "-m", "benchmarks.reporting.trace.worker")
USAGE = 2


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(prog="trace", description="One step of a transformer block, all ranks side by side.")
    made.add_argument("--ranks", type=int, default=4)
    made.add_argument("--scheme", choices=SCHEMES, default="ring", help="of the attention (default: %(default)s)")
    made.add_argument("--layout", choices=LAYOUTS, default="zigzag", help="who owns which tokens (default: %(default)s)")
    made.add_argument("--hidden", type=int, default=256, help="default: %(default)s")
    made.add_argument("--heads", type=int, default=8, help="default: %(default)s")
    made.add_argument("--seq", type=int, default=2048, help="tokens (default: %(default)s)")
    made.add_argument("--dtype", choices=tuple(ITEM_BYTES), default="float32")
    made.add_argument("--not-causal", action="store_true")
    made.add_argument("--forward-only", action="store_true", help="leave the backward pass out")
    made.add_argument("--device", choices=DEVICES, default="cpu")
    made.add_argument("--transport", default="auto")
    made.add_argument("--share-gpu", action="store_true", help="let several ranks use one GPU")
    made.add_argument("--timeout", type=float, default=300.0, help="seconds (default: %(default)s)")
    made.add_argument("--out", type=Path, default=Path("reports/trace.json"), help="default: %(default)s")
    return made


def main(arguments: list[str] | None = None) -> int:
    """Run the ranks and say where the trace is; the exit code is 0, 1 for a failed run, 2 for arguments that make no sense."""
    options = parser().parse_args(arguments)
    try:
        case = _case(options)
    except CaseError as error:
        print(f"trace: {error}", file=sys.stderr)
        return USAGE
    out = options.out.resolve()
    out.parent.mkdir(parents=True, exist_ok=True)
    out.unlink(missing_ok=True)  # an older trace must not pass for the new one
    direction = "forward" if options.forward_only else "forward and backward"
    about = {**case.as_dict(), "scheme": options.scheme, "direction": direction}
    request = {"case": case.as_dict(), "scheme": options.scheme, "backward": not options.forward_only, "about": about}
    code = _launch({**request, "out": str(out)}, case.ranks, options.timeout)
    if code or not out.exists():
        print(f"trace: the run failed with exit code {code}; nothing was written.", file=sys.stderr)
        return 1
    print(f"{out}: {case.ranks} ranks, {options.scheme}, {direction}. Open it in ui.perfetto.dev or chrome://tracing.")
    return 0


def _case(options: argparse.Namespace) -> Case:
    """What is traced.

    Raises:
        CaseError: sizes that do not fit.
    """
    taken = ("ranks", "layout", "hidden", "heads", "seq", "dtype", "device", "transport", "share_gpu")
    sizes: dict[str, Any] = {name: getattr(options, name) for name in taken}
    return Case(**sizes, kv_heads=options.heads, ffn=4 * options.hidden, batch=1, causal=not options.not_causal)


def _launch(request: dict[str, Any], ranks: int, timeout: float) -> int:
    with tempfile.TemporaryDirectory(prefix="sp_core-trace-") as folder, contextlib.chdir(ROOT):
        path = Path(folder) / "request.json"
        path.write_text(json.dumps(request))
        return launch.run(ranks, [*WORKER, str(path)], timeout=timeout)


if __name__ == "__main__":
    sys.exit(main())
