"""Train a small LLaMA on every scheme and mesh, and compare each run with that of one rank: `nox -s train`.

Exit code: 0 if every mesh has learned what one rank has, 1 if one has not or a launch failed, 2 for
options that cannot be run.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from benchmarks import launching
from benchmarks.contests.contest import INTERRUPTED, RESULTS, refused
from benchmarks.launching import (
    ROOT,
    Launch,
    Options,
    UsageError,
    about,
    commit,
    numbers_of_ranks,
    parse,
    writable,
)
from benchmarks.reporting import terminal
from benchmarks.training.judging import complaints, draw, table, yardstick
from benchmarks.training.runs import CURVE, MODEL, keep
from benchmarks.training.setting import DTYPES, FAULTS, Place, Setting, chosen

PROMPT = "def "
SECONDS = 120  # for the text that the trained model writes
USUAL = Setting()
OPTIONS: Options = {
    "--ranks": about(
        default="2,3,4",
        metavar="P,P,...",
        help="beside one, which always runs (default: %(default)s)",
    ),
    "--only": about(
        default="", metavar="TEXT", help="meshes with this in their names, such as ring, dp2_tp2"
    ),
    "--dtype": about(choices=DTYPES, help="default: both"),
    "--steps": about(type=int, default=USUAL.steps, metavar="N", help="default: %(default)s"),
    "--every": about(
        type=int, default=USUAL.every, metavar="N", help="steps between comparisons (%(default)s)"
    ),
    "--seed": about(type=int, default=USUAL.seed, metavar="N", help="default: %(default)s"),
    "--plant": about(
        choices=tuple(FAULTS),
        help="train with this fault on all meshes: then the exit code must be 1",
    ),
    "--resume": about(
        action="store_true", help="do the rest of --out, from a run of the same setting"
    ),
    "--out": about(
        type=Path,
        default=ROOT / "reports" / "train",
        metavar="FOLDER",
        help="default: reports/train",
    ),
    "--results": about(
        type=Path, default=RESULTS, metavar="FOLDER", help="for train.json and train.png"
    ),
    "--timeout": about(
        type=float, default=1800.0, metavar="S", help="limit of one launch (default: %(default)g)"
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the session; return the exit code."""
    options = parse("train", __doc__, OPTIONS, arguments)
    try:
        setting = Setting(steps=options.steps, every=options.every, seed=options.seed)
        places = chosen(numbers_of_ranks(options.ranks, least=2), options.only)
        prepare(options, setting)
        writable(options.results / "train.json")
    except UsageError as error:
        return refused("train", error)
    dtypes = (options.dtype,) if options.dtype else DTYPES
    start = time.monotonic()
    try:
        missing = [dtype for dtype in dtypes if not (options.out / dtype / CURVE).exists()]
        for dtype in missing:
            shutil.rmtree(options.out / dtype, ignore_errors=True)
        broken = (
            run(len(missing), missing, [], setting, options, options.out / "alone")
            if missing
            else ""
        )
        if broken:
            print(f"train: one rank, {broken}", file=sys.stderr)
            return 1
        records = on_meshes(setting, dtypes, places, options)
    except KeyboardInterrupt:
        print(f"\ntrain: interrupted; what is done lies in {options.out}.", file=sys.stderr)
        return INTERRUPTED
    curves = {dtype: json.loads((options.out / dtype / CURVE).read_text()) for dtype in dtypes}
    return conclude(setting, curves, records, options, time.monotonic() - start)


def prepare(options: argparse.Namespace, setting: Setting) -> None:
    """Make an empty folder, or keep one that an earlier run of this setting has left.

    Raises:
        UsageError: the folder holds something else.
    """
    marker, values = options.out / "setting.json", json.loads(msgspec.json.encode(setting))
    if options.resume:
        if not marker.exists() or json.loads(marker.read_text()) != values:
            raise UsageError(
                f"{options.out} does not hold a run of this setting; leave --resume out."
            )
        return
    if options.out.exists() and any(options.out.iterdir()) and not marker.exists():
        raise UsageError(
            f"{options.out} holds something else than an earlier run; give another --out."
        )
    shutil.rmtree(options.out, ignore_errors=True)
    keep(writable(marker), values)


def on_meshes(
    setting: Setting,
    dtypes: Sequence[str],
    places: dict[int, list[Place]],
    options: argparse.Namespace,
) -> list[dict[str, Any]]:
    """Return the record of every mesh; a launch that dies is the reason in the records that are missing."""
    records = []
    for ranks, some in places.items():
        folder = options.out / (f"planted-{ranks}" if options.plant else f"ranks-{ranks}")
        if options.plant:
            shutil.rmtree(folder, ignore_errors=True)
        paths = {
            (dtype, place.name): folder / f"{dtype}-{place.name}.json"
            for dtype in dtypes
            for place in some
        }
        missing = [
            place
            for place in some
            if not all(paths[dtype, place.name].exists() for dtype in dtypes)
        ]
        died = run(ranks, dtypes, missing, setting, options, folder) if missing else ""
        for (dtype, place), path in paths.items():
            lost = {
                "place": place,
                "ranks": ranks,
                "dtype": dtype,
                "reason": died or "it left no record",
            }
            records.append(json.loads(path.read_text()) if path.exists() else lost)
    return records


def run(
    ranks: int,
    dtypes: Sequence[str],
    places: list[Place],
    setting: Setting,
    options: argparse.Namespace,
    folder: Path,
) -> str:
    """Run a job; return the reason why it failed, or nothing."""
    about = {
        "out": str(options.out.resolve()),
        "folder": str(folder.resolve()),
        "fault": options.plant if places else None,
    }
    job = {"dtypes": dtypes, "places": places, "setting": setting, **about}
    with terminal.console().status(f"{ranks} ranks: starting") as status:
        launch = Launch(timeout=options.timeout)
        hear = lambda news: status.update(f"{ranks} ranks: {news['phase']} {news['done']}")  # noqa: E731
        found = launching.run(ranks, "benchmarks.training.runs:measure", job, launch, hear)
    return "" if found["status"] == "ok" else str(found["reason"])


def conclude(
    setting: Setting,
    curves: dict[str, Any],
    records: list[Any],
    options: argparse.Namespace,
    seconds: float,
) -> int:
    """Judge, show, draw and keep everything, and let the trained model write; return the exit code."""
    wrong = [
        f"one rank, {dtype}: {text}" for dtype, curve in curves.items() for text in yardstick(curve)
    ]
    found = [complaints(record, curves[record["dtype"]]) for record in records]
    names = [f"P = {record['ranks']}, {record['place']}, {record['dtype']}" for record in records]
    wrong += [f"{name}: {text}" for name, texts in zip(names, found, strict=True) for text in texts]
    screen = terminal.console()
    terminal.show(screen, table(curves, records, found))
    for text in wrong:
        terminal.say(screen, f"WRONG {text}", "red")
    for dtype, curve in curves.items():
        spread = max(abs(one[-1] - curve["losses"][-1]) for one in curve["perturbed"])
        first, last = curve["losses"][0], curve["losses"][-1]
        text = f"one rank, {dtype}: loss {first:.3f} to {last:.3f}; from weights one ulp away the last loss differs by {spread:.1e}"
        terminal.say(screen, text)
    right = sum(not texts for texts in found)
    text = f"{right} of {len(records)} runs over several ranks have learned what one rank has; {setting.steps} steps, {seconds:.0f} s"
    terminal.say(screen, text)
    if not options.plant:
        kept = {
            "schema_version": 1,
            "commit": commit(),
            "setting": msgspec.structs.asdict(setting),
            "curves": curves,
            "meshes": records,
        }
        keep(options.results / "train.json", kept)
        draw(curves, records, options.results / "train.png")
        model = options.out / list(curves)[-1] / MODEL
        print(
            f"\nThe model that one rank has trained is in {model}. On two ranks it writes:\n{continued(model)}"
        )
    return int(bool(wrong))


def continued(model: Path) -> str:
    """Return the command that lets a model continue a prompt on two ranks, and its answer."""
    words = [
        "--model",
        str(model),
        "--prompt",
        PROMPT,
        "--max-tokens",
        "120",
        "--temperature",
        "0.5",
        "--tp",
        "2",
    ]
    shown = " ".join(repr(word) if " " in word else word for word in words)
    command = [sys.executable, "-m", "sp_core", "generate", *words, "--timeout", str(SECONDS)]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=2 * SECONDS, check=True)
    return f"sp-core generate {shown}\n{answer.stdout.decode(errors='replace').rstrip()}"


if __name__ == "__main__":
    launching.main(main)
