"""The scaling experiment: a transformer block, its sequence split over P ranks, checked and timed.

For each P the ranks run in a job of their own. The output, and with `--backward` the gradient of
the input, are first compared with a single device's. A wrong result is a failure, not a row.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from benchmarks import launching
from benchmarks.cases.setting import (
    HYBRID,
    BlockSetting as Setting,
    Setting as Run,
    Verdict,
    mesh_of,
)
from benchmarks.checkout import commit
from benchmarks.launching import (
    REPORTS,
    Launch,
    Options,
    UsageError,
    about,
    numbers_of_ranks,
    writable,
    write_json,
)
from benchmarks.record import warn_of_load
from benchmarks.records import (
    MAX_SAMPLES,
    Case,
    Record,
    make_case,
    parse as read_record,
    reason as reason_of,
)
from benchmarks.reporting import derive, page, plots, tables

SCHEMES = ("allgather_kv", "ring", "ulysses", HYBRID)
DTYPES = ("float32", "bfloat16", "float16")  # float64 is what these are judged against
SHARDINGS = ("contiguous", "zigzag", "striped")
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
    "trace": {"hidden": 256, "heads": 8, "seq": 2048, "batch": 1, "iterations": 1, "warmup": 0},
}
"""The options of each preset; sizes that it lacks follow from the others."""

SHAPE = ("batch", "seq", "hidden", "heads", "kv_heads", "head_dim", "ffn")
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
    "time: median over the iterations, last rank's end minus first rank's start. speed-up: against "
    "the fewest ranks; each rank uses 1 CPU thread. comm share: part of the step spent waiting for "
    "communication and for other ranks. AllGather: of all K and V, by itself. GB/s: bytes a rank "
    "receives / its time. peak memory: live tensors of the rank that has most. max error: against "
    "a single device in plain torch; 0 is bit for bit."
)
OPTIONS: Options = {
    "--preset": about(
        choices=tuple(PRESETS), default="small", help="sizes to begin with (default: %(default)s)"
    ),
    **launching.starting(ranks="1,2,4", timeout=600.0),
    **{
        f"--{name.replace('_', '-')}": about(type=int, metavar="N", help=text)
        for name, text in SIZES.items()
    },
    "--scheme": about(choices=SCHEMES, default=SCHEMES[0], help="default: %(default)s"),
    "--backward": about(
        action=argparse.BooleanOptionalAction, default=False, help="forward and backward"
    ),
    "--sharding --layout": about(
        choices=SHARDINGS,
        default=SHARDINGS[0],
        help="which rank owns which tokens (default: %(default)s)",
    ),
    "--mask": about(choices=("full", "causal"), default="full", help="default: %(default)s"),
    "--causal": about(action="store_const", dest="mask", const="causal", help="as --mask causal"),
    "--no-causal": about(action="store_const", dest="mask", const="full", help="as --mask full"),
    "--dtype": about(
        metavar="DTYPE,...", help=f"of {', '.join(DTYPES)}; several are run one after the other"
    ),
    "--transport": about(
        default="auto",
        metavar="NAME",
        help="how bytes travel; see `python -m sp_core doctor` (default: auto)",
    ),
    "--out": about(
        type=Path,
        default=REPORTS / "scaling",
        metavar="FOLDER",
        help="where files go, in place of older ones (default: reports/scaling)",
    ),
}


@dataclass(frozen=True)
class Outcome:
    """The result of one P: the record, the verdict on the output, and the AllGather of K and V."""

    record: Record
    check: dict[str, Any] | None = None
    all_gather: dict[str, Any] | None = None


def settings(options: argparse.Namespace) -> list[Setting]:
    """Return a setting for each launch: for each dtype, one per number of ranks.

    Raises:
        UsageError: the options make no case, or this machine cannot run them.
    """
    from sp_core.transport import NAMES  # it is slow to import

    transports = ("auto", *NAMES.get(options.device, ()))
    if options.transport not in transports:
        text = f"transport {options.transport!r} on {options.device}; pass one of "
        raise UsageError(text + f"{', '.join(transports)}.")
    asked = ((name, getattr(options, name)) for name in (*SIZES, "dtype"))
    given = {name: value for name, value in asked if value is not None}
    sizes = {"dtype": DTYPES[0], "seed": 0, **PRESETS[options.preset], **given}
    dtypes = [name.strip() for name in str(sizes.pop("dtype")).split(",")]
    shape = shape_of(sizes, given)
    wrong = [dtype for dtype in dtypes if dtype not in DTYPES]
    if wrong:
        raise UsageError(f"dtype is {wrong[0]!r}; pass one of {', '.join(DTYPES)}.")
    counts = numbers_of_ranks(options.ranks)
    check_machine(options, max(counts))
    how: dict[str, Any] = {"device": options.device, "share_gpu": options.share_gpu}
    how |= {name: sizes[name] for name in ("iterations", "warmup", "seed")}
    what = {"layout": options.sharding, "mask": options.mask, "detail": "block"}
    what["direction"] = "both" if options.backward else "forward"

    def case(ranks: int, dtype: str) -> Case:
        mesh = mesh_of(options.scheme, ranks)
        if mesh is None:
            raise UsageError(f"{ranks} ranks make no {HYBRID} mesh; pass such as --ranks 1,4,6.")
        return make_case(
            "layers", options.scheme, mesh, shape, options.transport, **what, dtype=dtype
        )

    return [Setting(case(ranks, dtype), **how) for dtype in dtypes for ranks in counts]


def shape_of(sizes: dict[str, Any], given: dict[str, Any]) -> dict[str, int]:
    """Return all sizes of a block (`SHAPE`), computing the missing ones from the others.

    Args:
        sizes: the preset's values, replaced by the user's where there are any.
        given: only the user's values. If they have head_dim and not hidden, hidden follows.

    Raises:
        UsageError: the sizes do not fit each other.
    """
    if "head_dim" in given and "hidden" not in given:
        sizes["hidden"] = sizes["heads"] * given["head_dim"]
    sizes = {"kv_heads": sizes["heads"], "ffn": 4 * sizes["hidden"], **sizes}
    for name, value in sizes.items():
        if value < (name not in ("warmup", "seed")):
            raise UsageError(f"{name} is {value}; pass more.")
    if sizes["iterations"] > MAX_SAMPLES:
        raise UsageError(f"iterations is {sizes['iterations']}; pass at most {MAX_SAMPLES}.")
    hidden, heads, kv_heads = sizes["hidden"], sizes["heads"], sizes["kv_heads"]
    sizes.setdefault("head_dim", hidden // heads)
    if hidden != heads * sizes["head_dim"] or heads % kv_heads:
        raise UsageError(
            f"hidden is {hidden}, {heads} heads of {sizes['head_dim']} make "
            f"{heads * sizes['head_dim']}; {kv_heads} key/value heads. --hidden must be --heads "
            "times --head-dim, and --heads a multiple of --kv-heads: leave one out, or mend it."
        )
    return {name: sizes[name] for name in SHAPE}


def check_machine(options: argparse.Namespace, ranks: int) -> None:
    """Check that there are GPUs for all ranks, before anything is launched.

    Ranks that a `--launcher` starts may be on several nodes; they check their own node.

    Raises:
        UsageError: there are fewer GPUs than ranks, and ranks may not share them.
    """
    if options.device == "cpu" or options.launcher:
        return
    from sp_core.transport import count_devices  # it is slow to import

    gpus = count_devices(options.device)
    if ranks > gpus and not (options.share_gpu and gpus):
        raise UsageError(
            f"{ranks} ranks, but torch sees {gpus} GPUs here. Pass fewer --ranks, --share-gpu to "
            "let several ranks use one, or --device cpu."
        )


def kind(device: str) -> str:
    """Return "cpu" or "gpu", the word for a kind of device in the names of files."""
    return "cpu" if device == "cpu" else "gpu"


@launching.program("scaling", __doc__, OPTIONS)
def main(options: argparse.Namespace) -> int:
    """Run the experiment. Return 0 if every case is right, 1 if one is not, 2 for bad options."""
    launch, every, done = Launch(options.launcher, options.timeout), settings(options), []
    paths = [options.out / file_name(one, every[0].case.dtype) for one in every]
    stem = f"strong_scaling_sp_{kind(options.device)}"
    plot = options.out / f"{stem}.png"
    writable(paths[0])
    warn_of_load()
    code = launching.INTERRUPTED
    for path in (*options.out.glob(f"{stem}_p*.json"), plot):
        path.unlink(missing_ok=True)  # an older result must not pass for one of this run
    try:
        for setting, path in zip(every, paths, strict=True):
            done.append(run_once(setting, launch))
            write_json(path, msgspec.to_builtins(done[-1]))
        code = int(not all(outcome.record.seconds for outcome in done))
    except KeyboardInterrupt:
        print("\nscaling: interrupted; what is complete follows.", file=sys.stderr)
    show(done, options, plot)
    return code


def run_once(setting: Setting, launch: Launch) -> Outcome:
    """Run the launch of one P, print how it ended, and return the outcome."""
    ranks, name = setting.case.ranks, f"P = {setting.case.ranks}, {setting.case.dtype}"
    job = (ranks, "benchmarks.cases.block:measure", setting, launch)
    found = launching.run(*job, tables.following(name))
    if "check" in found:
        word, style = ("correct", "") if found["status"] == "ok" else ("WRONG", "red")
        tables.say(f"{name}: {word}. {Verdict(**found['check'])}", style)
    else:
        text = f"{found['status'].upper()}: {found['reason']}\n{found['output']}"
        tables.say(f"{name}: {text}", "red")
    return outcome_of(setting, found)


def outcome_of(setting: Setting, found: dict[str, Any]) -> Outcome:
    """Return the outcome of a launch; `found` is the record that `launching.run` returned."""
    run = Run(run_id=datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ"), commit=commit())
    check, status, reason = found.get("check"), found["status"], found.get("reason")
    if status == "ok" and found["parts"]["timing"]["skew_limited"]:
        status = "skew_limited"
    if status == "wrong":
        reason = str(Verdict(**found["check"]))
    note = {"status": status, "reason": None if reason is None else reason_of(reason)}
    made = run.record(setting.case, **found.get("parts", {}), **note)
    return Outcome(read_record(msgspec.json.encode(made)), check, found.get("all_gather"))


def table(outcomes: list[Outcome], device: str) -> tables.Table:
    """Return the table of one dtype: a line for each P, without those whose result is wrong."""
    rows = {row.ranks: row for row in derive.rows(outcome.record for outcome in outcomes)}
    right = {one.record.case.ranks: one for one in outcomes if one.record.status != "wrong"}
    lines = (cells(one, rows.get(ranks)) for ranks, one in sorted(right.items()))
    return tables.make(title(outcomes[0].record.case, device), COLUMNS, lines)


def cells(outcome: Outcome, row: derive.Row | None) -> tuple[str, ...]:
    """Return the cells of one line, in the order of COLUMNS."""
    ranks, gather = str(outcome.record.case.ranks), outcome.all_gather
    if row is None:
        return (ranks, *[tables.DASH] * (len(COLUMNS) - 2), outcome.record.status)
    return (
        ranks,
        tables.milliseconds(row.seconds),
        f"{row.speedup:.2f}",
        f"{row.efficiency:.0%}",
        tables.count(row.tokens_per_s),
        tables.percent(row.share),
        tables.DASH if gather is None else f"{gather['ms']:.3f}",
        tables.DASH if gather is None else f"{gather['gb_per_s']:.2f}",
        tables.size(row.peak_bytes),
        f"{(outcome.check or {}).get('max_abs_error', 0.0):.1e}",
        ", ".join(row.flags),
    )


def title(case: Case, device: str) -> str:
    """Describe a case in one line."""
    shape = case.shape
    shared = shape["kv_heads"] != shape["heads"]
    grouped = f" ({shape['kv_heads']} key/value heads)" if shared else ""
    return (
        f"{case.dtype} on {device}: hidden {shape['hidden']}, {shape['heads']} heads of "
        f"{shape['head_dim']}{grouped}, feed-forward {shape['ffn']}, sequence {shape['seq']}, "
        f"batch {shape['batch']}, {'' if case.mask == 'causal' else 'not '}causal, {case.layout}; "
        f"{step(case)}"
    )


def step(case: Case) -> str:
    """Return the scheme and the direction of a case as text."""
    return f"{case.scheme}, {plots.DIRECTIONS.get(str(case.direction), case.direction)}"


def show(done: Sequence[Outcome], options: argparse.Namespace, plot: Path) -> None:
    """Print the tables and where the files are, and draw the plot."""
    for _, outcomes in derive.grouped(done, lambda one: DTYPES.index(one.record.case.dtype)):
        tables.show(table(outcomes, options.device))
    timed = [outcome.record for outcome in done if outcome.record.seconds]
    if timed:
        tables.say(LEGEND, "dim")
        draw(timed, plot, options.device)
    tables.say(f"files: {options.out}")


def draw(records: Sequence[Record], path: Path, device: str) -> None:
    """Draw time and speed-up of each dtype against P into one picture."""
    from matplotlib.figure import Figure

    by_dtype = derive.grouped(records, lambda record: record.case.dtype)
    series = {dtype: derive.rows(found) for dtype, found in by_dtype}
    with page.styled():
        figure = Figure(figsize=(10, 4.8), layout="constrained")
        for axes, kind in zip(figure.subplots(1, 2), (plots.TIMES, plots.SPEEDUPS), strict=True):
            plots.draw_scaling(axes, series, kind)
            axes.legend()
        text = title(records[0].case, device).partition(" on ")[2]
        machine = "" if records[0].device is None else records[0].device.name
        figure.suptitle(f"Strong scaling of one transformer block\n{text}\n{machine}", fontsize=10)
        figure.savefig(path, dpi=150)


def file_name(setting: Setting, first: str) -> str:
    """Return the name of a launch's file; a dtype other than `first` is added to it."""
    case = setting.case
    suffix = "" if case.dtype == first else f"_{case.dtype}"
    return f"strong_scaling_sp_{kind(setting.device)}_p{case.ranks}{suffix}.json"
