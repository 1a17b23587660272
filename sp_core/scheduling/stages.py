"""Assign layers to the stages of a pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from sp_core.errors import ShapeError


def split_stages(
    layers: Sequence[float], stages: int, *, first: float = 0, last: float = 0
) -> tuple[range, ...]:
    """Give each stage consecutive layers, at least one, so that the most costly stage costs as little as possible.

    Args:
        layers: what each layer costs.
        stages: how many there are.
        first: what the first stage has to do besides, such as the embedding.
        last: what the last one has, such as the head.

    Returns:
        The layers of each stage. Equally good splits are told apart by their stages before the
        last, which are split as evenly as can be, and then by fewer layers on the first stages.

    Raises:
        ShapeError: no stage, or more of them than layers.
    """
    count = len(layers)
    if not 1 <= stages <= count:
        raise ShapeError(
            f"{stages} stages were asked for, for {count} layers; each stage needs one. Use pp <= {count}."
        )
    before = list(accumulate(layers, initial=0.0))

    def cost(start: int, stop: int, stage: int) -> float:
        return before[stop] - before[start] + first * (stage == 0) + last * (stage == stages - 1)

    best: list[tuple[float, tuple[int, ...]]] = [
        (cost(0, stop, 0), (0, stop)) for stop in range(count + 1)
    ]
    for stage in range(1, stages):
        best = [
            min(
                (
                    (max(best[cut][0], cost(cut, stop, stage)), (*best[cut][1], stop))
                    for cut in range(stage, stop)
                ),
                default=(float("inf"), ()),
            )
            for stop in range(count + 1)
        ]
    cuts = best[count][1]
    return tuple(range(start, stop) for start, stop in pairwise(cuts))
