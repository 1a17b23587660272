"""Trace one step of a transformer block on P ranks: `python -m benchmarks.reporting.trace --ranks 4 --scheme ring`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from benchmarks import launching
from benchmarks.cases.setting import BlockSetting
from benchmarks.contests.contest import refused
from benchmarks.launching import Launch, UsageError, writable
from benchmarks.records import AXIS, make_case
from benchmarks.scaling import DTYPES, LAYOUTS, shape_of

SCHEMES = ("allgather_kv", "ring", "ulysses")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    made = argparse.ArgumentParser(prog="trace", description="One step of a transformer block, all ranks side by side.")
    made.add_argument("--ranks", type=int, default=4)
    made.add_argument("--scheme", choices=SCHEMES, default="ring", help="of the attention (default: %(default)s)")
    made.add_argument("--layout", choices=LAYOUTS, default="zigzag", help="who owns which tokens (default: %(default)s)")
    made.add_argument("--hidden", type=int, default=256, help="default: %(default)s")
    made.add_argument("--heads", type=int, default=8, help="default: %(default)s")
    made.add_argument("--seq", type=int, default=2048, help="tokens (default: %(default)s)")
    made.add_argument("--dtype", choices=DTYPES, default="float32")
    made.add_argument("--not-causal", action="store_true")
    made.add_argument("--forward-only", action="store_true", help="leave the backward pass out")
    made.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    made.add_argument("--transport", default="auto")
    made.add_argument("--share-gpu", action="store_true", help="let several ranks use one GPU")
    made.add_argument("--timeout", type=float, default=300.0, help="seconds (default: %(default)s)")
    made.add_argument("--out", type=Path, default=Path("reports/trace.json"), help="default: %(default)s")
    return made.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the ranks and write the trace; the exit code is 0, 1 for a failed run, 2 for options that cannot be run."""
    options = parse(arguments)
    try:
        out, launch = writable(options.out.resolve()), Launch(timeout=options.timeout)
        sizes = {"batch": 1, **{name: getattr(options, name) for name in ("hidden", "heads", "seq")}}
        shape, mask = shape_of(sizes, sizes), "full" if options.not_causal else "causal"
    except UsageError as error:
        return refused("trace", error)
    what = {"direction": "forward" if options.forward_only else "both", "layout": options.layout, "mask": mask}
    mesh = {AXIS: options.ranks}
    case = make_case("layers", options.scheme, mesh, shape, options.transport, dtype=options.dtype, **what)
    setting = BlockSetting(case, device=options.device, share_gpu=options.share_gpu)
    out.unlink(missing_ok=True)  # an older trace must not pass for the new one
    found = launching.run(options.ranks, "benchmarks.reporting.trace.rank:measure", setting, launch)
    if found["status"] != "ok":
        print(f"trace: the run failed: {found['reason']}\n{found['output']}\ntrace: nothing was written.")
        return 1
    out.write_text(json.dumps(found["trace"], separators=(",", ":"), allow_nan=False))
    ranks = f"{options.ranks} ranks, {options.scheme}, {found['trace']['otherData']['direction']}"
    print(f"{out}: {ranks}. Open it in ui.perfetto.dev or chrome://tracing.")
    return 0


if __name__ == "__main__":
    launching.main(main)
