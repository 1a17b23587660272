"""What "auto" loses: constants are fitted on every other round, and the choice they make is judged on the rounds between."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.reporting.tables import Table, make, size
from benchmarks.worker import Intracomm
from sp_core import measuring
from sp_core.communicator import Communicator
from sp_core.measuring import Samples
from sp_core.tuning import Tuning, decide, modelled, predict

FITTED = (*measuring.SIZES, 4**14)  # 64 bytes to 256 MiB, each four times the one before
JUDGED = (
    *(2**place for place in range(6, 25)),
    4**13,
    4**14,
)  # and those between up to 16 MiB, at which nothing was fitted
# seconds for each size and collective, where the least number of rounds does not take longer
SHARE = 0.08
LEAST_ROUNDS = 6
MEDIAN, WORST, MICROSECONDS = (
    0.05,
    0.15,
    2.0,
)  # requirements: median and 95th percentile, the latter or that little
SHOWN = 12  # cases of regret, the worst ones


@dataclass(frozen=True)
class Regret:
    """One collective at one size.

    Args:
        op, nbytes: what.
        chosen, best: by the constants, and in truth.
        seconds, least: of these two, medians.
        predicted, plain: seconds of the chosen by the constants, and by the model without
            corrections.
    """

    op: str
    nbytes: int
    chosen: str
    best: str
    seconds: float
    least: float
    predicted: float
    plain: float

    @property
    def share(self) -> float:
        """Part of the best time that is lost."""
        return self.seconds / self.least - 1


def measure(
    world: Intracomm, group: Communicator, sizes: Sequence[int] = JUDGED, share: float = SHARE
) -> dict[str, Any]:
    """Samples of every algorithm at every size, with the constants of the machine that are not fitted on them."""
    bare = measuring.primitives(world, group, share / 4, [size for size in sizes if size in FITTED])
    samples = measuring.collectives(world, group, share, sizes, LEAST_ROUNDS)
    return {"bare": bare, "samples": samples}


def judged(bare: Tuning, samples: Samples) -> list[Regret]:
    """The regret of every collective and size."""
    fit = {
        op: {
            name: {size: x[::2] for size, x in by_size.items() if size in FITTED}
            for name, by_size in by_name.items()
        }
        for op, by_name in samples.items()
    }
    return list(_judged(measuring.fitted(bare, fit), samples))


def _judged(tuning: Tuning, samples: Samples) -> Iterator[Regret]:
    for op, by_name in samples.items():
        for nbytes in next(iter(by_name.values())):
            seconds = measuring.typical(
                {name: by_size[nbytes][1::2] for name, by_size in by_name.items()}
            )
            name = decide(tuning, op, tuning.nodes, nbytes, among=tuple(by_name), planned=True)
            best = min(seconds, key=lambda other: seconds[other])
            told = predict(tuning, op, name, tuning.nodes, nbytes).seconds
            plain = modelled(tuning, op, name, tuning.nodes, nbytes)
            yield Regret(op, nbytes, name, best, seconds[name], seconds[best], told, plain)


def summary(found: Sequence[Regret]) -> dict[str, Any]:
    """The figures that are asked for, and how far the predictions are off."""
    shares = sorted(regret.share for regret in found)
    worst = [
        max(0.0, regret.share)
        for regret in found
        if (regret.seconds - regret.least) * 1e6 > MICROSECONDS
    ]
    many = sorted(
        [*worst, *[0.0] * (len(found) - len(worst))]
    )  # those within the microseconds have lost nothing that counts
    errors, plain = (
        sorted(abs(getattr(regret, kind) / regret.seconds - 1) for regret in found)
        for kind in ("predicted", "plain")
    )
    return {
        "cases": len(found),
        "median": statistics.median(shares),
        "p95": percentile(shares, 0.95),
        "p95_beyond_microseconds": percentile(many, 0.95),
        "reached": statistics.median(shares) <= MEDIAN and percentile(many, 0.95) <= WORST,
        "prediction_error": {"median": statistics.median(errors), "p95": percentile(errors, 0.95)},
        "model_error": {"median": statistics.median(plain), "p95": percentile(plain, 0.95)},
    }


def percentile(ordered: Sequence[float], share: float) -> float:
    """The smallest of ascending values that is not exceeded by that share of them."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def table(launch: dict[str, Any]) -> Table:
    """Return a table of the worst cases, with the required figures in its title."""
    told = launch["summary"]
    reached = "reached" if told["reached"] else "not reached"
    title = (
        f"auto over {told['cases']} cases: median regret {told['median']:.1%} (<= {MEDIAN:.0%}), 95th percentile {told['p95']:.1%}"
        f", {told['p95_beyond_microseconds']:.1%} where more than {MICROSECONDS:g} us (<= {WORST:.0%}): {reached}"
    )
    note = (
        f"prediction off by {told['prediction_error']['median']:.0%} (median), {told['prediction_error']['p95']:.0%} (95th); "
        f"the model without corrections by {told['model_error']['median']:.0%}, {told['model_error']['p95']:.0%}"
    )
    worst = sorted(launch["cases"], key=lambda case: case["least"] / case["seconds"])[:SHOWN]
    times = [
        [f"{case[kind] * 1e6:,.1f}" for kind in ("seconds", "least", "predicted", "plain")]
        for case in worst
    ]
    rows = [
        (c["op"], size(c["nbytes"]), c["chosen"], c["best"], *shown)
        for c, shown in zip(worst, times, strict=True)
    ]
    columns = (
        "collective",
        "vector",
        "chosen",
        "best",
        "us",
        "of the best",
        "predicted us",
        "model us",
    )
    return make(title, columns, rows, note)
