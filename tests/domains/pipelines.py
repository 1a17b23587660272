"""Declare the domain of pipelines as plain data: orders, time lines, pictures, splits of layers."""

from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import pairwise
from random import Random
from typing import Any

from domains.declared import LEFT_OUT, Parts, Values, spans, values
from domains.scheduling import subject
from sp_core.scheduling import (
    Slot,
    Timeline,
    gpipe,
    one_forward_one_backward,
    prefill_only,
    split_stages,
)
from sp_core.scheduling.pipeline import Order

COUNTS: dict[str, Parts] = {
    "stages": spans((2, 4), (1, 1), (5, 8), (30, 40)),
    "batches": spans((2, 5), (1, 1), (6, 9), (30, 40)),
}


def starts_of(orders: Sequence[Order], seconds: Any) -> list[list[tuple[Slot, float, float]]]:
    """Return when each slot starts and ends, by postponing starts until none has to move."""
    ends: dict[tuple[int, Slot], float] = {}
    begins = {(stage, slot): 0.0 for stage, order in enumerate(orders) for slot in order}
    before = {
        (stage, b): (stage, a) for stage, order in enumerate(orders) for a, b in pairwise(order)
    }
    moved = True
    while moved:
        ends = {
            (stage, slot): begin + seconds(stage, slot) for (stage, slot), begin in begins.items()
        }
        moved = False
        for (stage, slot), begin in begins.items():
            forward = stage - 1 if slot.direction == "F" else stage + 1
            last = slot.direction == "B" and forward == len(orders)
            need = (stage, Slot("F", slot.batch)) if last else (forward, slot)
            wanted = max(ends.get(need, 0.0), ends.get(before.get((stage, slot), (-1, slot)), 0.0))
            if wanted > begin:
                begins[stage, slot], moved = wanted, True
    return [
        [(slot, begins[stage, slot], ends[stage, slot]) for slot in order]
        for stage, order in enumerate(orders)
    ]


def judge_gpipe(given: Values, orders: Sequence[Order], *, backward: bool = True) -> None:
    """Check that each stage runs all forwards in order, then any backwards in reverse order."""
    numbers = range(given["batches"])
    back = (Slot("B", n) for n in numbers[::-1] if backward)
    assert orders == ((*(Slot("F", n) for n in numbers), *back),) * given["stages"]


def judge_1f1b(given: Values, orders: Sequence[Order]) -> None:
    """Check how many micro-batches a stage holds: at most one per stage from it to the last."""
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


def judge_bubble(given: Values, share: float) -> None:
    """Compare the share of idle time with the time line of a GPipe schedule of equal slots."""
    made = starts_of(gpipe(given["stages"], given["batches"]), one_second)
    end = max(stop for slots in made for _, _, stop in slots)
    assert abs(share - (1 - 2 * given["batches"] / end)) < 1e-12


def orders_of(chance: Random, drawn: Values, *, made: Callable[..., Sequence[Order]]) -> Any:
    """Return the order of slots of each stage, by the schedule `made`."""
    return made(drawn["orders.stages"], drawn["orders.batches"])


def one_second(stage: int, slot: Slot) -> float:
    """Return how long a slot takes by default, in seconds."""
    return 1.0


def one_by_one(stages: int, batches: int) -> tuple[tuple[Slot, ...], ...]:
    """Return orders in which each micro-batch runs forward and backward before the next begins."""
    return (
        tuple(Slot(direction, batch) for batch in range(batches) for direction in ("F", "B")),
    ) * stages


def seconds_of(chance: Random, _: Values, *, longest: int) -> Any:
    """Return a function that gives each slot of each stage 0 to `longest` whole seconds."""
    seed = chance.randrange(2**16)
    return lambda stage, slot: float(Random(f"{seed} {stage} {slot}").randint(0, longest))


def judge_timeline(given: Values, made: Timeline) -> None:
    """Compare all starts and ends of slots, then the times that follow from them."""
    each_one = given["seconds"] is LEFT_OUT
    wanted = starts_of(given["orders"], one_second if each_one else given["seconds"])
    assert [list(slots) for slots in made.stages] == wanted
    end = max((stop for slots in wanted for *_, stop in slots), default=0.0)
    judge_times({"stages": made.stages, "end": end}, made)


def judge_times(given: Values, made: Timeline) -> None:
    """Compare end, busy time and bubble of a time line with sums over its slots."""
    busy = [sum(stop - start for _, start, stop in slots) for slots in given["stages"]]
    assert (made.stages, made.end, list(made.busy)) == (given["stages"], given["end"], busy)
    idle = len(busy) * given["end"] - sum(busy)
    assert abs(made.bubble * len(busy) * given["end"] - idle) <= 1e-9 * given["end"]
    assert 0 <= made.bubble <= 1


def slots_of(
    chance: Random, drawn: Values, *, stages: tuple[int, int], slots: tuple[int, int]
) -> Any:
    """Return stages with slots one after the other, some with pauses between them."""
    found = []
    for _ in range(chance.randint(*stages)):
        times = sorted(chance.randint(0, 40) / 4 for _ in range(2 * chance.randint(*slots)))
        named = (
            Slot(drawn["direction"], drawn["batch"] + number) for number in range(len(times) // 2)
        )
        found.append(tuple(zip(named, times[::2], times[1::2], strict=True)))
    return tuple(found)


SLOTS: dict[str, Parts] = {
    "direction": values("F", "B"),
    "batch": spans((0, 9), (10, 9999)),
}
TIMES: dict[str, Parts] = {
    "stages": {
        "some": partial(slots_of, stages=(2, 4), slots=(1, 4)),
        "one": partial(slots_of, stages=(1, 1), slots=(1, 4)),
        "idle": partial(slots_of, stages=(1, 3), slots=(0, 0)),
        "many": partial(slots_of, stages=(20, 30), slots=(5, 9)),
    },
    "end": {
        "of the last slot": lambda c, v: max(
            (stop for slots in v["stages"] for *_, stop in slots), default=0.0
        ),
        "later": lambda c, v: 12.5,
    },
}


def judge_slot(given: Values, slot: Slot) -> None:
    """Check the fields of a slot, and that an equal slot is the same key of a dict."""
    assert (slot.direction, slot.batch) == (given["direction"], given["batch"])
    assert {slot: 1}[Slot(given["direction"], given["batch"])] == 1


def judge_picture(given: Values, text: str) -> None:
    """Compare each cell of a picture with the slot in its column; slots end at whole columns."""
    shown, unit = given["shown"], given["unit"] if given["unit"] is not LEFT_OUT else 1.0
    *lines, last = text.splitlines()
    assert last == f"bubble: {shown.bubble:.1%} of the stages' time"
    assert len(lines) == len(shown.stages)
    mark = "" if given["direction"] == "F" else "'"
    width = 1 + max(
        (len(f"{slot.batch}{mark}") for slots in shown.stages for slot, *_ in slots), default=1
    )
    for stage, (line, slots) in enumerate(zip(lines, shown.stages, strict=True)):
        cells = line.removeprefix(f"stage {stage} |")
        wanted = []
        for column in range(round(shown.end / unit)):
            inside = [
                f"{slot.batch}{mark}"
                for slot, a, b in slots
                if round(a / unit) <= column < round(b / unit)
            ]
            wanted.append((inside or ["." * (width - 1)])[0].rjust(width))
        assert cells == "".join(wanted)


def layers_of(
    chance: Random, drawn: Values, *, count: tuple[int, int], cost: tuple[float, ...]
) -> list[float]:
    """Return the costs of random layers, at least as many as there are stages."""
    return [chance.choice(cost) for _ in range(chance.randint(*count) + drawn["stages"] - 1)]


def least_worst(layers: Sequence[float], stages: int, first: float, last: float) -> float:
    """Return the cost of the most expensive stage in the best of all splits."""

    @cache
    def best(stage: int, start: int) -> float:
        own = first if stage == 0 else 0
        if stage == stages - 1:
            return own + sum(layers[start:]) + last
        stops = range(start + 1, len(layers) - stages + stage + 2)
        return min(max(own + sum(layers[start:stop]), best(stage + 1, stop)) for stop in stops)

    return best(0, 0)


def judge_split(given: Values, parts: Sequence[range]) -> None:
    """Check that a split is the best of all, and the first of equally good ones."""
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
    subject("prefill_only", COUNTS, partial(judge_gpipe, backward=False)),
    subject("gpipe", COUNTS, judge_gpipe),
    subject("one_forward_one_backward", COUNTS, judge_1f1b),
    subject("bubble_share", COUNTS, judge_bubble),
    subject(
        "timeline",
        {
            "orders.stages": spans((2, 4), (1, 1), (5, 8)),
            "orders.batches": spans((2, 5), (1, 1), (6, 12)),
            "orders": {
                **{
                    name: partial(orders_of, made=made)
                    for name, made in {
                        "gpipe": gpipe,
                        "1f1b": one_forward_one_backward,
                        "forward": prefill_only,
                        "one by one": one_by_one,
                    }.items()
                },
                "nothing to do": lambda c, v: ((),) * v["orders.stages"],
                "no stage": lambda c, v: (),
            },
            "seconds": {
                "default": lambda c, v: LEFT_OUT,
                "unequal": partial(seconds_of, longest=5),
                "long": partial(seconds_of, longest=10**6),
                "none": partial(seconds_of, longest=0),
            },
        },
        judge_timeline,
        "orders",
        "seconds",
    ),
    subject("Slot", SLOTS, judge_slot),
    subject("Timeline", SLOTS | TIMES, judge_times, "stages", "end"),
    subject(
        "picture",
        SLOTS
        | TIMES
        | {
            "shown": {"any": lambda c, v: Timeline(v["stages"], v["end"])},
            "unit": {"default": lambda c, v: LEFT_OUT, **values(0.25, 0.5, 3.0)},
        },
        judge_picture,
        *("shown", "unit"),
    ),
    subject(
        "split_stages",
        {
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
        },
        judge_split,
    ),
]
