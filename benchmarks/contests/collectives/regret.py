"""Judge "auto": constants are fitted on every other round, choices judged on those between."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from benchmarks.contests.collectives.__main__ import MEDIAN, MICROSECONDS, WORST
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
        """Return the part of the best time that is lost."""
        return self.seconds / self.least - 1


def measure(
    world: Intracomm, group: Communicator, sizes: Sequence[int] = JUDGED, share: float = SHARE
) -> dict[str, Any]:
    """Sample every algorithm at every size, and the constants that are not fitted on these."""
    bare = measuring.primitives(world, group, share / 4, [size for size in sizes if size in FITTED])
    samples = measuring.collectives(world, group, share, sizes, LEAST_ROUNDS)
    return {"bare": bare, "samples": samples}


def judged(bare: Tuning, samples: Samples) -> list[Regret]:
    """Return the regret of every collective and size."""
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
            told = predict(tuning, op, name, tuning.nodes, nbytes)
            plain = modelled(tuning, op, name, tuning.nodes, nbytes)
            found.append(Regret(op, nbytes, name, best, seconds[name], seconds[best], told, plain))
    return found


def summary(found: Sequence[Regret]) -> dict[str, Any]:
    """Return the figures that are asked for, and how far the predictions are off."""
    shares = [regret.share for regret in found]
    # who is within the microseconds has lost nothing that counts
    counting = [x.share * ((x.seconds - x.least) * 1e6 > MICROSECONDS) for x in found]
    percentile = partial(np.quantile, q=0.95, method="inverted_cdf")
    median, beyond = statistics.median(shares), float(percentile(counting))
    errors = {
        kind: [abs(getattr(regret, kind) / regret.seconds - 1) for regret in found]
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
