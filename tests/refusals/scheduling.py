"""List wrong calls of `sp_core.scheduling`, with the error expected of each."""

import math
from functools import partial
from typing import Any
from unittest.mock import Mock

import numpy as np
from refusals.pure import Row

import sp_core as sp
from sp_core.scheduling import (
    POLICIES,
    Assignment,
    Slot,
    Work,
    balanced,
    bubble_share,
    dynamic,
    gpipe,
    one_forward_one_backward,
    picture,
    prefill_only,
    split_stages,
    timeline,
)

ONE = Work(1, 1)
PLANNED: dict[str, Any] = {"lengths": (1,), "sharded": (0,), "packed": ((),)}
DONE = timeline(gpipe(1, 1))
ROWS: list[Row] = [
    *(
        (sp.ShapeError, "size >= 1", partial(policy, lengths, size, Work(1, 1)))
        for lengths, size in list[Any]([([1], 0), ([-1], 2)])
        for policy in POLICIES.values()
    ),
    *(
        (TypeError, text, partial(policy, *given))
        for policy in POLICIES.values()
        for text, given in list[tuple[str, Any]](
            [
                (r"lengths=\['a'\] was given; pass a list or tuple of whole num", (["a"], 2, ONE)),
                (r"lengths=\[2, 1.5\] was given; pass a list", ([2, 1.5], 2, ONE)),
                (r"lengths=\[1.0\] was given; pass a list", ([1.0], 2, ONE)),
                (r"lengths=\[inf\] was given; pass a list", ([math.inf], 2, ONE)),
                ("lengths=3 was given; pass a list", (3, 2, ONE)),
                (r"lengths={5: 3} was given; pass a list", ({5: 3}, 2, ONE)),
                (r"lengths=frozenset.* was given; pass a list", (frozenset({5}), 2, ONE)),
                ("size='a' was given; pass a whole number", ([1], "a", ONE)),
                ("size=1.5 was given", ([1], 1.5, ONE)),
            ]
        )
    ),
    *(
        (TypeError, text, partial(policy, *given))
        for policy in (balanced, dynamic)
        for text, given in list[tuple[str, Any]](
            [
                ("work=3 was given; a Work is needed", ([1], 2, 3)),
                ("tolerance='a' was given; pass a number", ([1], 2, ONE, "a")),
            ]
        )
    ),
    *(
        (TypeError, f"{name}=.* was given; pass", partial(Assignment, **{**PLANNED, name: wrong}))
        for name, wrong in list[tuple[str, Any]](
            [
                ("lengths", ("a",)),
                ("lengths", (1.5,)),
                ("lengths", (math.nan,)),
                ("lengths", None),
                ("sharded", 0),
                ("sharded", ("a",)),
                ("packed", 1),
                ("packed", (0,)),
                ("waiting", None),
                ("padded_to", "a"),
            ]
        )
    ),
    *(
        (TypeError, f"per_{name}='a' was given; pass a number", partial(Work, *numbers))
        for name, numbers in list[tuple[str, Any]]([("token", ("a", 1)), ("pair", (1, "a"))])
    ),
    (sp.ShapeError, "exactly once", partial(Assignment, (3, 4), (0,), ((), (0, 1)))),
    (sp.ShapeError, "lengths >= 0", partial(Assignment, (-1,), (), ((0,),))),
    (sp.ShapeError, "at least 1 rank", partial(Assignment, (), (), ())),
    (
        sp.ShapeError,
        "less than the longest",
        partial(Assignment, (3, 5), (), ((0, 1),), padded_to=4),
    ),
    (sp.ShapeError, "longest sequence has, 0", partial(Assignment, (), (), ((),), padded_to=-1)),
    *((sp.ShapeError, f"{n} stages.* 1 layers", partial(split_stages, [1.0], n)) for n in (0, 2)),
    (sp.ShapeError, r"0 layers.* Pass the cost of each layer\.", partial(split_stages, [], 1)),
    *(
        (TypeError, text, partial(split_stages, *given, **named))
        for text, given, named in (
            (r"layers=\[1, 'a'\] was given; pass a list or tuple", ([1, "a"], 1), {}),
            ("layers=3 was given", (3, 1), {}),
            ("stages=1.5 was given; pass a whole number", ([1, 2], 1.5), {}),
            ("stages=True was given", ([1, 2], True), {}),
            ("first='1' was given; pass a number", ([1, 2], 1), {"first": "1"}),
            ("last=None was given; pass a number", ([1, 2], 1), {"last": None}),
        )
    ),
    *(
        (TypeError, "unit=.* was given; pass a finite number above 0", partial(picture, DONE, unit))
        for unit in list[Any]([0, math.nan, -1, math.inf, None])
    ),
    *(
        (
            TypeError,
            r"seconds\(0, Slot\(direction='F', batch=0\)\)=.* was given; pass a finite number >= 0",
            partial(timeline, gpipe(1, 1), Mock(return_value=took)),
        )
        for took in (-1, math.nan, math.inf, None)
    ),
    (
        TypeError,
        r"seconds\(1, Slot\(direction='B', batch=0\)\)=nan was given",
        partial(timeline, gpipe(2, 1), lambda _, slot: math.nan if slot.direction == "B" else 1.0),
    ),
    *(
        (TypeError, f"{name}=.* was given; pass a whole number", partial(call, *numbers))
        for call in (gpipe, one_forward_one_backward, prefill_only, bubble_share)
        for name, numbers in (
            ("stages", (1.5, 2)),
            ("stages", (True, 2)),
            ("batches", (2, "2")),
            ("batches", (2, True)),
        )
    ),
    (sp.ShapeError, "tolerance", partial(balanced, [1], 1, Work(1, 1), 0.0)),
    *(
        (sp.ShapeError, "one above 0", partial(Work, *numbers))
        for numbers in ((0, 0), (-1, 5), (5, -1), (math.nan, 1), (1, math.nan), (math.inf, 1))
    ),
    *(
        (sp.ShapeError, "finite costs >= 0", partial(split_stages, layers, 2, **more))
        for layers, more in list[Any](
            [
                ([math.nan, 1], {}),
                ([-1, 1], {}),
                ([1, math.inf], {}),
                ([np.longdouble("1e400")] * 2, {}),  # no float can hold it
                ([1, 1], {"first": math.nan}),
                ([1, 1], {"last": -1}),
            ]
        )
    ),
    (
        sp.ShapeError,
        "for ever after 1 slots",
        partial(timeline, [(Slot("F", 0), Slot("B", 0)), (Slot("B", 0), Slot("F", 0))]),
    ),
    *(
        (
            sp.ShapeError,
            f"{stages} stages and {batches} micro-batches",
            partial(call, stages, batches),
        )
        for call in (gpipe, one_forward_one_backward, prefill_only, bubble_share)
        for stages, batches in ((2, 0), (0, 2))
    ),
]
