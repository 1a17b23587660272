"""The scaling experiment: one transformer block, its sequence split over P ranks, K and V gathered, checked and timed.

For each P the ranks run in a job of their own. The output is first compared with a single device's;
a wrong one is a failure, not a row.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from benchmarks import launching, records
from benchmarks.cases.setting import BlockSetting as Setting
from benchmarks.cases.setting import Setting as Run
from benchmarks.cases.setting import Verdict
from benchmarks.files import write_json
from benchmarks.launching import (
    ROOT,
    Launch,
    UsageError,
    add_launching,
    commit,
    numbers_of_ranks,
    writable,
)
from benchmarks.record import NOTHING, follow, warn_of_load
from benchmarks.records import AXIS, Case, Record, make_case
from benchmarks.reporting import derive, plots, style, tables, terminal
from benchmarks.reporting.tables import DASH, count, milliseconds, percent, size
from benchmarks.reporting.terminal import Console

RESULTS = ROOT / "benchmarks" / "results"
DTYPES = ("float32", "bfloat16", "float16")  # float64 is what these are judged against
LAYOUTS = ("contiguous", "zigzag", "striped")
SIZES = {
    "hidden": "model dim",
    "heads": "attention heads",
    "kv_heads": "key/value heads; as many as heads if not given",
    "head_dim": "dim of a head; hidden/heads if not given",
    "ffn": "feed-forward dim; 4 x hidden if not given",
    "seq": "tokens of the sequence",
    "batch": "sequences",
    "iterations": "timed steps",
    "warmup": "steps before them",
    "seed": "of weights and embedding",
}
PRESETS: dict[str, dict[str, Any]] = {
    "small": {
        "hidden": 512,
        "heads": 8,
        "seq": 2048,
        "batch": 1,
        "iterations": 20,
        "warmup": 3,
        "dtype": "float32",
    },
    "paper": {
        "hidden": 5120,
        "heads": 40,
        "seq": 4096,
        "batch": 4,
        "iterations": 10,
        "warmup": 2,
        "dtype": "float32,bfloat16",
    },
}
"""Sizes by name; all others follow from them."""

CUDA_PROBE = "import torch; print(torch.cuda.device_count() if torch.cuda.is_available() else 0)"
COLUMNS = (
    "P",
    "time (ms)",
    "speed-up",
    "efficiency",
    "tokens/s",
    "comm share",
    "ms/AllGather",
    "GB/s",
    "peak memory",
    "max error",
    "",
)
LEGEND = (
    "time: median over the iterations, last rank's end minus first rank's start. speed-up: against the fewest ranks; each rank "
    "uses 1 CPU thread. comm share: part of the step spent waiting for communication and for other ranks. AllGather: of all K "
    "and V, by itself. GB/s: bytes a rank receives / its time. peak memory: live tensors of the rank that has most. max error: "
    "against a single device in plain torch; 0 is bit for bit."
)


@dataclass(frozen=True)
class Outcome:
    """One P: the record, the verdict on the output, and the AllGather of K and V by itself."""

    record: Record
    check: dict[str, Any] | None = None
    all_gather: dict[str, Any] | None = None


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    made = argparse.ArgumentParser(prog="scaling", description=__doc__)
    made.add_argument(
        "--preset",
        choices=tuple(PRESETS),
        default="small",
        help="sizes to begin with (default: %(default)s)",
    )
    add_launching(made, ranks="1,2,4", timeout=600.0)
    for name, text in SIZES.items():
        made.add_argument(f"--{name.replace('_', '-')}", type=int, metavar="N", help=text)
    made.add_argument(
        "--causal", action=argparse.BooleanOptionalAction, help="tokens see only those before them"
    )
    made.add_argument(
        "--dtype",
        metavar="DTYPE,...",
        help=f"of {', '.join(DTYPES)}; several are run one after the other",
    )
    made.add_argument(
        "--layout",
        choices=LAYOUTS,
        default="contiguous",
        help="which rank owns which tokens (default: contiguous)",
    )
    made.add_argument(
        "--transport",
        default="auto",
        metavar="NAME",
        help="how bytes travel; see `python -m sp_core doctor` (default: auto)",
    )
    made.add_argument(
        "--out",
        type=Path,
        default=RESULTS,
        metavar="FOLDER",
        help="where files go (default: benchmarks/results)",
    )
    return made.parse_args(arguments)


def settings(options: argparse.Namespace) -> list[list[Setting]]:
    """Return the launches that the options ask for: for each dtype, one per number of ranks.

    Raises:
        UsageError: options that make no case, or that this machine cannot run.
    """
    given = {
        name: value for name in (*SIZES, "dtype") if (value := getattr(options, name)) is not None
    }
    sizes = {**PRESETS[options.preset], **given}
    dtypes = [name.strip() for name in str(sizes.pop("dtype")).split(",")]
    shape = shape_of(sizes, given)
    wrong = [dtype for dtype in dtypes if dtype not in DTYPES]
    if wrong:
        raise UsageError(f"dtype is {wrong[0]!r}; pass one of {', '.join(DTYPES)}.")
    more = {
        "iterations": sizes["iterations"],
        "warmup": sizes["warmup"],
        "seed": sizes.get("seed", 0),
    }
    counts, mask = numbers_of_ranks(options.ranks), "causal" if options.causal else "full"
    check_machine(options, max(counts))

    def one(ranks: int, dtype: str) -> Setting:
        where = (options.transport,)
        what = {
            "direction": "forward",
            "layout": options.layout,
            "mask": mask,
            "dtype": dtype,
            "detail": "block",
        }
        case = make_case("layers", "allgather_kv", {AXIS: ranks}, shape, *where, **what)
        return Setting(case, **more, device=options.device, share_gpu=options.share_gpu)

    return [[one(ranks, dtype) for ranks in counts] for dtype in dtypes]


def shape_of(sizes: dict[str, Any], given: dict[str, Any]) -> dict[str, int]:
    """Return all sizes of a block, also those that follow from others.

    Args:
        sizes: a preset with the given values over it.
        given: the values that the user asked for, which must not be overruled.

    Raises:
        UsageError: the sizes do not fit each other.
    """
    head_dim = sizes.get("head_dim")
    if head_dim is not None and "hidden" not in given:
        sizes["hidden"] = sizes["heads"] * head_dim
    sizes = {"kv_heads": sizes["heads"], "ffn": 4 * sizes["hidden"], **sizes}
    for name, value in sizes.items():
        if value < (0 if name in ("warmup", "seed") else 1):
            raise UsageError(f"{name} is {value}; pass more.")
    hidden, heads, kv_heads = sizes["hidden"], sizes["heads"], sizes["kv_heads"]
    if head_dim is not None and heads * head_dim != hidden:
        raise UsageError(
            f"{heads} heads of {head_dim} make {heads * head_dim}, hidden is {hidden}. "
            "Leave one of --hidden, --heads, --head-dim out, or make them fit."
        )
    if hidden % heads:
        raise UsageError(
            f"{heads} heads do not divide hidden {hidden}. Pass a --hidden that is a multiple of --heads."
        )
    if heads % kv_heads:
        raise UsageError(
            f"{kv_heads} key/value heads do not divide {heads} heads. Pass a divisor as --kv-heads."
        )
    sizes["head_dim"] = hidden // heads
    return {
        name: sizes[name]
        for name in ("batch", "seq", "hidden", "heads", "kv_heads", "head_dim", "ffn")
    }


def check_machine(options: argparse.Namespace, ranks: int) -> None:
    """Check what this machine offers, before anything is launched.

    Raises:
        UsageError: a program or a GPU is missing.
    """
    program = options.launcher.split()[0] if options.launcher else "mpiexec"
    if (
        shutil.which(program) is None
        and shutil.which(program, path=str(Path(sys.executable).parent)) is None
    ):
        raise UsageError(
            f"no {program} on the PATH or beside {sys.executable}. Install one: pip install mpich"
        )
    if options.transport != "auto":
        from sp_core.transport import NAMES

        if options.transport not in NAMES[options.device]:
            choices = ", ".join(NAMES[options.device])
            raise UsageError(
                f"transport {options.transport!r} on {options.device}; pass auto or one of {choices}."
            )
    if options.device == "cpu":
        return
    # a process of its own: importing torch here would slow every other run
    answer = subprocess.run(
        [sys.executable, "-c", CUDA_PROBE], capture_output=True, text=True, timeout=120, check=False
    )
    gpus = int(answer.stdout) if answer.returncode == 0 else 0
    if gpus == 0:
        raise UsageError(
            "--device cuda, but torch sees no CUDA device here. Use --device cpu, or a torch with CUDA on a machine with a GPU."
        )
    if ranks > gpus and not options.share_gpu:
        raise UsageError(
            f"{ranks} ranks, but {gpus} GPUs. Pass fewer --ranks, or --share-gpu to let several ranks use one."
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the experiment; 0 if every case came out right, 1 if one did not, 2 for options that cannot be run."""
    options = parse(arguments)
    try:
        launch = Launch(options.launcher, options.timeout)
        groups = settings(options)
        writable(options.out / file_name(groups[0][0], 0))
    except UsageError as error:
        print(f"scaling: {error}", file=sys.stderr)
        return 2
    screen, interrupted = terminal.console(), False
    done: list[list[Outcome]] = [[] for _ in groups]
    warn_of_load(screen)
    try:
        for number, (group, outcomes) in enumerate(zip(groups, done, strict=True)):
            for setting in group:
                path = options.out / file_name(setting, number)
                path.unlink(missing_ok=True)  # an older result must not pass for this one
                outcomes.append(run_once(screen, setting, launch))
                write_json(path, msgspec.to_builtins(outcomes[-1]))
    except KeyboardInterrupt:
        print("\nscaling: interrupted; what is complete follows.", file=sys.stderr)
        interrupted = True
    show(screen, [outcomes for outcomes in done if outcomes], options)
    right = all(outcome.record.seconds for outcomes in done for outcome in outcomes)
    return 130 if interrupted else int(not right)


def run_once(screen: Console, setting: Setting, launch: Launch) -> Outcome:
    """Run one P, and say in a line how it came out."""
    case = setting.case
    name = f"P = {case.ranks}, {case.dtype}"
    with terminal.bar(screen) as bar:
        heard = (
            follow(bar, screen, name, setting.iterations)
            if screen.is_terminal
            else lambda news: None
        )
        found = launching.run(case.ranks, "benchmarks.cases.block:measure", setting, launch, heard)
    outcome = outcome_of(setting, found)
    if outcome.check is None:
        terminal.say(
            screen,
            f"{name}: {found['status'].upper()}: {found['reason']}\n{found['output']}",
            "red",
        )
    else:
        word, style = ("correct", "") if found["status"] == "ok" else ("WRONG", "red")
        terminal.say(screen, f"{name}: {word}. {Verdict(**outcome.check)}", style)
    return outcome


def outcome_of(setting: Setting, found: dict[str, Any]) -> Outcome:
    """Return the outcome of a launch from what it has left."""
    now = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    common = Run(run_id=now, commit={**commit(), "merge_base": None, "branch": None}).common()
    check = found.get("check")
    status, reason = found["status"], found.get("reason")
    if status == "ok" and found["parts"]["timing"]["skew_limited"]:
        status = "skew_limited"
    if status == "wrong":
        reason = str(Verdict(**check)) if check else "wrong"
    note = {"status": status, "reason": None if reason is None else records.reason(reason)}
    record = records.parse(
        msgspec.json.encode(
            {**common, "case": setting.case, **NOTHING, **found.get("parts", {}), **note}
        )
    )
    return Outcome(record, check, found.get("all_gather"))


def table(outcomes: list[Outcome], device: str) -> tables.Table:
    """Return the table of one dtype: a line for each P, also for those that failed."""
    by_ranks = {outcome.record.case.ranks: outcome for outcome in outcomes}
    failed = {
        ranks: one.record.status for ranks, one in by_ranks.items() if one.record.status != "wrong"
    }
    lines = {
        ranks: (str(ranks), *[DASH] * (len(COLUMNS) - 2), status)
        for ranks, status in failed.items()
    }
    for row in derive.rows(outcome.record for outcome in outcomes):
        gather, check = by_ranks[row.ranks].all_gather, by_ranks[row.ranks].check or {}
        lines[row.ranks] = (
            str(row.ranks),
            milliseconds(row.seconds),
            f"{row.speedup:.2f}",
            f"{row.efficiency:.0%}",
            count(row.tokens_per_s),
            percent(row.share),
            DASH if gather is None else f"{gather['ms']:.3f}",
            DASH if gather is None else f"{gather['gb_per_s']:.2f}",
            size(row.peak_bytes),
            f"{check.get('max_abs_error', 0.0):.1e}",
            ", ".join(row.flags),
        )
    return tables.make(
        title(outcomes[0].record.case, device), COLUMNS, (line for _, line in sorted(lines.items()))
    )


def title(case: Case, device: str) -> str:
    """Describe a case in one line."""
    shape = case.shape
    heads = f"{shape['heads']} heads of {shape['head_dim']}"
    if shape["kv_heads"] != shape["heads"]:
        heads += f" ({shape['kv_heads']} key/value heads)"
    return (
        f"{case.dtype} on {device}: hidden {shape['hidden']}, {heads}, feed-forward {shape['ffn']}, "
        f"sequence {shape['seq']}, batch {shape['batch']}, {'causal' if case.mask == 'causal' else 'not causal'}, {case.layout}"
    )


def show(screen: Console, groups: list[list[Outcome]], options: argparse.Namespace) -> None:
    """Print the tables and where the files are, and draw the plot."""
    for outcomes in groups:
        terminal.show(screen, table(outcomes, options.device))
    timed = [outcomes for outcomes in groups if any(outcome.record.seconds for outcome in outcomes)]
    if timed:
        terminal.say(screen, LEGEND, "dim")
        draw(timed, options.out / f"strong_scaling_sp_{_kind(options.device)}.png", options.device)
    terminal.say(screen, f"files: {options.out}")


def draw(groups: list[list[Outcome]], path: Path, device: str) -> None:
    """Draw time and speed-up of each dtype against P into one picture."""
    from matplotlib.figure import Figure

    series = {
        outcomes[0].record.case.dtype: derive.rows(one.record for one in outcomes)
        for outcomes in groups
    }
    record = next(one.record for outcomes in groups for one in outcomes if one.record.seconds)
    with style.styled():
        figure = Figure(figsize=(10, 4.8), layout="constrained")
        for axes, kind in zip(figure.subplots(1, 2), (plots.TIMES, plots.SPEEDUPS), strict=True):
            plots.draw_scaling(axes, series, kind)
            axes.legend()
        text = title(record.case, device).partition(" on ")[2]
        machine = "" if record.device is None else record.device.name
        figure.suptitle(
            f"Strong scaling of one transformer block, AllGather-KV, forward\n{text}\n{machine}",
            fontsize=10,
        )
        figure.savefig(path, dpi=150)


def file_name(setting: Setting, number: int) -> str:
    """Return the name of a file; the first dtype has the plain name, others add theirs."""
    suffix = f"_{setting.case.dtype}" if number else ""
    return f"strong_scaling_sp_{_kind(setting.device)}_p{setting.case.ranks}{suffix}.json"


def _kind(device: str) -> str:
    return "gpu" if device == "cuda" else device


if __name__ == "__main__":
    launching.main(main)
