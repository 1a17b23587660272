"""The scaling experiment: one transformer block, its sequence split over P ranks, K and V gathered, checked and timed.

For each P the ranks run in a job of their own. The output is first compared with a single device's; a wrong
one is a failure, not a row.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.case import DEVICES, ITEM_BYTES, LAYOUTS, PRESETS, Case, CaseError, complete
from benchmarks.launching import ROOT, Launch, numbers_of_ranks, run_case, tail
from benchmarks.report import Record, legend, rows, table
from benchmarks.verdict import Verdict
from sp_core.machine import busy_share

RESULTS = ROOT / "benchmarks" / "results"
SIZES = {
    "hidden": "model dim",
    "heads": "attention heads",
    "kv-heads": "key/value heads; as many as heads if not given",
    "head-dim": "dim of a head; hidden/heads if not given",
    "ffn": "feed-forward dim; 4 x hidden if not given",
    "seq": "tokens of the sequence",
    "batch": "sequences",
    "iterations": "timed steps",
    "warmup": "steps before them",
    "seed": "of weights and embedding",
}
BUSY_SHARE = 0.2
CUDA_PROBE = "import torch; print(torch.cuda.device_count() if torch.cuda.is_available() else 0)"


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(prog="python -m benchmarks.scaling", description=__doc__)
    made.add_argument("--preset", choices=tuple(PRESETS), default="small", help="sizes to begin with (default: %(default)s)")
    made.add_argument("--ranks", default="1,2,4", metavar="P,P,...", help="numbers of ranks (default: %(default)s)")
    for name, text in SIZES.items():
        made.add_argument(f"--{name}", type=int, metavar="N", help=text)
    made.add_argument("--causal", action=argparse.BooleanOptionalAction, default=None, help="tokens see only those before them")
    made.add_argument("--dtype", metavar="DTYPE,...", help=f"of {', '.join(ITEM_BYTES)}; several are run one after the other")
    made.add_argument("--layout", choices=LAYOUTS, help="which rank owns which tokens (default: contiguous)")
    made.add_argument("--device", choices=DEVICES, help="default: cpu")
    made.add_argument("--transport", metavar="NAME", help="how bytes travel; see `python -m sp_core doctor` (default: auto)")
    made.add_argument("--share-gpu", action="store_true", default=None, help="let several ranks use one GPU")
    made.add_argument("--out", type=Path, default=RESULTS, metavar="FOLDER", help="where files go (default: benchmarks/results)")
    made.add_argument(
        "--timeout", type=float, default=600.0, metavar="S", help="limit for each P, in seconds (default: %(default)g)"
    )
    made.add_argument(
        "--launcher",
        default="",
        metavar="COMMAND",
        help="instead of mpiexec, such as 'srun --ntasks={ranks}' (with that placeholder)",
    )
    return made


def cases(options: argparse.Namespace) -> list[list[Case]]:
    """The cases that the options ask for: for each dtype, one per number of ranks.

    Raises:
        CaseError: options that make no case, or that this machine cannot run.
    """
    names = [*(name.replace("-", "_") for name in SIZES), "causal", "dtype", "layout", "device", "transport", "share_gpu"]
    given = {name: value for name in names if (value := getattr(options, name)) is not None}
    sizes = complete({**PRESETS[options.preset], **given}, given)
    dtypes = [name.strip() for name in str(sizes.pop("dtype")).split(",")]
    counts = numbers_of_ranks(options.ranks, CaseError)
    made = [[Case(ranks=ranks, dtype=dtype, **sizes) for ranks in counts] for dtype in dtypes]
    if options.timeout <= 0:
        raise CaseError(f"timeout is {options.timeout:g} s; pass more than 0.")
    _check_machine(made[0], options.launcher)
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the experiment; 0 where every case came out right, 1 where one did not, 2 for options that cannot be run."""
    options = parser().parse_args(arguments)
    try:
        groups = cases(options)
    except CaseError as error:
        print(f"scaling: {error}", file=sys.stderr)
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    launch = Launch(options.launcher, options.timeout)
    done: list[list[Record]] = [[] for _ in groups]
    try:
        _run_all(groups, done, launch, options.out)
    except KeyboardInterrupt:
        print("\nscaling: interrupted; what is complete follows.", file=sys.stderr)
        _show(done, options.out)
        return 130
    _show(done, options.out)
    return 0 if all(record["status"] == "ok" for group in done for record in group) else 1


def _run_all(groups: list[list[Case]], done: list[list[Record]], launch: Launch, out: Path) -> None:
    """Run every case and write its file as soon as it is there."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console()
    _warn_of_load(console)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    for number, (group, records) in enumerate(zip(groups, done, strict=True)):
        for case in group:
            path = out / _file_name(case, number)
            path.unlink(missing_ok=True)  # an older result must not pass for this one
            with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
                record, output = run_case(case, launch, _follow(bar, case))
            path.write_text(json.dumps(record, indent=1, allow_nan=False) + "\n")
            records.append(record)
            _report(console, record, output)


def _follow(bar: Any, case: Case) -> Any:
    """Show in a progress bar what rank 0 says."""
    task = bar.add_task(f"P = {case.ranks}, {case.dtype}: starting", total=case.iterations)

    def told(news: dict[str, Any]) -> None:
        bar.update(task, description=f"P = {case.ranks}, {case.dtype}: {news['phase']}", completed=news["done"])

    return told


def _warn_of_load(console: Any) -> None:
    """Say that the machine is busy with something else; a timing cannot tell."""
    busy = busy_share()
    if busy > BUSY_SHARE:
        console.print(
            f"note: other work keeps {busy:.0%} of this machine busy; timings will suffer.", style="yellow", highlight=False
        )


def _report(console: Any, record: Record, output: str) -> None:
    """One line on how a case came out, and what it printed if it failed."""
    case, status = record["case"], record["status"]
    head = f"P = {case['ranks']}, {case['dtype']}: "
    if "check" in record:
        word, style = ("correct. ", "") if status == "ok" else ("WRONG. ", "red")
        console.print(head + word + str(Verdict(**record["check"])), style=style, highlight=False, soft_wrap=True)
    else:
        console.print(f"{head}{status.upper()}: {record['reason']}", style="red", highlight=False, soft_wrap=True)
        console.print(tail(output), highlight=False, markup=False, soft_wrap=True)


def _show(done: list[list[Record]], out: Path) -> None:
    """The tables, the plot, and where the files are."""
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else 150)
    shown = [records for records in done if records]
    for records in shown:
        console.print(table(records))
    if any(rows(records) for records in shown):
        from benchmarks.plot import plot

        console.print(legend([record for records in shown for record in records]), style="dim", highlight=False, soft_wrap=True)
        path = out / f"strong_scaling_sp_{_kind(shown[0][0]['case']['device'])}.png"
        plot(shown, path)
    console.print(f"files: {out}", highlight=False, soft_wrap=True)


def _file_name(case: Case, number: int) -> str:
    """The first dtype has the plain name, others add theirs."""
    suffix = f"_{case.dtype}" if number else ""
    return f"strong_scaling_sp_{_kind(case.device)}_p{case.ranks}{suffix}.json"


def _kind(device: str) -> str:
    return "gpu" if device == "cuda" else device


def _check_machine(group: list[Case], launcher: str) -> None:
    """Raise what this machine cannot do, before anything is launched."""
    case = max(group, key=lambda case: case.ranks)
    if launcher and "{ranks}" not in launcher:
        raise CaseError(f"--launcher {launcher!r} does not say where the number of ranks goes; write {{ranks}} in it.")
    program = launcher.split()[0] if launcher else "mpiexec"
    if shutil.which(program) is None and shutil.which(program, path=str(Path(sys.executable).parent)) is None:
        raise CaseError(f"no {program} on the PATH or beside {sys.executable}. Install one: pip install mpich")
    if case.transport != "auto":
        _check_transport(case)
    if case.device == "cuda":
        _check_cuda(case)


def _check_transport(case: Case) -> None:
    from sp_core.transport import NAMES

    if case.transport not in NAMES[case.device]:
        raise CaseError(f"transport {case.transport!r} on {case.device}; pass auto or one of {', '.join(NAMES[case.device])}.")


def _check_cuda(case: Case) -> None:
    """Ask a process of its own for the GPUs: importing torch here would slow every other run."""
    answer = subprocess.run([sys.executable, "-c", CUDA_PROBE], capture_output=True, text=True, timeout=120, check=False)
    count = int(answer.stdout) if answer.returncode == 0 else 0
    if count == 0:
        raise CaseError(
            "--device cuda, but torch sees no CUDA device here. Use --device cpu, or a torch with CUDA on a machine with a GPU."
        )
    if case.ranks > count and not case.share_gpu:
        raise CaseError(f"{case.ranks} ranks, but {count} GPUs. Pass fewer --ranks, or --share-gpu to let several ranks use one.")


if __name__ == "__main__":
    raise SystemExit(main())
