"""The stages of a pipeline: their layers, the order of their micro-batches, and the time line.

F of batch b on stage s needs F of b on s - 1;  B of b on s needs B of b on s + 1, and F of b on the
last stage
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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


@dataclass(frozen=True)
class Timeline:
    """The start and end of each slot of each stage, if stages wait only for each other.

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
        """The share of all stages' time that is idle."""
        return 1 - sum(self.busy) / (len(self.stages) * self.end) if self.end else 0.0


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


def needs(slot: Slot, stage: int, stages: int) -> tuple[tuple[int, Slot], ...]:
    """Return the (stage, slot) pairs of other stages that must be done before a slot."""
    if slot.direction == "F":
        return ((stage - 1, slot),) if stage else ()
    return ((stage + 1, slot),) if stage < stages - 1 else ((stage, Slot("F", slot.batch)),)


def timeline(
    orders: Sequence[Order], seconds: Callable[[int, Slot], float] = lambda stage, slot: 1.0
) -> Timeline:
    """Compute when each slot starts.

    As soon as its stage is free and the slots that it needs are done.

    Args:
        orders: for each stage what it does.
        seconds: how long a slot of a stage takes; 1 for all if not given.

    Raises:
        ShapeError: orders in which stages wait for each other for ever.
    """
    done: dict[tuple[int, Slot], float] = {}
    placed: list[list[tuple[Slot, float, float]]] = [[] for _ in orders]
    waiting = [list(order) for order in orders]

    def needed(stage: int) -> tuple[tuple[int, Slot], ...]:
        return needs(waiting[stage][0], stage, len(orders))

    while any(waiting):
        stages = [stage for stage, slots in enumerate(waiting) if slots]
        ready = [stage for stage in stages if done.keys() >= set(needed(stage))]
        if not ready:
            raise ShapeError(
                f"the stages wait for each other for ever after {len(done)} slots; reorder "
                f"{orders}."
            )
        for stage in ready:
            free = placed[stage][-1][2] if placed[stage] else 0.0
            start = max([free, *(done[need] for need in needed(stage))])
            slot = waiting[stage].pop(0)
            done[stage, slot] = start + seconds(stage, slot)
            placed[stage].append((slot, start, done[stage, slot]))
    return Timeline(tuple(map(tuple, placed)), max(done.values(), default=0.0))


def bubble_share(stages: int, batches: int) -> float:
    """Return the idle share of time if all slots are equal: (p - 1) / (m + p - 1).

    Source: Huang et al. 2019, GPipe, arXiv:1811.06965, section 2.3.
    """
    _check(stages, batches)
    return (stages - 1) / (batches + stages - 1)


def _check(stages: int, batches: int) -> None:
    if stages < 1 or batches < 1:
        raise ShapeError(
            f"{stages} stages and {batches} micro-batches were given; needed at least 1 of each."
        )


def picture(shown: Timeline, unit: float = 1.0) -> str:
    """Draw a time line.

    Args:
        shown: what to draw.
        unit: time of one column; a forward shows its number, a backward the number and a prime,
            waiting shows dots.

    Returns:
        Lines of text, the last of which tells the bubble.
    """
    names = [_name(slot) for slots in shown.stages for slot, _, _ in slots]
    cell = max(map(len, names), default=1) + 1
    lines = []
    for stage, slots in enumerate(shown.stages):
        columns = ["." * (cell - 1)] * round(shown.end / unit)
        for slot, start, stop in slots:
            first, last = round(start / unit), round(stop / unit)
            columns[first:last] = [_name(slot)] * (last - first)
        lines.append(f"stage {stage} |" + "".join(column.rjust(cell) for column in columns))
    return "\n".join([*lines, f"bubble: {shown.bubble:.1%} of the stages' time"])


def _name(slot: Slot) -> str:
    return f"{slot.batch}'" if slot.direction == "B" else str(slot.batch)


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
