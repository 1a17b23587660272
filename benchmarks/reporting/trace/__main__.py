"""Trace one step of a transformer block: `python -m benchmarks.reporting.trace --ranks 4`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from benchmarks import launching
from benchmarks.cases.setting import BlockSetting
from benchmarks.contests.contest import refused
from benchmarks.launching import Launch, Options, UsageError, about, parse, writable
from benchmarks.records import AXIS, make_case
from benchmarks.scaling import DTYPES, LAYOUTS, shape_of

SCHEMES = ("allgather_kv", "ring", "ulysses")
OPTIONS: Options = {
    "--ranks": about(type=int, default=4),
    "--scheme": about(
        choices=SCHEMES, default="ring", help="of the attention (default: %(default)s)"
    ),
    "--layout": about(
        choices=LAYOUTS, default="zigzag", help="who owns which tokens (default: %(default)s)"
    ),
    "--hidden": about(type=int, default=256, help="default: %(default)s"),
    "--heads": about(type=int, default=8, help="default: %(default)s"),
    "--seq": about(type=int, default=2048, help="tokens (default: %(default)s)"),
    "--dtype": about(choices=DTYPES, default="float32"),
    "--not-causal": about(action="store_true"),
    "--forward-only": about(action="store_true", help="leave the backward pass out"),
    "--device": about(choices=("cpu", "cuda"), default="cpu"),
    "--transport": about(default="auto"),
    "--share-gpu": about(action="store_true", help="let several ranks use one GPU"),
    "--timeout": about(type=float, default=300.0, help="seconds (default: %(default)s)"),
    "--out": about(type=Path, default=Path("reports/trace.json"), help="default: %(default)s"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the trace; return 0, 1 for a failed run, 2 for options that cannot be run."""
    options = parse(
        "trace", "One step of a transformer block, all ranks side by side.", OPTIONS, arguments
    )
    try:
        out, launch = writable(options.out.resolve()), Launch(timeout=options.timeout)
        sizes = {
            "batch": 1,
            **{name: getattr(options, name) for name in ("hidden", "heads", "seq")},
        }
        shape, mask = shape_of(sizes, sizes), "full" if options.not_causal else "causal"
    except UsageError as error:
        return refused("trace", error)
    what = {
        "direction": "forward" if options.forward_only else "both",
        "layout": options.layout,
        "mask": mask,
    }
    mesh = {AXIS: options.ranks}
    case = make_case(
        "layers", options.scheme, mesh, shape, options.transport, dtype=options.dtype, **what
    )
    setting = BlockSetting(case, device=options.device, share_gpu=options.share_gpu)
    out.unlink(missing_ok=True)  # an older trace must not pass for the new one
    found = launching.run(options.ranks, "benchmarks.reporting.trace.rank:measure", setting, launch)
    if found["status"] != "ok":
        print(
            f"trace: the run failed: {found['reason']}\n{found['output']}\n"
            "trace: nothing was written."
        )
        return 1
    out.write_text(json.dumps(found["trace"], separators=(",", ":"), allow_nan=False))
    ranks = f"{options.ranks} ranks, {options.scheme}, {found['trace']['otherData']['direction']}"
    print(f"{out}: {ranks}. Open it in ui.perfetto.dev or chrome://tracing.")
    return 0


if __name__ == "__main__":
    launching.main(main)
