"""List wrong calls that are refused without ranks, with the error expected of each."""

import math
import re
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch.autograd import forward_ad

import sp_core as sp
from sp_core.llama import Decoder, Sampling, generate, prefill_unequal, save
from sp_core.llama.pipeline import loss_and_gradients
from sp_core.llama.train import backward, load_training
from sp_core.mask import plan_blocks
from sp_core.nn.gradients import Placement

Row = tuple[type[Exception], str, Callable[[], object]]
"""The expected error, a pattern of its text, and the call."""
TWO = sp.Sharding.contiguous(4, 2)
DOCUMENTS = sp.Mask(documents=(0, 3, 8))


def balanced_by(chunk: Any) -> object:
    """Call `Sharding.balanced` with chunks of `chunk` tokens."""
    return sp.Sharding.balanced(4, 2, sp.Mask(), chunk=chunk)


def from_iterators(*positions: list[int]) -> object:
    """Call `Sharding.from_positions` with iterators, which give their items only once."""
    return sp.Sharding.from_positions(cast("Any", map(iter, positions)))


def attention(*shapes: tuple[int, ...], **changes: Any) -> object:
    """Call `local_attention` on ones: q has the first shape, k and v have the last."""
    q, k = (torch.ones(shape) for shape in (shapes[0], shapes[-1]))
    return sp.local_attention(q, k, k, **changes)


def attend_to_itself(q: torch.Tensor) -> Any:
    """Call `local_attention` with one tensor as q, k and v."""
    return sp.local_attention(q, q, q)


def merged(change: Callable[[torch.Tensor], Any], place: int) -> object:
    """Call `merge` after a change of one of its four tensors."""
    given: list[Any] = [ONES, ONES[..., 0], ONES, ONES[..., 0]]
    given[place] = change(given[place])
    return sp.merge(*given)


def forward_derivative(q: torch.Tensor) -> object:
    """Call `attend_to_itself` on a dual tensor of forward-mode AD."""
    with forward_ad.dual_level():
        return attend_to_itself(forward_ad.make_dual(q, q))


SAMPLING: Any = Sampling
HERE: Any = None
ONES = torch.ones(1, 3, 2, 4)
NULL: Any = type("Null", (), {"Split": print, "__bool__": lambda self: False})()
"""As MPI.COMM_NULL, or a communicator of mpi4py that has been freed."""
INTER: Any = type("Intercomm", (), {"Split": print, "is_inter": True, "rank": 0, "size": 1})()
"""As an intercommunicator of mpi4py, whose collectives send to the ranks of another group."""
with warnings.catch_warnings(action="ignore"):  # torch says once that this is a prototype
    NESTED = torch.nested.nested_tensor([torch.ones(2, 1, 1), torch.ones(1, 1, 1)])
"""A nested tensor, which says that its layout is strided."""
MODELS: list[tuple[Callable[..., object], tuple[Any, ...], dict[str, Any]]] = [
    (generate, (), {"max_tokens": 1}),
    (prefill_unequal, (None,), {}),
    (backward, (), {}),
    (loss_and_gradients, (), {}),
    (save, (), {}),
    (load_training, (), {"optimizer": None}),
    (Decoder, (), {}),
]
"""Functions that take a model, and further arguments, to be called without a model."""
ROWS: list[Row] = [
    (TypeError, "chunk='2'", partial(balanced_by, "2")),
    *(
        row
        for place in range(4)
        for row in (
            (sp.DtypeError, "must be a tensor, list", partial(merged, torch.Tensor.tolist, place)),
            (sp.ShapeError, r"\(1, 1,.*one shape", partial(merged, lambda x: x[:, :1], place)),
        )
    ),
    (TypeError, "comm=3 was given", partial(cast("Any", sp.Mesh), 3, sp=1)),
    *(
        (TypeError, "an intracommunicator .* neither null nor freed", partial(sp.Mesh, one, sp=1))
        for one in (NULL, INTER)
    ),
    *(
        (TypeError, text, partial(sp.Sharding.from_positions, cast("Any", positions)))
        for text, positions in (
            ("positions=None was given; pass a list with the positions", None),
            (r"positions=\[1, 2\] was given; pass a list with the positions", [1, 2]),
            ("positions are .True., needed integers below", [[True], [False]]),
            (r"positions are .0\.0, 1\.0., needed integers below", [[0.0, 1.0], [2.0]]),
            ("positions are .4611686018427387904., needed integers below", [[1 << 62]]),
            (r"positions are {8, 1}, needed integers below 2\*\*62 in a list", [{1, 8}, [0]]),
        )
    ),
    *(
        (TypeError, "groups=.* was given; pass a list with the ranks", partial(TWO.group, groups))
        for groups in list[Any]([None, 3, [0, 1], [[0.0], [1.0]], [[False, True]]])
    ),
    *(
        (TypeError, "x=.* was given; a Tensor is needed", call)
        for call in (
            partial(TWO.shard, cast("Any", torch.zeros(4).numpy()), 0, 0),
            partial(TWO.restore, cast("Any", [0, 1, 2, 3]), 0),
            partial(TWO.unshard, cast("Any", [[0, 1], [2, 3]]), 0),
        )
    ),
    *(
        (TypeError, "shards=.* was given; pass a list or tuple", partial(TWO.unshard, shards, 0))
        for shards in (HERE, cast("Any", iter([torch.zeros(2), torch.zeros(2)])))
    ),
    *(
        (sp.ShapeError, "covers 4 tokens, but dim 0 .* has 5", partial(call, torch.zeros(5), 0))
        for made in (TWO, sp.Sharding.zigzag(4, 2))
        for call in (made.sort_segments, made.unsort_segments)
    ),
    *(
        (sp.ShapeError, ".", call)
        for call in (
            partial(sp.Sharding.contiguous, -1, 2),
            partial(sp.Sharding.zigzag, 4, 0),
            partial(sp.Sharding.striped, 4, 2, -1),
            partial(sp.Sharding.zigzag, 4, 2, 2**62 - 3),
            partial(sp.Sharding.from_positions, [range(3, 2**62 + 1, 2**62 - 3), [4]]),
            partial(sp.Mask, documents=(0, 2**62 + 1)),
            partial(sp.Sharding.from_positions, []),
            partial(sp.Sharding.from_positions, [[0, 1], [1]]),
            partial(sp.Sharding.from_positions, [[0, 0, 1], [2]]),
            partial(balanced_by, 0),
            partial(sp.Sharding.from_positions, [[-1, 3]]),
            partial(TWO.shard, torch.zeros(5), 0, 0),
            partial(TWO.shard, torch.zeros(4), -1, 0),
            partial(TWO.shard, torch.zeros(4), 2, 0),
            partial(TWO.unshard, [torch.zeros(1), torch.zeros(3)], 0),
            partial(from_iterators, [0, 1], [1]),
            partial(from_iterators, [-3], [0]),
            partial(TWO.group, [[0], [0, 1]]),
            partial(TWO.group, [[0]]),
            partial(TWO.group, [[0], [1], [2]]),
            partial(DOCUMENTS.allowed, [0, 8, 3], range(8)),
            partial(sp.merge, *(ONES[0, 0], ONES[0, 0, 0, :1]) * 2),
        )
    ),
    *(
        (sp.ShapeError, f"dim {dim} was given for a tensor with 1 dims", call)
        for dim in (1, -2)
        for call in (
            partial(TWO.shard, torch.zeros(4), 0, dim),
            partial(TWO.unshard, [torch.zeros(2), torch.zeros(2)], dim),
            partial(TWO.restore, torch.zeros(4), dim),
        )
    ),
    *(
        (sp.ShapeError, rf"dim {dim} .* of shape \(2,\)\. Choose from -1 to 0", call)
        for dim in (1, -2)
        for call in (partial(Placement, (2,), dim, ()), partial(Placement.split, (2,), dim, 2))
    ),
    *(
        (
            sp.ShapeError,
            rf"ranges \[{re.escape(str(wrong))}\] .* dim with {count} slices",
            partial(Placement, shape, -1, ((range(1),), (range(0), wrong))),
        )
        for shape, count in (((2,), 2), ((3, 2), 2), ((), 1))
        for wrong in (range(-1, 1), range(1, 3))
    ),
    (TypeError, "dim=None was given", partial(TWO.shard, torch.zeros(4), 0, HERE)),
    *(
        (sp.ShapeError, "covers 7 tokens, but dim -1 .* has 9", call)
        for layout in (sp.Sharding.contiguous, sp.Sharding.zigzag, sp.Sharding.striped)
        for made in (layout(7, 2),)
        for call in (
            partial(made.shard, torch.zeros(2, 9), 0, -1),
            partial(made.restore, torch.zeros(2, 9), -1),
        )
    ),
    *(
        (error, text, partial(sp.Mask, **wrong))
        for error, text, wrong in (
            (ValueError, "at least 1", {"window": 0}),
            (TypeError, "window=2.0", {"window": 2.0}),
            (TypeError, "window=True", {"window": True}),
            (TypeError, "needed", {"documents": (0, 1.5)}),
            (TypeError, "documents is 5, needed integers", {"documents": 5}),
            (TypeError, "documents is .*, needed integers", {"documents": torch.tensor(5)}),
            (TypeError, "documents is .*, needed integers", {"documents": np.array([[0, 4]])}),
            (TypeError, "documents is .*, needed integers", {"documents": [torch.tensor([0, 4])]}),
            (TypeError, "documents is .*, needed integers", {"documents": ["0", "4"]}),
            (TypeError, "kv_documents is 5, needed integers", {"kv_documents": 5}),
            (TypeError, "needed", {"documents": (False, 4)}),
            (TypeError, "needed", {"documents": torch.tensor([False, True])}),
            (sp.ShapeError, "needed boundaries", {"documents": ()}),
            (sp.ShapeError, "needed boundaries", {"documents": (1, 4)}),
            (sp.ShapeError, "needed boundaries", {"documents": (0, 5, 4)}),
            (sp.ShapeError, "same number", {"kv_documents": (0,)}),
            (TypeError, "causal=1", {"causal": 1}),
            (sp.ShapeError, "2 doc.* 1 kv_doc", {"documents": (0, 2, 4), "kv_documents": (0, 4)}),
        )
    ),
    (
        sp.ShapeError,
        "documents end at 8, needed seq_len = 9",
        partial(DOCUMENTS.check_lengths, 9),
    ),
    (
        sp.ShapeError,
        "kv_documents end at 8, needed kv_seq_len = 9",
        partial(DOCUMENTS.check_lengths, 8, 9),
    ),
    (
        sp.ShapeError,
        "kv_documents end at 8, needed kv_seq_len = 0",
        partial(DOCUMENTS.check_lengths, 8, 0),
    ),
    *(
        (sp.ShapeError, "positions", call)
        for outside in ([8], [-1], [0, 8], [-1, 0], [*range(20, -1, -1)])
        for call in (
            partial(DOCUMENTS.allowed, outside, [0]),
            partial(plan_blocks, [0], outside, DOCUMENTS),
            partial(plan_blocks, [], outside, DOCUMENTS),
            partial(plan_blocks, outside, [], DOCUMENTS),
        )
    ),
    (
        sp.ShapeError,
        "positions 0..1299 given",
        partial(
            plan_blocks,
            [*range(299, -1, -1), *range(1299, 999, -1)],
            range(300),
            sp.Mask(causal=True, window=4, documents=(0, 300)),
        ),
    ),
    *(
        (TypeError, "integer", partial(plan_blocks, wrong, range(3)))
        for wrong in list[Any]([torch.rand(3), [0.5], torch.ones(3, dtype=torch.bool), [True], {0}])
    ),
    (
        sp.ShapeError,
        "one dimension",
        partial(plan_blocks, range(3), torch.zeros(2, 2, dtype=torch.int64)),
    ),
    *(
        (sp.ShapeError, "needed", partial(attention, *shapes))
        for shapes in (
            ((1, 3, 2, 4), (1, 3, 2, 5)),
            ((1, 3, 3, 4), (1, 3, 2, 4)),
            ((2, 3, 2, 4), (1, 3, 2, 4)),
            ((3, 2, 4), (3, 2, 4)),
            ((1, 3, 2, 4), (1, 3, 0, 4)),
            ((1, 3, 2, 0), (1, 3, 2, 0)),
            ((3, 2, 4), (1, 3, 2, 4)),
            ((1, 3, 2, 4), (3, 2, 4)),
        )
    ),
    (sp.ShapeError, "one shape", partial(sp.local_attention, ONES, ONES, ONES[:, 1:])),
    *(
        (sp.DtypeError, f"{name} must be a tensor", partial(sp.local_attention, **given))
        for name in "qkv"
        for wrong in (None, ONES.numpy())
        for given in (cast("Any", dict.fromkeys("qkv", ONES) | {name: wrong}),)
    ),
    *(
        (sp.ShapeError, f"{name} has layout torch.sparse", partial(sp.local_attention, **given))
        for name in "qkv"
        for given in (cast("Any", dict.fromkeys("qkv", ONES) | {name: ONES.to_sparse()}),)
    ),
    (sp.ShapeError, "q has layout nested", partial(sp.local_attention, NESTED, NESTED, NESTED)),
    *(
        (TypeError, f"{name}=.* was given; pass integers", call)
        for name in ("q_positions", "kv_positions")
        for wrong in (4, torch.tensor(4), "012")
        for call in (partial(attention, (1, 3, 1, 2), **{name: wrong}),)
    ),
    *(
        (sp.DeviceError, "needed one device", partial(sp.local_attention, ONES, *others))
        for others in ((ONES.to("meta"), ONES), (ONES, ONES.to("meta")))
    ),
    *(
        (
            sp.DtypeError,
            "q is a tensor .* without memory that could be sent, or with",
            partial(call, x),
        )
        for call, x in (
            (torch.vmap(attend_to_itself), torch.ones(2, 1, 3, 2, 4)),
            (torch.func.grad(lambda q: attend_to_itself(q).sum()), ONES),
            (forward_derivative, ONES),
        )
    ),
    *(
        (error, text, partial(attention, (1, 3, 1, 2), sinks=sinks))
        for error, text, sinks in (
            (sp.ShapeError, "needed a dense tensor", torch.ones(2)),
            (sp.ShapeError, "needed a dense tensor", torch.ones(1, 1)),
            (sp.ShapeError, "needed a dense tensor", torch.ones(1).to_sparse()),
            (sp.DtypeError, "needed floating", torch.ones(1, dtype=torch.int64)),
            (sp.DeviceError, "needed cpu", torch.ones(1, device="meta")),
        )
    ),
    *(
        (sp.DtypeError, "needed", partial(sp.local_attention, torch.ones(1, 3, 2, 4).to(q), k, k))
        for q, k in (
            (torch.float32, torch.ones(1, 3, 2, 4).double()),
            (torch.int64, torch.ones(1, 3, 2, 4).long()),
        )
    ),
    (sp.DtypeError, "needed", partial(sp.local_attention, ONES, ONES, ONES.double())),
    (
        sp.ShapeError,
        "needed seq_len = 3",
        partial(attention, (1, 3, 1, 2), mask=sp.Mask(documents=(0, 4))),
    ),
    *(
        (TypeError, text, partial(attention, (1, 3, 1, 2), **wrong))
        for text, wrong in (
            ("a Mask is needed", {"mask": True}),
            ("a Mask is needed", {"mask": torch.ones(3, 3)}),
            ("return_lse='no'", {"return_lse": "no"}),
            (r"pass 0, a number from 1\.2e-38 to 3\.4e38", {"softmax_scale": 1e39}),
            ("pass 0, a number from 1", {"softmax_scale": 1e-38}),
            ("pass 0, a number from 1", {"softmax_scale": -1e-46}),
        )
    ),
    *(
        (sp.ShapeError, "needed 3", partial(attention, (1, 3, 1, 2), **{name: range(length)}))
        for name in ("q_positions", "kv_positions")
        for length in (2, 4)
    ),
    *(
        (
            TypeError,
            r"pass a number from 1\.2e-38 to 3\.4e38, .* or None",
            partial(attention, (1, 3, 1, 2), softcap=softcap),
        )
        for softcap in (1e39, 10**400, 1e-38, 0.0, -1.0, float("inf"), float("nan"), True, "5")
    ),
    *(
        (error, text, partial(attention, (1, 3, 1, 2), alibi=alibi))
        for error, text, alibi in (
            (TypeError, "pass a finite slope", 0.5),
            (TypeError, "pass a finite slope", [float("nan")]),
            (TypeError, r"pass a finite slope, at most 3\.4e38", [1e39]),
            (TypeError, r"pass a finite slope, at most 3\.4e38", [-1e39]),
            (TypeError, "pass a finite slope", torch.ones(1, 1)),
            (TypeError, "pass a finite slope", torch.tensor(0.5)),
            (sp.ShapeError, "2 ALiBi slopes given, needed 1", (0.5, 0.25)),
            (ValueError, "they are constants", torch.ones(1, requires_grad=True)),
        )
    ),
    (
        TypeError,
        "causal was given, which no attention takes.*mask=Mask",
        partial(attention, (1, 3, 1, 2), causal=True),
    ),
    (
        TypeError,
        r"Pass Mask\(causal=True\)",
        partial(sp.Sharding.balanced, 8, 2, mask="causal"),  # type: ignore[arg-type]
    ),
    *((ValueError, "temperature", partial(Sampling, x)) for x in (-1.0, math.inf, math.nan)),
    (ValueError, "top_k", partial(Sampling, 1.0, 0)),
    *(
        (
            TypeError,
            re.escape(f"{name}={value!r} was given; pass {needed}."),
            partial(SAMPLING, **{name: value}),
        )
        for name, wrong, needed in (
            ("temperature", ("1", None, True, [1.0]), "a number"),
            ("top_k", ("5", 5.0, True), "a whole number, or None"),
            ("top_p", ("0.5", True), "a number, or None"),
            ("seed", ("1", None, 0.5), "a whole number"),
        )
        for value in wrong
    ),
    *((ValueError, "top_p", partial(Sampling, 1.0, None, x)) for x in (-0.5, 0.0, 1.5)),
    *(
        (TypeError, "Make one with load or create", partial(call, None, [[1]], *more, **named))
        for call, more, named in MODELS
    ),
]
