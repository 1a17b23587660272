"""Train a small LLaMA on every scheme and mesh, and compare each run with that of one rank: `nox -s train`.

Exit code: 0 if every mesh has learned what one rank has, 1 if one has not or a launch failed, 2 for options that cannot be run.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.launching import ROOT, Launch, commit, failure, numbers_of_ranks, told, watch
from benchmarks.training.alone import CURVE, MODEL
from benchmarks.training.faults import FAULTS
from benchmarks.training.judging import complaints, yardstick
from benchmarks.training.picture import draw
from benchmarks.training.runs import keep
from benchmarks.training.setting import DTYPES, Place, Setting, SettingError, chosen
from benchmarks.training.tables import show
from benchmarks.training.writing import continued

OUT = ROOT / "reports" / "train"
RESULTS = ROOT / "benchmarks" / "results"


def parser() -> argparse.ArgumentParser:
    """The command line."""
    usual = Setting()
    made = argparse.ArgumentParser(prog="python -m benchmarks.training", description=__doc__)
    made.add_argument("--ranks", default="2,3,4", metavar="P,P,...", help="beside one, which always runs (default: %(default)s)")
    made.add_argument("--only", default="", metavar="TEXT", help="meshes with this in their names, such as ring, dp2_tp2")
    made.add_argument("--dtype", choices=DTYPES, help="default: both")
    made.add_argument("--steps", type=int, default=usual.steps, metavar="N", help="default: %(default)s")
    made.add_argument(
        "--every", type=int, default=usual.every, metavar="N", help="steps between comparisons (default: %(default)s)"
    )
    made.add_argument("--seed", type=int, default=usual.seed, metavar="N", help="default: %(default)s")
    made.add_argument("--plant", choices=tuple(FAULTS), help="train with this fault on all meshes: then the exit code must be 1")
    made.add_argument("--resume", action="store_true", help="do what is missing in --out, from a run of the same setting")
    made.add_argument("--out", type=Path, default=OUT, metavar="FOLDER", help="default: reports/train")
    made.add_argument("--results", type=Path, default=RESULTS, metavar="FOLDER", help="for train.json and train.png")
    made.add_argument("--timeout", type=float, default=1800.0, metavar="S", help="limit of one launch (default: %(default)g)")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the session."""
    options = parser().parse_args(arguments)
    try:
        setting = Setting(steps=options.steps, every=options.every, seed=options.seed)
        places = chosen(numbers_of_ranks(options.ranks, SettingError, least=2), options.only)
        _prepare(options, setting)
    except SettingError as error:
        print(f"train: {error}", file=sys.stderr)
        return 2
    dtypes = (options.dtype,) if options.dtype else DTYPES
    start = time.monotonic()
    try:
        broken = _alone(setting, dtypes, options)
        records = [] if broken else _meshes(setting, dtypes, places, options)
    except KeyboardInterrupt:
        print(f"\ntrain: interrupted; what is done lies in {options.out}.", file=sys.stderr)
        return 128 + signal.SIGINT
    if broken:
        print("\n".join(f"train: one rank, {text}" for text in broken), file=sys.stderr)
        return 1
    curves = {dtype: json.loads((options.out / dtype / CURVE).read_text()) for dtype in dtypes}
    return _conclude(setting, curves, records, options, time.monotonic() - start)


def _conclude(setting: Setting, curves: dict[str, Any], records: list[Any], options: argparse.Namespace, seconds: float) -> int:
    """Judge, show, draw and keep everything, and let the trained model write."""
    wrong = [f"one rank, {dtype}: {text}" for dtype, curve in curves.items() for text in yardstick(curve)]
    found = [complaints(record, curves[record["dtype"]]) for record in records]
    show(setting, curves, records, found, seconds)
    print("".join(f"WRONG {text}\n" for text in wrong), end="")
    if not options.plant:
        options.results.mkdir(parents=True, exist_ok=True)
        kept = {"schema_version": 1, "commit": commit(), "setting": setting.as_dict(), "curves": curves, "meshes": records}
        keep(options.results / "train.json", kept)
        draw(curves, records, options.results / "train.png")
        model = options.out / list(curves)[-1] / MODEL
        print(f"\nThe model that one rank has trained is in {model}. On two ranks it writes:\n{continued(model)}")
    return int(any((wrong, *found)))


def _prepare(options: argparse.Namespace, setting: Setting) -> None:
    """An empty folder, or one with what was done in this setting."""
    marker, values = options.out / "setting.json", json.loads(json.dumps(setting.as_dict()))
    if options.resume:
        if not marker.exists() or json.loads(marker.read_text()) != values:
            raise SettingError(f"{options.out} does not hold a run of this setting; leave --resume out.")
        return
    if options.out.exists() and any(options.out.iterdir()) and not marker.exists():
        raise SettingError(f"{options.out} holds something else than an earlier run; give another --out.")
    shutil.rmtree(options.out, ignore_errors=True)
    options.out.mkdir(parents=True)
    keep(marker, values)


def _alone(setting: Setting, dtypes: Sequence[str], options: argparse.Namespace) -> list[str]:
    """The runs of one rank, side by side, each by a rank of one launch; what went wrong."""
    missing = [dtype for dtype in dtypes if not (options.out / dtype / CURVE).exists()]
    for dtype in missing:
        shutil.rmtree(options.out / dtype, ignore_errors=True)
    job = {"ranks": len(missing), "dtypes": missing, "places": [], "fault": None}
    return _launch(job, setting, options, options.out / "alone") if missing else []


def _meshes(
    setting: Setting, dtypes: Sequence[str], places: dict[int, list[Place]], options: argparse.Namespace
) -> list[dict[str, Any]]:
    """The record of every mesh; a launch that dies is the reason in the records that are missing."""
    records = []
    for ranks, some in places.items():
        folder = options.out / (f"planted-{ranks}" if options.plant else f"ranks-{ranks}")
        if options.plant:
            shutil.rmtree(folder, ignore_errors=True)
        paths = {(dtype, place.name): folder / f"{dtype}-{place.name}.json" for dtype in dtypes for place in some}
        missing = [asdict(place) for place in some if not all(paths[dtype, place.name].exists() for dtype in dtypes)]
        job = {"ranks": ranks, "dtypes": list(dtypes), "places": missing, "fault": options.plant}
        died = _launch(job, setting, options, folder) if missing else []
        for (dtype, place), path in paths.items():
            lost = {"place": place, "ranks": ranks, "dtype": dtype, "reason": (died or ["it left no record"])[0]}
            records.append(json.loads(path.read_text()) if path.exists() else lost)
    return records


def _launch(job: dict[str, Any], setting: Setting, options: argparse.Namespace, folder: Path) -> list[str]:
    """Run a job; nothing, or the reason why it failed."""
    from rich.console import Console

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "job.json").write_text(json.dumps({**job, "setting": setting.as_dict(), "out": str(options.out.resolve())}))
    command = Launch(timeout=options.timeout).command(job["ranks"], "benchmarks.training.worker", str(folder.resolve()))
    with Console().status(f"{job['ranks']} ranks: starting") as status:
        code, output = watch(
            command, folder, options.timeout, lambda news: status.update(f"{job['ranks']} ranks: {news['phase']} {news['done']}")
        )
    doing = (told(folder) or {}).get("phase", "starting")
    return [] if code == 0 else [str(failure(code, output, options.timeout, doing)["reason"])]


if __name__ == "__main__":
    raise SystemExit(main())
