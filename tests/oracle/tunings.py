"""Make tuning constants of imaginary machines."""

from dataclasses import replace
from random import Random

from sp_core.programs import SCHEDULED
from sp_core.tuning import Curve, Tuning


def straight(alpha: float, per_byte: float) -> Curve:
    """Return the curve alpha + per_byte * n for n bytes."""
    return Curve(tuple((1 << place, alpha + per_byte * (1 << place)) for place in range(41)))


ALPHA, BETA, GAMMA = 1e-6, 1e-10, 2e-10
PLAIN = Tuning(
    {"host": "here"},
    (0, 0),
    {"node": straight(ALPHA, BETA)},
    straight(1e-15, GAMMA),
    straight(1e-15, BETA),
)
SLOW = replace(PLAIN, links={**PLAIN.links, "network": straight(1e-4, 1e-8)})


def timed(times: dict[str, dict[str, float]]) -> Tuning:
    """Return constants with `times`, the seconds by collective and algorithm, for any size."""
    curves = {
        op: {name: Curve(((1, s), (1 << 40, s))) for name, s in by_name.items()}
        for op, by_name in times.items()
    }
    return replace(PLAIN, times=curves)


def drawn(seed: int) -> Tuning:
    """Return random times of all algorithms, so that "auto" may choose any of them."""
    random = Random(seed)
    return timed(
        {
            op: {name: random.random() for name in ("mpi", *names)}
            for op, names in SCHEDULED.items()
            if names
        }
    )
