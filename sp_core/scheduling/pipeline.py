"""The order in which the stages of a pipeline work on micro-batches, as plain data, and the time line that follows from it.

F of batch b on stage s needs F of b on s - 1;  B of b on s needs B of b on s + 1, and F of b on the last stage
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from sp_core.errors import ShapeError

Direction = Literal["F", "B"]


@dataclass(frozen=True)
class Slot:
    """The forward ("F") or backward ("B") of one micro-batch on one stage."""

    direction: Direction
    batch: int


Order = tuple[Slot, ...]
"""What one stage does, in this order."""


@dataclass(frozen=True)
class Timeline:
    """When each stage does what, if no time is lost but by waiting for another stage.

    Args:
        stages: for each stage its slots with their start and end.
        end: when all is done.
    """

    stages: tuple[tuple[tuple[Slot, float, float], ...], ...]
    end: float

    @property
    def busy(self) -> tuple[float, ...]:
        """The time that each stage works."""
        return tuple(sum(stop - start for _, start, stop in slots) for slots in self.stages)

    @property
    def bubble(self) -> float:
        """The share of all stages' time in which they do nothing."""
        return 1 - sum(self.busy) / (len(self.stages) * self.end) if self.end else 0.0


def prefill_only(stages: int, batches: int) -> tuple[Order, ...]:
    """Forward alone, for inference: each stage takes the micro-batches as they come."""
    _check(stages, batches)
    return (tuple(Slot("F", batch) for batch in range(batches)),) * stages


def gpipe(stages: int, batches: int) -> tuple[Order, ...]:
    """All forwards, then all backwards, the last micro-batch first.

    Source: Huang et al. 2019, GPipe, arXiv:1811.06965, figure 2c.
    """
    forward = prefill_only(stages, batches)
    return tuple((*order, *(Slot("B", batch) for batch in reversed(range(batches)))) for order in forward)


def one_forward_one_backward(stages: int, batches: int) -> tuple[Order, ...]:
    """1F1B: stage s of p holds at most p - s micro-batches between their forward and their backward.

    Source: Narayanan et al. 2021, Efficient Large-Scale Language Model Training on GPU Clusters, arXiv:2104.04473, figure 4 above.
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


def needs(slot: Slot, stage: int, stages: int) -> tuple[tuple[int, Slot], ...]:
    """Which slots of which other stages have to be done before one, as (stage, slot)."""
    if slot.direction == "F":
        return ((stage - 1, slot),) if stage else ()
    return ((stage + 1, slot),) if stage < stages - 1 else ((stage, Slot("F", slot.batch)),)


def timeline(orders: Sequence[Order], seconds: Callable[[int, Slot], float] = lambda stage, slot: 1.0) -> Timeline:
    """Each slot begins as soon as its stage is free and what it needs is done.

    Args:
        orders: for each stage what it does.
        seconds: how long a slot of a stage takes; 1 for all if not given.

    Raises:
        ShapeError: orders in which stages wait for each other for ever.
    """
    done: dict[tuple[int, Slot], float] = {}
    placed: list[list[tuple[Slot, float, float]]] = [[] for _ in orders]
    total = sum(map(len, orders))
    while len(done) < total:
        before = len(done)
        for stage, order in enumerate(orders):
            while len(placed[stage]) < len(order):
                slot = order[len(placed[stage])]
                wanted = needs(slot, stage, len(orders))
                if not all(need in done for need in wanted):
                    break
                start = max([placed[stage][-1][2] if placed[stage] else 0.0, *(done[need] for need in wanted)])
                done[stage, slot] = start + seconds(stage, slot)
                placed[stage].append((slot, start, done[stage, slot]))
        if len(done) == before:
            raise ShapeError(f"the stages wait for each other for ever after {len(done)} of {total} slots; reorder {orders}.")
    return Timeline(tuple(map(tuple, placed)), max(done.values(), default=0.0))


def bubble_share(stages: int, batches: int) -> float:
    """The share of time in which stages do nothing, with equal slots: (p - 1) / (m + p - 1).

    Source: Huang et al. 2019, GPipe, arXiv:1811.06965, section 2.3.
    """
    _check(stages, batches)
    return (stages - 1) / (batches + stages - 1)


def _check(stages: int, batches: int) -> None:
    if stages < 1 or batches < 1:
        raise ShapeError(f"{stages} stages and {batches} micro-batches were given; needed at least 1 of each.")
