"""Judge "auto": constants are fitted on every other round, choices judged on those between."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from functools import partial

import numpy as np

from benchmarks.contests.collectives.__main__ import MEDIAN, MICROSECONDS, WORST
from benchmarks.launching import Record
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


def measure(world: Intracomm, group: Communicator) -> Record:
    """Return the regret of every collective and size, and what it comes to.

    Every algorithm is sampled, and constants that are not fitted on these samples.
    """
    bare = measuring.primitives(world, group, SHARE / 4, [x for x in JUDGED if x in FITTED])
    cases = judged(bare, measuring.collectives(world, group, SHARE, JUDGED, LEAST_ROUNDS))
    return {"cases": cases, "summary": summary(cases)}


def judged(bare: Tuning, samples: Samples) -> list[Record]:
    """Return for every collective and size what the constants choose, and what is best in truth.

    Times are medians. "predicted" is that of the choice by the constants, and "plain" that by the
    model without corrections.
    """
    fit = {
        op: {
            name: {size: x[::2] for size, x in by_size.items() if size in FITTED}
            for name, by_size in by_name.items()
        }
        for op, by_name in samples.items()
    }
    tuning, found = measuring.fitted(bare, fit), []
    for op, by_name in samples.items():
        for nbytes in next(iter(by_name.values())):
            unseen = {name: by_size[nbytes][1::2] for name, by_size in by_name.items()}
            seconds = measuring.typical(unseen)
            name = decide(tuning, op, tuning.nodes, nbytes, among=tuple(by_name), planned=True)
            best = min(seconds, key=lambda other: seconds[other])
            case = {
                "op": op,
                "nbytes": nbytes,
                "chosen": name,
                "best": best,
                "seconds": seconds[name],
                "least": seconds[best],
                "predicted": predict(tuning, op, name, tuning.nodes, nbytes),
                "plain": modelled(tuning, op, name, tuning.nodes, nbytes),
            }
            found.append(case)
    return found


def summary(found: Sequence[Record]) -> Record:
    """Return the figures that are asked for, and how far the predictions are off."""
    shares = [case["seconds"] / case["least"] - 1 for case in found]
    lost = [(case["seconds"] - case["least"]) * 1e6 for case in found]
    # who is within the microseconds has lost nothing that counts
    counting = [s * (us > MICROSECONDS) for s, us in zip(shares, lost, strict=True)]
    percentile = partial(np.quantile, q=0.95, method="inverted_cdf")
    median, beyond = statistics.median(shares), float(percentile(counting))
    errors = {
        kind: [abs(case[kind] / case["seconds"] - 1) for case in found]
        for kind in ("predicted", "plain")
    }
    error, model = (
        {"median": statistics.median(x), "p95": float(percentile(x))} for x in errors.values()
    )
    return {
        "cases": len(found),
        "median": median,
        "p95": float(percentile(shares)),
        "p95_beyond_microseconds": beyond,
        "reached": median <= MEDIAN and beyond <= WORST,
        "prediction_error": error,
        "model_error": model,
    }
