"""Declare the domain of `Mask`: constructor and methods, compared with the definition."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from oracle import reference

import sp_core as sp
from domains.declared import Call, Parts, Values, pure, same, spans, values

CONTAINERS: dict[str, Callable[[list[int]], Any]] = {
    "tuple": tuple,
    "list": list,
    "tensor": lambda items: torch.tensor(items, dtype=torch.int64),
    "int32 tensor": lambda items: torch.tensor(items, dtype=torch.int32),
    "every second of a tensor": lambda items: torch.tensor(
        items, dtype=torch.int64
    ).repeat_interleave(2)[::2],
    "whole numbers of numpy": lambda items: [np.int64(item) for item in items],
}


def boundaries(chance: Random, count: int, first: int, end: int) -> tuple[int, ...]:
    """Return boundaries of `count` documents from 0 to `end`; inner ones are at least `first`."""
    return (0, *sorted(chance.randint(first, end) for _ in range(count - 1)), end)


def documents(tokens_of: Callable[[Values], tuple[int, int]], *numbers: tuple[int, int]) -> Parts:
    """Return a part without documents, and one for each range of their number; some are empty."""

    def draw(chance: Random, drawn: Values, *, number: tuple[int, int]) -> tuple[int, ...]:
        return boundaries(chance, chance.randint(*number), *tokens_of(drawn))

    return {"none": lambda c, v: None} | {
        name: partial(draw, number=number)
        for name, number in zip(spans(*numbers), numbers, strict=True)
    }


def own_boundaries(chance: Random, drawn: Values) -> tuple[int, ...] | None:
    """Return boundaries of as many key documents as the queries have, or None if they have none."""
    ends = drawn["documents"]
    return None if ends is None else boundaries(chance, len(ends) - 1, 0, drawn["(kv_length)"])


MASK: dict[str, Parts] = {
    "(length)": spans((10, 40), (0, 0), (1, 9), (100_000, 1_000_000)),
    "(kv_length)": {"as queries": lambda c, v: v["(length)"]} | spans((0, 0), (1, 40)),
    "causal": values(False, True),
    "window": {"none": lambda c, v: None}
    | spans((1, 1), (2, 16), (17, 100), (10_000, 10**7), (2**62, 2**65)),
    "documents": documents(lambda v: (0, v["(length)"]), (1, 1), (2, 6), (7, 64), (65, 300)),
    "documents.container": values(*CONTAINERS),
    "kv_documents": {"own": own_boundaries, "none": lambda c, v: None},
    "kv_documents.container": values(*CONTAINERS),
}


def given_to(drawn: Values) -> Values:
    """Return the constructor's arguments, without lone query documents if the lengths differ."""
    pair = [drawn["documents"], drawn["kv_documents"]]
    if pair[1] is None and drawn["(kv_length)"] != drawn["(length)"]:
        pair[0] = None
    names = ("documents", "kv_documents")
    shown = [
        None if ends is None else CONTAINERS[drawn[f"{name}.container"]](list(ends))
        for name, ends in zip(names, pair, strict=True)
    ]
    window = drawn["window"]
    is_short = window is not None and window < 2**31
    as_numpy = is_short and drawn["documents.container"] == "whole numbers of numpy"
    return {"causal": drawn["causal"], "window": np.int32(window) if as_numpy else window} | dict(
        zip(names, shown, strict=True)
    )


def plain(given: Values) -> Values:
    """Return the arguments as numbers and tuples of Python itself."""
    found = {
        name: None if given[name] is None else tuple(map(int, given[name]))
        for name in ("documents", "kv_documents")
    }
    return {
        "causal": given["causal"],
        "window": None if given["window"] is None else int(given["window"]),
    } | found


def made(drawn: Values) -> Call:
    """Return the call of the constructor."""
    given = given_to(drawn)

    def judge(mask: sp.Mask) -> None:
        wanted = plain(given)
        assert {name: getattr(mask, name) for name in wanted} == wanted
        assert all(
            type(end) is int for ends in (mask.documents, mask.kv_documents) for end in ends or ()
        )
        assert mask == sp.Mask(**wanted)
        assert hash(mask) == hash(sp.Mask(**wanted))
        assert mask.key_documents == (wanted["kv_documents"] or wanted["documents"])

    return Call(sp.Mask, given, judge)


def positions(chance: Random, end: int, kind: str) -> Sequence[int] | torch.Tensor:
    """Return up to 40 positions below `end`."""
    if kind == "range":
        step = chance.randint(1, 3)
        return range(min(chance.randint(0, 5), end), end, max(step, end // 40))
    if kind == "range backwards":
        return range(end - 1, -1, -max(1, end // 40))
    if kind == "none":
        return []
    return CONTAINERS[kind](
        [chance.randrange(end) for _ in range(chance.randint(1, 40) if end else 0)]
    )


KINDS = ("range", "range backwards", "none", *CONTAINERS)


def allowed(drawn: Values) -> Call:
    """Return the call of `Mask.allowed`."""
    given, chance = given_to(drawn), Random(drawn["seed"])
    asked = {
        "q_positions": positions(chance, drawn["(length)"], drawn["q_positions"]),
        "kv_positions": positions(chance, drawn["(kv_length)"], drawn["kv_positions"]),
    }
    wanted = reference.visible(
        *(torch.as_tensor([int(p) for p in asked[name]]) for name in asked), **plain(given)
    )
    return Call(sp.Mask(**given).allowed, asked, partial(same, wanted=wanted))


def difference_range(drawn: Values) -> Call:
    """Return the call of `Mask.difference_range`: exactly the differences that are visible."""
    given = given_to(drawn) | {"documents": None, "kv_documents": None}

    def judge(found: tuple[int | None, int | None]) -> None:
        least, greatest = found
        near = {
            0,
            1,
            -1,
            *(limit + step for limit in found if limit is not None for step in (-1, 0, 1)),
        }
        for difference in near:
            seen = bool(reference.visible([difference], [0], **plain(given)))
            within = (least is None or difference >= least) and (
                greatest is None or difference <= greatest
            )
            assert seen == within
        far = reference.visible([10**9, -(10**9)], [0], **plain(given)).flatten().tolist()
        assert far == [greatest is None, least is None]

    return Call(sp.Mask(**given).difference_range, {}, judge)


def check_lengths(drawn: Values) -> Call:
    """Return the call of `Mask.check_lengths` with the ends of the documents, which it accepts."""
    mask, alike = sp.Mask(**given_to(drawn)), drawn["(kv_length)"] == drawn["(length)"]
    asked = {"seq_len": drawn["(length)"], "kv_seq_len": drawn["(kv_length)"]}
    if drawn["kv_seq_len"] == "left out" and alike:
        del asked["kv_seq_len"]

    def judge(found: None) -> None:
        same(found, None)
        for name, ends in {"seq_len": mask.documents, "kv_seq_len": mask.key_documents}.items():
            wrong = {"seq_len": drawn["(length)"], "kv_seq_len": drawn["(kv_length)"]}
            wrong[name] += 1
            with (
                nullcontext()
                if ends is None
                else pytest.raises(sp.ShapeError, match=f"end at {ends[-1]}, needed")
            ):
                mask.check_lengths(**wrong)

    return Call(mask.check_lengths, asked, judge)


SUBJECTS = [
    pure("Mask", MASK, made),
    pure(
        "Mask.allowed",
        MASK | {"q_positions": values(*KINDS), "kv_positions": values(*KINDS)},
        allowed,
    ),
    pure("Mask.difference_range", MASK, difference_range),
    pure(
        "Mask.check_lengths",
        MASK | {"seq_len": values("end"), "kv_seq_len": values("given", "left out")},
        check_lengths,
    ),
]
