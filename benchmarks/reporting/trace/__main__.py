"""Trace one step of a transformer block: `python -m benchmarks.reporting.trace --ranks 4`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from benchmarks import launching, scaling
from benchmarks.launching import Launch, Options, UsageError, about, parse, writable

LEFT_OUT = ("--preset", "--iterations", "--warmup")
OPTIONS: Options = {
    **{flag: option for flag, option in scaling.OPTIONS.items() if flag not in LEFT_OUT},
    "--out": about(type=Path, default=Path("reports/trace.json"), help="default: %(default)s"),
}
CHOICES = {"scheme": "ring", "sharding": "zigzag", "mask": "causal", "ranks": "4"}
DEFAULTS = {**CHOICES, "backward": True, "preset": "trace", "iterations": 1, "warmup": 0}


@launching.program("trace")
def main(arguments: Sequence[str] | None = None) -> int:
    """Write the trace; return 0, 1 for a failed run, 2 for options that cannot be run."""
    text = "One step of a transformer block, all ranks side by side."
    options = parse("trace", text, OPTIONS, arguments, **DEFAULTS)
    out = writable(options.out.resolve())
    launch = Launch(options.launcher, options.timeout)
    setting, *others = scaling.settings(options)
    if others or len(setting.case.mesh) > 1:
        raise UsageError("pass one number of --ranks, one --dtype, and no hybrid scheme.")
    out.unlink(missing_ok=True)  # an older trace must not pass for the new one
    measure = "benchmarks.reporting.trace.rank:measure"
    found = launching.run(setting.case.ranks, measure, setting, launch)
    if found["status"] != "ok":
        print(f"trace: the run failed: {found['reason']}\n{found['output']}")
        print("trace: nothing was written.")
        return 1
    out.write_text(json.dumps(found["trace"], separators=(",", ":"), allow_nan=False))
    what = f"{setting.case.ranks} ranks, {scaling.step(setting.case)}"
    print(f"{out}: {what}. Open it in ui.perfetto.dev or chrome://tracing.")
    return 0


if __name__ == "__main__":
    launching.main(main)
