"""The stages of a pipeline: their layers, and the order of their micro-batches.

F of batch b on stage s needs F of b on s - 1;  B of b on s needs B of b on s + 1, and F of b on the
last stage
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Literal

from sp_core.errors import ShapeError

Direction = Literal["F", "B"]


@dataclass(frozen=True)
class Slot:
    """The forward ("F") or backward ("B") of one micro-batch on one stage."""

    direction: Direction
    batch: int


Order = tuple[Slot, ...]
"""The slots of one stage in the order in which it runs them."""


def prefill_only(stages: int, batches: int) -> tuple[Order, ...]:
    """Order forwards alone, for inference. Each stage takes the micro-batches as they come."""
    _check(stages, batches)
    return (tuple(Slot("F", batch) for batch in range(batches)),) * stages


def gpipe(stages: int, batches: int) -> tuple[Order, ...]:
    """Order all forwards, then all backwards, with the last micro-batch first.

    Source: Huang et al. 2019, GPipe, arXiv:1811.06965, figure 2c.
    """
    forward = prefill_only(stages, batches)
    return tuple(
        (*order, *(Slot("B", batch) for batch in reversed(range(batches)))) for order in forward
    )


def one_forward_one_backward(stages: int, batches: int) -> tuple[Order, ...]:
    """Order 1F1B: stage s of p holds at most p - s micro-batches that wait for their backward.

    Source: Narayanan et al. 2021, Efficient Large-Scale Language Model Training on GPU Clusters,
    arXiv:2104.04473, figure 4 above.
    """
    _check(stages, batches)
    orders = []
    for stage in range(stages):
        ahead = min(stages - 1 - stage, batches)
        order = [Slot("F", batch) for batch in range(ahead)]
        for batch in range(batches - ahead):
            order += [Slot("F", ahead + batch), Slot("B", batch)]
        orders.append((*order, *(Slot("B", batch) for batch in range(batches - ahead, batches))))
    return tuple(orders)


def _check(stages: int, batches: int) -> None:
    if stages < 1 or batches < 1:
        raise ShapeError(
            f"{stages} stages and {batches} micro-batches were given; needed at least 1 of each."
        )


def split_stages(
    layers: Sequence[float], stages: int, *, first: float = 0, last: float = 0
) -> tuple[range, ...]:
    """Give each stage consecutive layers so that the most costly stage costs as little as possible.

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
            f"{stages} stages were asked for, for {count} layers; each stage needs one. Use pp <= "
            f"{count}."
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
