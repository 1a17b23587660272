"""Domain of pipelines as plain data: orders, splits of layers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from random import Random

from domains.declared import Parts, Values, spans, values
from domains.scheduling import LEFT_OUT, subject
from sp_core.scheduling import (
    Slot,
    split_stages,
)
from sp_core.scheduling.pipeline import Order

COUNTS: dict[str, Parts] = {
    "stages": spans((2, 4), (1, 1), (5, 8), (30, 40)),
    "batches": spans((2, 5), (1, 1), (6, 9), (30, 40)),
}


def judge_forward(given: Values, orders: Sequence[Order]) -> None:
    """Each stage takes all micro-batches as they come."""
    assert (
        orders == (tuple(Slot("F", batch) for batch in range(given["batches"])),) * given["stages"]
    )


def judge_gpipe(given: Values, orders: Sequence[Order]) -> None:
    """All forwards, then all backwards from the last one on."""
    numbers = range(given["batches"])
    assert (
        orders
        == ((*(Slot("F", n) for n in numbers), *(Slot("B", n) for n in numbers[::-1])),)
        * given["stages"]
    )


def judge_1f1b(given: Values, orders: Sequence[Order]) -> None:
    """Compare held micro-batches: as many as stages are left, then one forward per backward."""
    for stage, order in enumerate(orders):
        for direction in ("F", "B"):
            assert [slot.batch for slot in order if slot.direction == direction] == list(
                range(given["batches"])
            )
        held = [
            sum(1 if slot.direction == "F" else -1 for slot in order[: n + 1])
            for n in range(len(order))
        ]
        most = min(given["stages"] - stage, given["batches"])
        assert max(held) == most
        assert held == [
            *range(1, most),
            *[most, most - 1] * (given["batches"] - most + 1),
            *reversed(range(most - 1)),
        ]


SLOTS: dict[str, Parts] = {
    "direction": values("F", "B"),
    "batch": spans((0, 9), (10, 9999)),
}


def judge_slot(given: Values, slot: Slot) -> None:
    """Compare its fields; equal slots are one key."""
    assert (slot.direction, slot.batch) == (given["direction"], given["batch"])
    assert {slot: 1}[Slot(given["direction"], given["batch"])] == 1


def layers_of(
    chance: Random, drawn: Values, *, count: tuple[int, int], cost: tuple[float, ...]
) -> list[float]:
    """Costs of layers, as many as stages at least."""
    return [chance.choice(cost) for _ in range(chance.randint(*count) + drawn["stages"] - 1)]


SPLIT: dict[str, Parts] = {
    "stages": spans((2, 4), (1, 1), (5, 8)),
    "layers": {
        "few": partial(layers_of, count=(1, 6), cost=(1, 2, 3, 9)),
        "as many as stages": partial(layers_of, count=(1, 1), cost=(1, 2, 3, 9)),
        "equal": partial(layers_of, count=(4, 9), cost=(5,)),
        "many": partial(layers_of, count=(60, 120), cost=(1.5, 2.0, 40.0)),
        "of no cost": partial(layers_of, count=(3, 5), cost=(0,)),
        "large": partial(layers_of, count=(3, 5), cost=(3 * 10**11, 10**12)),
    },
    "first": {
        "default": lambda c, v: LEFT_OUT,
        "some": lambda c, v: c.randint(1, 9),
        "most": lambda c, v: 10**9,
    },
    "last": {
        "default": lambda c, v: LEFT_OUT,
        "some": lambda c, v: c.randint(1, 9),
        "most": lambda c, v: 10**9,
    },
}


def least_worst(layers: Sequence[float], stages: int, first: float, last: float) -> float:
    """Return the cost of the dearest stage in the best of all splits."""

    @cache
    def best(stage: int, start: int) -> float:
        own = first if stage == 0 else 0
        if stage == stages - 1:
            return own + sum(layers[start:]) + last
        stops = range(start + 1, len(layers) - stages + stage + 2)
        return min(max(own + sum(layers[start:stop]), best(stage + 1, stop)) for stop in stops)

    return best(0, 0)


def judge_split(given: Values, parts: Sequence[range]) -> None:
    """Compare with the best of all splits; the first of equal splits is taken."""
    given = given | {name: 0 for name in ("first", "last") if given[name] is LEFT_OUT}
    layers, first, last = given["layers"], given["first"], given["last"]
    assert [layer for part in parts for layer in part] == list(range(len(layers)))
    assert all(parts)
    assert len(parts) == given["stages"]

    def worst(parts: Sequence[range]) -> float:
        costs = [sum(layers[layer] for layer in part) for part in parts]
        costs[0] += first
        costs[-1] += last
        return max(costs)

    assert worst(parts) == least_worst(layers, len(parts), first, last)
    if len(layers) <= 12 and len(parts) > 1:
        cuts = range(len(parts) - 1, len(layers))
        others = [
            (*split_stages(layers[:cut], len(parts) - 1, first=first), range(cut, len(layers)))
            for cut in cuts
        ]
        assert parts == min(
            others, key=lambda other: (worst(other), [part.start for part in other])
        )


SUBJECTS = [
    subject("prefill_only", COUNTS, judge_forward),
    subject("gpipe", COUNTS, judge_gpipe),
    subject("one_forward_one_backward", COUNTS, judge_1f1b),
    subject("Slot", SLOTS, judge_slot),
    subject("split_stages", SPLIT, judge_split),
]
