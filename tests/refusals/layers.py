"""List wrong calls of layers, their parts and their costs, with the error expected of each."""

import math
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from refusals.pure import HERE, ONES, TWO, Row

import sp_core as sp
from sp_core import cost
from sp_core.nn import gradients, loss

ROPE = sp.Rope(4)
DROPPED = {"x": torch.ones(1, 4, 3), "p": 0.5, "seed": 1, "positions": range(4)}
THERE: Any = SimpleNamespace(agree_on=str)
LAYERS: list[Callable[..., object]] = [
    *(partial(make, hidden=4) for make in (sp.RMSNorm, sp.LayerNorm, sp.FeedForward)),
    *(partial(make, hidden=4, num_heads=2) for make in (sp.SelfAttention, sp.TransformerBlock)),
]
YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}
LLAMA3 = YARN | {"rope_type": "llama3", "low_freq_factor": 1, "high_freq_factor": 4}


def dropout(**changes: Any) -> object:
    """Call `dropout` with changed arguments."""
    given: dict[str, Any] = DROPPED | changes
    return sp.dropout(given.pop("x"), given.pop("p"), **given)


OF_DROPOUT: list[tuple[type[Exception], str, dict[str, Any]]] = [
    (TypeError, r"p='\.1'", {"p": ".1"}),
    (ValueError, "p=1.0", {"p": 1.0}),
    (ValueError, "p=nan", {"p": math.nan}),
    (ValueError, "p=-0.5", {"p": -0.5}),
    (ValueError, "seed=-1", {"seed": -1}),
    (ValueError, "seed=4611686018427387904", {"seed": 2**62}),
    (TypeError, r"seed=0\.5", {"seed": 0.5}),
    (sp.ShapeError, "3 positions", {"positions": range(3)}),
    *((TypeError, f"positions={x} was given; pass integers", {"positions": x}) for x in (None, 3)),
    (TypeError, "features=3 was given; pass integers", {"features": 3}),
    (sp.ShapeError, "4 positions", {"x": torch.ones(3, 4)}),
    (sp.ShapeError, "2 features", {"features": range(2)}),
    (sp.DtypeError, "int64", {"x": torch.ones(1, 4, 3).long()}),
    (sp.DtypeError, "x must be a tensor, int was given", {"x": 3}),
]
"""Wrong arguments of `dropout`, which are refused in evaluation, too."""
ROWS: list[Row] = [
    *((sp.ShapeError, "even", partial(sp.Rope, dim)) for dim in (3, 0, HERE)),
    *(
        (TypeError, text, partial(sp.Rope, **{"head_dim": 4} | wrong))
        for text, wrong in list[tuple[str, dict[str, Any]]](
            [
                ("head_dim='4'", {"head_dim": "4"}),
                ("base='x'", {"base": "x"}),
                (r"scaling=\[1\]", {"scaling": [1]}),
                ("base=int 1000", {"base": 10**400}),
                *(
                    (rf"scaling\['{name}'\]=.* was given; pass", {"scaling": kind | {name: x}})
                    for kind, names in (
                        ({"rope_type": "linear"}, ["factor"]),
                        (LLAMA3, [*LLAMA3][1:]),
                        (YARN, [*YARN, "beta_fast", "beta_slow", "attention_factor"][1:]),
                        (YARN, ["mscale", "mscale_all_dim", "truncate"]),
                    )
                    for name in names
                    for x in ("x", [4], 10**400)
                ),
            ]
        )
    ),
    *(
        (ValueError, text, partial(sp.Rope, 4, scaling=scaling))
        for text, scaling in (
            ("needs a rope_type, .*'yarn'.* one process", {"rope_type": "dynamic", "factor": 2.0}),
            ("needs a rope_type, ", {"factor": 2.0}),
            ("lacks original_max_position_embeddings", {"rope_type": "yarn", "factor": 2.0}),
            ("lacks factor", {"rope_type": "linear", "factor": None}),
            ("lacks low_freq_factor, high_freq_factor;", {**YARN, "rope_type": "llama3"}),
        )
    ),
    *(
        (ValueError, f"scaling has {name}=", partial(sp.Rope, 4, scaling=kind | {name: x}))
        for name, x in (("rope_theta", 5e5), ("partial_rotary_factor", 0.5))
        for kind in ({"rope_type": "default"}, {"rope_type": "linear", "factor": 2.0}, YARN)
    ),
    *(
        (TypeError, "positions are .*, needed integers", partial(ROPE.apply, ONES, wrong))
        for wrong in list[Any](
            [
                *(HERE, 3, [torch.ones(2)], np.array([[0], [1]]), [torch.tensor(0.5)]),
                *(range(2**62 - 3, 2**62 + 1), range(3 - 2**62, -1 - 2**62, -1), range(2**64)),
            ]
        )
    ),
    (ValueError, "base", partial(sp.Rope, 4, base=0.0)),
    *((ValueError, "base", partial(sp.Rope, 4, base=base)) for base in (math.nan, math.inf)),
    *(
        (ValueError, f"{name}={x}.* positive", partial(sp.Rope, 4, scaling=scaling | {name: x}))
        for scaling in (YARN, LLAMA3)
        for name in ("factor", "original_max_position_embeddings")
        for x in (0.0, -2.0, math.nan, math.inf)
    ),
    *(
        (ValueError, f"{name}={float(x)}", partial(sp.Rope, 4, scaling=LLAMA3 | {name: x}))
        for name, x in (
            ("high_freq_factor", 1),
            ("high_freq_factor", math.inf),
            ("low_freq_factor", -math.inf),
            *((f"{end}_freq_factor", math.nan) for end in ("low", "high")),
        )
    ),
    *(
        (ValueError, "attention_factor", partial(sp.Rope, 4, scaling=YARN | wrong))
        for wrong in (
            {"attention_factor": math.nan},
            {"attention_factor": -1.0},
            {"attention_factor": 0.0},
            {"attention_factor": math.inf},
            {"mscale": math.nan, "mscale_all_dim": 1.0},
        )
    ),
    (ValueError, r"base=1\.0", partial(sp.Rope, 4, 1.0, YARN)),
    *(
        (ValueError, "beta_fast", partial(sp.Rope, 4, scaling=YARN | wrong))
        for wrong in (
            {"beta_fast": 1},
            {"beta_slow": 0},
            {"beta_fast": math.inf},
            {"beta_fast": math.nan},
            {"beta_slow": math.nan},
            {"original_max_position_embeddings": 6},
        )
    ),
    *(
        (sp.ShapeError, "needed", partial(ROPE.apply, torch.ones(shape), range(3)))
        for shape in ((1, 3, 2, 6), (1, 4, 2, 4), (3, 2, 4))
    ),
    (sp.DtypeError, "floating", lambda: ROPE.apply(torch.ones(1, 3, 2, 4).long(), range(3))),
    *(
        (TypeError, f"comm={comm} was given; a Communicator", partial(make, comm=comm))
        for comm in (None, 3)
        for make in LAYERS
    ),
    *(
        (ValueError, f"{name}={wrong} was given", partial(make, **{"comm": THERE, name: wrong}))
        for make, name, wrong in (
            *((make, "hidden", wrong) for make in LAYERS for wrong in (0, -2)),
            *((LAYERS[2], name, wrong) for name in ("ffn_hidden", "chunk") for wrong in (0, -2)),
            *(
                (make, name, wrong)
                for make in LAYERS[3:]
                for name in ("num_heads", "num_kv_heads", "head_dim")
                for wrong in (0, -2)
            ),
        )
    ),
    *(
        (
            sp.ShapeError,
            r"Rope\(8, .* head_dim 4; pass Rope\(4\)",
            partial(make, num_heads=1, comm=THERE, rope=sp.Rope(8)),
        )
        for make in LAYERS[3:]
    ),
    *(
        (TypeError, text, partial(make, **{"comm": THERE} | wrong))
        for make, text, wrong in list[tuple[Callable[..., object], str, dict[str, Any]]](
            [
                *((make, "hidden='4'", {"hidden": "4"}) for make in LAYERS),
                (LAYERS[2], r"ffn_hidden=0\.5", {"ffn_hidden": 0.5}),
                *(
                    (make, text, wrong)
                    for make in LAYERS[3:]
                    for text, wrong in (
                        ("attention='ring' was given; pass a scheme", {"attention": "ring"}),
                        ("num_heads=None", {"num_heads": None}),
                        (r"num_kv_heads=0\.5", {"num_kv_heads": 0.5}),
                        ("rope=10000 was given; pass a Rope", {"rope": 10000}),
                    )
                ),
                (LAYERS[4], r"dropout='\.1'", {"dropout": ".1"}),
            ]
        )
    ),
    *(
        (TypeError, "None was given; a Communicator", call)
        for call in (
            partial(sp.RowParallelLinear.from_linear, torch.nn.Linear(2, 2), comm=HERE),
            partial(gradients.reduce_gradients, [], data=HERE),
            partial(gradients.clip_gradient_norm, [], 1.0, tensor=HERE),
            partial(loss.next_token_labels, ONES, comm=HERE, sharding=TWO),
            partial(loss.next_token_loss, ONES, ONES, tensor=HERE, data=HERE),
            partial(loss.next_token_loss, ONES, ONES, tensor=THERE, data=HERE),
        )
    ),
    *(
        (ValueError, f"dropout={p} was given", partial(LAYERS[4], comm=THERE, dropout=p))
        for p in (1.0, 1.5, -0.1, math.nan)
    ),
    *(
        (error, text, partial(dropout, training=training, **wrong))
        for training in (True, False)
        for error, text, wrong in OF_DROPOUT
    ),
    *(
        (sp.ShapeError, f"rank {rank}", call)
        for problem in (
            cost.Attention(TWO, TWO, sp.Mask(), 2, 6, 3, 5, 2, shared=shared)
            for shared in (False, True)
        )
        for rank in (-1, 2)
        for call in (
            *(
                partial(each, problem, rank)
                for each in (cost.allgather_kv, cost.ring, cost.ulysses)
            ),
            *(partial(cost.hybrid, problem, *at, [[0], [1]]) for at in ((rank, 0), (0, rank))),
            partial(cost.tp_sp, TWO, rank, 2, 5, 2),
        )
    ),
]
