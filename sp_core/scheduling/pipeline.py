"""Divide layers among the stages of a pipeline, order their micro-batches, and predict the times.

A pipeline has p stages, each with consecutive layers of the model, and computes m micro-batches. A
slot is the forward (F) or the backward (B) of one micro-batch on one stage. For micro-batch b:

    F of b on stage s needs F of b on stage s - 1
    B of b on stage s needs B of b on stage s + 1; on the last stage it needs F of b there

`gpipe`, `one_forward_one_backward` and `prefill_only` return an `Order` for each stage. `timeline`
computes from these when each slot starts and ends. Times are in the unit of its argument `seconds`.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate, pairwise
from typing import Literal

from sp_core import arguments
from sp_core.errors import ShapeError


@dataclass(frozen=True)
class Slot:
    """Name the forward ("F") or the backward ("B") of micro-batch number `batch` on a stage."""

    direction: Literal["F", "B"]
    batch: int


Order = tuple[Slot, ...]
"""The slots of one stage in the order in which the stage computes them."""


@dataclass(frozen=True)
class Timeline:
    """Hold the start and end of each slot of a pipeline, as `timeline` computes them.

    Args:
        stages: for each stage its slots in order, as (slot, start, end). Time 0 is the start of
            the first slot.
        end: the end of the last slot.
    """

    stages: tuple[tuple[tuple[Slot, float, float], ...], ...]
    end: float

    @property
    def busy(self) -> tuple[float, ...]:
        """Return for each stage the time it spends in slots (forwards and backwards)."""
        return tuple(sum(stop - start for _, start, stop in slots) for slots in self.stages)

    @property
    def bubble(self) -> float:
        """Return the share of time from 0 to `end` in which stages are idle, from 0 to 1."""
        return 1 - sum(self.busy) / (len(self.stages) * self.end) if self.end else 0.0


def prefill_only(stages: int, batches: int) -> tuple[Order, ...]:
    """Return the order of each stage for inference: the forwards of all micro-batches in order.

    Args:
        stages: number of stages.
        batches: number of micro-batches.

    Raises:
        TypeError: a number that is not whole.
        ShapeError: no stage, or no micro-batch.
    """
    stages, batches = _checked(stages, batches)
    return (tuple(Slot("F", batch) for batch in range(batches)),) * stages


def gpipe(stages: int, batches: int) -> tuple[Order, ...]:
    """Return the order of each stage: all forwards, then all backwards, the last micro-batch first.

    `timeline` predicts its times, and `loss_and_gradients` of a LLaMA computes by it.

    Args:
        stages: number of stages.
        batches: number of micro-batches.

    Raises:
        TypeError: a number that is not whole.
        ShapeError: no stage, or no micro-batch.

    Source: Huang et al. 2019, GPipe, arXiv:1811.06965, figure 2c.
    """
    forward = prefill_only(stages, batches)
    return tuple(
        (*order, *(Slot("B", batch) for batch in reversed(range(batches)))) for order in forward
    )


def one_forward_one_backward(stages: int, batches: int) -> tuple[Order, ...]:
    """Return the 1F1B order of each stage, in which forwards and backwards alternate.

    A stage begins with some forwards and ends with the backwards that are left. Stage s of p stages
    holds the activations of at most p - s micro-batches at a time.

    Args:
        stages: number of stages.
        batches: number of micro-batches.

    Raises:
        TypeError: a number that is not whole.
        ShapeError: no stage, or no micro-batch.

    Source: Narayanan et al. 2021, Efficient Large-Scale Language Model Training on GPU Clusters,
    arXiv:2104.04473, figure 4, top.
    """
    stages, batches = _checked(stages, batches)
    orders = []
    for stage in range(stages):
        ahead = min(stages - 1 - stage, batches)
        order = [Slot("F", batch) for batch in range(ahead)]
        for batch in range(batches - ahead):
            order += [Slot("F", ahead + batch), Slot("B", batch)]
        orders.append((*order, *(Slot("B", batch) for batch in range(batches - ahead, batches))))
    return tuple(orders)


def needs(slot: Slot, stage: int, stages: int) -> tuple[tuple[int, Slot], ...]:
    """Return the (stage, slot) pairs that must end before `slot` on `stage` can start.

    `stages` is the number of stages. The earlier slots in the stage's own order are not listed.
    """
    if slot.direction == "F":
        return ((stage - 1, slot),) if stage else ()
    return ((stage + 1, slot),) if stage < stages - 1 else ((stage, Slot("F", slot.batch)),)


def timeline(
    orders: Sequence[Order], seconds: Callable[[int, Slot], float] = lambda stage, slot: 1.0
) -> Timeline:
    """Compute when each slot starts and ends.

    A slot starts as soon as its stage is free and the slots that it needs have ended. Messages take
    no time.

    Args:
        orders: for each stage its slots in order.
        seconds: function of (stage, slot) that returns the duration of the slot; 1 for every slot
            if not given.

    Raises:
        TypeError: a duration that is no finite number >= 0.
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
            took = seconds(stage, slot)
            arguments.check("cost", **{f"seconds({stage}, {slot})": took})
            done[stage, slot] = start + float(took)
            placed[stage].append((slot, start, done[stage, slot]))
    return Timeline(tuple(map(tuple, placed)), max(done.values(), default=0.0))


def check_orders(orders: Sequence[Order], stages: int, batches: int) -> None:
    """Raise an error unless the stages can compute and train all micro-batches in these orders.

    A stage receives messages in the order in which its neighbour sends them. So all stages need the
    same order of forwards, and the same order of backwards.

    Raises:
        TypeError: `orders` is no sequence.
        ShapeError: an order or a slot is missing or one too many, the orders of two stages do not
            fit, or stages wait for each other for ever.
    """
    arguments.check_type("the result of ordering", orders, Sequence, "Pass one such as gpipe.")
    slots = {*gpipe(1, batches)[0]}
    is_whole = all(len(order) == len(slots) and {*order} == slots for order in orders)
    if not (len(orders) == stages and is_whole) or any(
        len({tuple(slot for slot in order if slot.direction == way) for order in orders}) > 1
        for way in "FB"
    ):
        raise ShapeError(
            f"the result of ordering is {orders}; needed is an order for each of {stages} stages, "
            f"with F and B of each of {batches} micro-batches once. All stages need the same order "
            f"of forwards, and the same order of backwards."
        )
    timeline(orders)


def bubble_share(stages: int, batches: int) -> float:
    """Return the share of time in which a stage is idle if all slots take equally long.

    It is (p - 1) / (m + p - 1) for p = `stages` and m = `batches`, in any order of this module.

    Raises:
        TypeError: a number that is not whole.
        ShapeError: no stage, or no micro-batch.

    Source: Huang et al. 2019, GPipe, arXiv:1811.06965, section 2.3.
    """
    stages, batches = _checked(stages, batches)
    return (stages - 1) / (batches + stages - 1)


def _checked(stages: int, batches: int) -> tuple[int, int]:
    """Return both numbers as ints.

    Raise TypeError or ShapeError unless there is at least one stage and one micro-batch.
    """
    arguments.check("size", stages=stages, batches=batches)
    if stages < 1 or batches < 1:
        raise ShapeError(
            f"{stages} stages and {batches} micro-batches were given; needed at least 1 of each."
        )
    return int(stages), int(batches)


def picture(shown: Timeline, unit: float = 1.0) -> str:
    """Draw a time line as text.

    A forward is shown as the number of its micro-batch, a backward as the number with a prime, and
    idle time as dots.

    Args:
        shown: the time line.
        unit: the time that a column stands for.

    Returns:
        A line for each stage, and a last line with the bubble (idle share) in percent.

    Raises:
        TypeError: `unit` is no finite number above 0.
    """
    arguments.check(unit=unit)
    unit = arguments.plain(unit)
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
    """Return the text of a slot in a picture, such as 3 or 3'."""
    return f"{slot.batch}'" if slot.direction == "B" else str(slot.batch)


def split_stages(
    layers: Sequence[float], stages: int, *, first: float = 0, last: float = 0
) -> tuple[range, ...]:
    """Give each stage consecutive layers, with the least possible cost of the most costly stage.

    Args:
        layers: the cost of each layer, in any unit.
        stages: number of stages.
        first: further cost of the first stage, such as that of the embedding.
        last: further cost of the last stage, such as that of the output layer.

    Returns:
        For each stage the range of its layers. Equal arguments give the same split.
        Several splits can be equally good. The stages before the last one are split as a call for
        their layers alone would split them. Among such splits the first stage has the fewest
        layers, then the second, and so on.

    Raises:
        TypeError: an argument of a wrong type.
        ShapeError: no stage, more stages than layers, or a cost that is negative or not finite.
    """
    arguments.check(layers=layers)
    arguments.check("size", stages=stages)
    arguments.check("p", first=first, last=last)
    count = len(layers)
    if not 1 <= stages <= count:
        remedy = f"Use pp <= {count}." if count else "Pass the cost of each layer."
        raise ShapeError(
            f"{stages} stages were asked for, for {count} layers; each stage needs one. {remedy}"
        )
    costs = [arguments.plain(x) for x in (*layers, first, last)]
    if wrong := [x for x in costs if not 0 <= x < math.inf]:
        raise ShapeError(f"costs of {wrong[:3]} were given; pass finite costs >= 0.")
    exact = [*map(Fraction, costs)]  # add up whole numbers of a unit: Fractions are slow
    unit = math.lcm(*(x.denominator for x in exact))
    *layers, first, last = (int(x * unit) for x in exact)
    before = list(accumulate(layers, initial=0))

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
