"""Search at length: rounds of a test session, each with its own seed; then one judgement.

    PYTHONPATH=tests python -m oracle.explore draw --seed 7 --share 0.85            ranks as
    threads, several rounds at a time PYTHONPATH=tests python -m oracle.explore draw --seed 7
    --share 0.15 --ranks 8 --part 1  under mpiexec PYTHONPATH=tests python -m oracle.explore judge
    --seed 7

Each round leaves a JSON file with what it has drawn. The judgement adds them up: enough examples
were run, every pair of features that can come together did so often enough, everything was run by
every algorithm over every transport, and no error came near its bound.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from oracle.attention_features import points, universe
from oracle.ways import to_be_called, to_be_taken
from sp_core.testing.session import Tally, larger

EXAMPLES = 32_000
LEAST_HITS = 5
"""Of each pair of features, in `EXAMPLES` examples; in proportion for other numbers."""
MAX_ERROR_RATIO = 0.5
PER_TEST = 150
"""Examples of each test in a round, where it does not name its own number."""
ROUND_SECONDS = 1500.0
POLL_SECONDS = 0.2
LISTED = 12


class Round:
    """One test session under way.

    Args:
        folder: where to leave the JSON file and the output.
        ranks: of the launch; 0 for ranks that are threads.
        seed: of its examples.
    """

    def __init__(self, folder: Path, ranks: int, seed: int) -> None:
        self.file, self.log = (folder / f"{ranks}-ranks-{seed}.{kind}" for kind in ("json", "txt"))
        self.began = time.monotonic()
        suite = [
            sys.executable,
            "-m",
            "pytest",
            "-m",
            "explore",
            "-p",
            "no:cacheprovider",
            f"--hypothesis-seed={seed}",
        ]
        suite += [
            f"--sp-tally={self.file}",
            "-x",
            *(["--only-mpi", "--sp-expect-ranks", str(ranks)] if ranks else []),
        ]
        launch = [
            sys.executable,
            "-m",
            "sp_core.testing.launch",
            "-n",
            str(ranks),
            "--timeout",
            str(ROUND_SECONDS),
            "--",
        ]
        chosen = {
            "SP_PROFILE": "explore",
            "SP_EXAMPLES": os.environ.get("SP_EXAMPLES", str(PER_TEST)),
            "OMP_NUM_THREADS": "1",
        }
        with self.log.open("w") as log:
            command = [*(launch if ranks else []), *suite]
            self.process = subprocess.Popen(
                command, env=os.environ | chosen, stdout=log, stderr=subprocess.STDOUT
            )

    def ended(self) -> bool:
        """Whether it has; one that takes too long is ended here."""
        if time.monotonic() - self.began > ROUND_SECONDS + 60:
            self.end()
        return self.process.poll() is not None

    def tally(self) -> Tally:
        """What it has drawn.

        Raises:
            SystemExit: it failed; its output says which test, and how to run it again.
        """
        if self.process.returncode or not self.file.exists():
            print(self.log.read_text(), flush=True)
            sys.exit(
                f"this round has failed (exit code {self.process.returncode}); "
                f"its output is above and in {self.log}"
            )
        return Tally.parse(self.file.read_text())

    def end(self) -> None:
        """End it, and with it what it has started."""
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def draw(folder: Path, wanted: int, ranks: int, seed: int, jobs: int) -> Tally:
    """Run rounds until they have run enough examples.

    Args:
        folder: for the files of the rounds.
        wanted: examples.
        ranks: of each launch; 0 for ranks that are threads.
        seed: of the first round; each further one has the next number.
        jobs: rounds at a time.

    Raises:
        SystemExit: a round failed.
    """
    total, usual = Tally(), 0
    under_way: list[Round] = []
    try:
        while total.examples < wanted or under_way:
            while len(under_way) < jobs and total.examples + usual * len(under_way) < wanted:
                under_way.append(Round(folder, ranks, seed))
                seed += 1
            time.sleep(POLL_SECONDS)
            for ended in [one for one in under_way if one.ended()]:
                under_way.remove(ended)
                tally = ended.tally()
                usual = tally.examples
                total.merge(tally)
                print(
                    f"  {ended.file.stem}: {usual} examples, "
                    f"{time.monotonic() - ended.began:.0f} s; now {total.examples}",
                    flush=True,
                )
    finally:
        for left in under_way:
            left.end()
    return total


def judge(total: Tally, wanted: int) -> list[str]:
    """What is wrong with a search that has come to its end.

    Args:
        total: what it has drawn.
        wanted: examples.

    Returns:
        A line for each fault; none where all is well.
    """
    least = LEAST_HITS * wanted // EXAMPLES
    possible, impossible = universe()
    ways = [*to_be_taken(), *to_be_called()]
    faults = (
        []
        if total.examples >= wanted
        else [f"{total.examples} examples were run, {wanted} were wanted"]
    )
    faults += [
        f"{' & '.join(pair)}: {total.pairs[pair]} examples, {least} are needed"
        for pair in possible
        if total.pairs[pair] < least
    ]
    faults += [
        f"{name}: {total.features[name]} examples, {least} are needed"
        for name in points()
        if total.features[name] < least
    ]
    faults += (
        [f"{name}: never drawn" for name in ways if not total.features[name]]
        if wanted >= EXAMPLES
        else []
    )
    for reason, pairs in impossible.items():
        faults += [
            f"{' & '.join(pair)} was drawn, but {reason}" for pair in pairs if total.pairs[pair]
        ]
    known = {pair for pairs in (possible, *impossible.values()) for pair in pairs}
    faults += [
        f"{' & '.join(pair)} was drawn, but is no pair of known values"
        for pair in total.pairs
        if pair not in known
    ]
    faults += [
        f"error over bound {ratio:.3g} in {name}, above {MAX_ERROR_RATIO}"
        for name, ratio in total.ratios.items()
        if not ratio <= MAX_ERROR_RATIO
    ]
    return faults


def told(total: Tally, seed: int) -> Iterable[str]:
    """The counts of a search, a line each."""
    possible, impossible = universe()
    yield f"{total.examples} examples (+ {total.raw} raw), seed {seed}"
    yield f"by ranks: {dict(sorted(total.sizes.items()))}"
    yield f"by scheme: {total.schemes()}, the rest are laws between results"
    by_hits = sorted(possible, key=lambda pair: total.pairs[pair])
    yield f"pairs of features: {len(possible)} possible; those drawn least often:"
    yield from (f"  {total.pairs[pair]:5d}  {' & '.join(pair)}" for pair in by_hits[:LISTED])
    yield f"not possible: {sum(map(len, impossible.values()))}"
    yield from (f"  {len(pairs):5d}  {reason}" for reason, pairs in impossible.items())
    rarest = min(points(), key=lambda name: total.features[name])
    count = total.features[rarest]
    yield f"of {len(points())} remainders and grids the rarest is {rarest}: {count}"
    drawn = [total.features[name] for name in (*to_be_taken(), *to_be_called())]
    least = f"the rarest was drawn {min(drawn)} times"
    yield f"of {len(drawn)} algorithms, each over every transport, {least}"
    worst = max(total.ratios, key=lambda name: larger(total.ratios[name], 0.0), default="")
    yield f"worst error over bound: {total.ratios.get(worst, 0.0):.3g} in {worst}"


def _judged(folder: Path, wanted: int, seed: int) -> int:
    total = Tally()
    for file in sorted(folder.glob("*.json")):
        total.merge(Tally.parse(file.read_text()))
    print("\n".join(told(total, seed)))
    faults = judge(total, wanted)
    print("\n".join([f"{len(faults)} faults", *faults[:100]]) if faults else "no fault")
    return 1 if faults else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="PYTHONPATH=tests python -m oracle.explore", description=__doc__
    )
    parser.add_argument("step", choices=("draw", "judge"))
    parser.add_argument(
        "--into", type=Path, default=Path("reports/explore"), help="folder of the rounds' files"
    )
    parser.add_argument(
        "--examples", type=int, default=EXAMPLES, help=f"of the whole search (default: {EXAMPLES})"
    )
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument(
        "--share", type=float, default=1.0, help="part of the examples that this call draws"
    )
    parser.add_argument(
        "--ranks",
        type=int,
        default=0,
        help="under mpiexec with this many ranks (default: ranks are threads)",
    )
    parser.add_argument(
        "--part",
        type=int,
        default=0,
        help="a number for each call with one seed; the first one empties the folder",
    )
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Returns:
        The exit code.
    """
    options = _parser().parse_args(arguments)
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM)
    )  # so that what was started is ended
    if options.step == "judge":
        return _judged(options.into, options.examples, options.seed)
    if options.part == 0:
        shutil.rmtree(options.into, ignore_errors=True)
    options.into.mkdir(parents=True, exist_ok=True)
    jobs = 1 if options.ranks else os.cpu_count() or 1
    print(
        f"seed {options.seed}, part {options.part}: {options.ranks or 'threads as'} ranks",
        flush=True,
    )
    draw(
        options.into,
        int(options.examples * options.share),
        options.ranks,
        options.seed + 1000 * options.part,
        jobs,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
