"""List the capabilities of tensor-parallel layers with sequence parallelism, and draw problems.

A problem is one pair of layers. The column-parallel one gathers the tokens. The row-parallel one
sums over the ranks and gives each rank its tokens. Sizes that a capability is not about suit every
library.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from oracle.strategies import seeds
from torch import Tensor

from conformance import pair
from sp_core.testing.tolerance import bound

CAPABILITIES = {
    "forward": "the output of each rank's tokens",
    "backward": "gradients of the input and of both weights",
    "bias": "both layers have a bias, with its gradient",
    "frozen": "one weight has no gradient",
    "twice": "the same layers applied twice; their gradients add up",
    "odd sizes": "odd numbers of tokens and features on each rank",
    "uneven length": "a length that the number of ranks does not divide",
    "uneven features": "features that the number of ranks does not divide",
    "float64": "errors at the round-off of float64",
    "bfloat16": "errors at the round-off of bfloat16",
}
"""Every capability, in the order in which they are tried."""
FORWARD_ONLY = ("forward",)
"""The capabilities that are tried without gradients."""
CALL = "Pair"
"""The name of the adapter's class that is tested."""


@dataclass(frozen=True)
class Layers:
    """A pair of layers and its input.

    Args:
        batch: the number of sequences.
        seq_len: the number of tokens of each sequence.
        hidden: the number of features of a token.
        inner: the number of features between the layers, which are split over the ranks.
        bias: whether both layers have a bias.
        frozen: the name of the parameter without a gradient; "" for none.
        times: how often the pair is applied.
        dtype: the dtype of all tensors.
        gradients: whether gradients are computed.
        seed: the seed of all numbers.
        shards: the positions of each rank.
    """

    batch: int
    seq_len: int
    hidden: int
    inner: int
    bias: bool
    frozen: str
    times: int
    dtype: str
    gradients: bool
    seed: int
    shards: tuple[tuple[int, ...], ...]


def results(
    problem: Layers, rank: int, call: Callable[..., Any], variant: str, comm: Any
) -> dict[str, Tensor]:
    """Call a library on this rank; return its output and gradients, by name."""
    return pair.results(told(problem), rank, call, variant, comm)


def expected(problem: Layers, rank: int) -> dict[str, tuple[Tensor, Tensor]]:
    """Return, by name, each expected result of this rank and the error that is allowed.

    Each pass through the pair, forward or backward, has one sum over the ranks. Every rank rounds
    its term of that sum.
    """
    p = told(problem)
    growth = 2 * p["times"] * (p["hidden"] + p["inner"]) + p["batch"] * p["seq_len"]
    options = (getattr(torch, p["dtype"]), growth, 2 * p["times"] * len(p["shards"]))
    value, scale = (pair.alone(p, of) for of in (torch.clone, torch.abs))
    found = {}
    for name in value:
        wanted, terms = (pair.part(p, name, x[name], rank) for x in (value, scale))
        found[name] = (wanted, bound(terms, *options))
    return found


@st.composite
def problems(
    draw: st.DrawFn,
    capability: str,
    size: int,
    needs: Any,
    gradients: bool,
    full: bool = True,
) -> Layers:
    """Draw problems of one capability on `size` ranks.

    Args:
        draw: Hypothesis' function for drawing.
        capability: a name in `CAPABILITIES`.
        size: the number of ranks.
        needs: the problems that the library can take. Only the dtype is used.
        gradients: whether gradients are computed.
        full: not used, because there is no mask.
    """
    least, beyond = 1 if capability == "odd sizes" else 2, st.integers(1, size - 1)
    tokens, hidden, inner = (2 * draw(st.integers(0, 3)) + least for _ in range(3))
    seq_len = tokens * size + draw(beyond) * (capability == "uneven length")
    weights = ["up.weight", "down.weight"] if capability == "frozen" else [""]
    return Layers(
        batch=draw(st.integers(1, 3)),
        seq_len=seq_len,
        hidden=hidden,
        inner=inner * size + draw(beyond) * (capability == "uneven features"),
        bias=capability == "bias",
        frozen=draw(st.sampled_from(weights)),
        times=1 + (capability == "twice"),
        dtype=capability if capability in ("float64", "bfloat16") else needs.dtype,
        gradients=gradients,
        seed=draw(seeds()),
        shards=tuple(tuple(s.tolist()) for s in torch.arange(seq_len).tensor_split(size)),
    )


def told(problem: Layers) -> dict[str, Any]:
    """Return a problem as plain data."""
    return {**asdict(problem), "shards": [list(shard) for shard in problem.shards]}


def smallest(data: dict[str, Any]) -> str:
    """Describe a problem, given as plain data, in one line for a table."""
    parts = [f"P {len(data['shards'])}", f"B {data['batch']}", f"S {data['seq_len']}"]
    parts += [f"E {data['hidden']}", f"F {data['inner']}", data["dtype"]]
    parts += ["bias"] * data["bias"] + [f"{data['frozen']} frozen"] * bool(data["frozen"])
    return ", ".join([*parts, *["twice"] * (data["times"] > 1)])
