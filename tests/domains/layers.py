"""Declare the domain of layers whose weights all ranks hold, compared with their definitions."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from oracle import reference
from oracle.collective_cases import MEMORIES, in_memory
from oracle.once import contents, once
from oracle.strategies import DTYPES, EVERY_LAYOUT
from torch import Tensor, nn

import sp_core as sp
from domains import attention
from domains.declared import Call, Parts, Values, near, normal, spans, values
from domains.situations import on_group
from sp_core.attention import accumulation_dtype
from sp_core.testing import device
from sp_core.testing.tolerance import bound, unit_roundoff

Weights = Mapping[str, Tensor]
Definition = Callable[..., Tensor]
"""A function of tokens, weights by name, drawn values, positions, and a function that rounds."""

MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "training": nullcontext,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
}


def precision(drawn: Values) -> torch.dtype:
    """Return the dtype of most computations; autocast lowers float32 to bfloat16."""
    dtype: torch.dtype = getattr(torch, drawn["dtype"] or "float32")
    return torch.bfloat16 if drawn["(autocast)"] != "off" and dtype == torch.float32 else dtype


TOKENS: dict[str, Parts] = {
    "dtype": values(*DTYPES) | {"default": lambda c, v: None},
    "(autocast)": values("off"),
    "x.seq_len": {name: draw for name, draw in attention.lengths().items() if name != "above 100"},
    "x.batch": spans((1, 1), (2, 3), (0, 0)),
    "x.dims": values("three"),
    "x.memory": values(*MEMORIES),
    "x.upstream": values(*MEMORIES),
    "x.magnitude": {
        "1": lambda c, v: 1.0,
        "small": lambda c, v: 0.05 if precision(v) == torch.float16 else 1e-3,
        "large": lambda c, v: 10.0 if precision(v).itemsize == 2 else 100.0,
    },
    "x.gradient": values(True, False),
    "sharding.layout": values(*EVERY_LAYOUT),
    "sharding.start": spans((0, 0), (1, 9), (1000, 100_000)),
}
COMMON: dict[str, Parts] = {
    "device": {"default": lambda c, v: None, "given": lambda c, v: device()},
    "(frozen)": values("no weight", "some", "all"),
    "(mode)": values(*MODES),
    "(called)": values("layer", "constructor"),
}
LOWER: dict[str, Parts] = {"(autocast)": values("off", "on", "weights of two dtypes")}
CHUNK: dict[str, Parts] = {
    "chunk": values(None) | spans((1, 1), (2, 9), (1000, 2000), (2**60, 2**62))
}
WIDTHS = spans((3, 16), (1, 2), (17, 64), (65, 130))


@dataclass(frozen=True)
class Kind:
    """Describe a kind of layer.

    Attributes:
        made: the layer's class.
        names: the names of the constructor's arguments, without the communicator.
        definition: computes the layer's output for all tokens.
        takes: the names of the arguments of `forward`.
    """

    made: Callable[..., nn.Module]
    names: tuple[str, ...]
    definition: Definition
    takes: tuple[str, ...] = ("x",)

    def arguments(self, drawn: Values) -> Values:
        """Return the constructor's arguments; those drawn as "default" are left out."""
        given = {name: drawn[name] for name in self.names if drawn[name] != "default"}
        dtype = drawn["dtype"] and getattr(torch, drawn["dtype"])
        further = {"device": drawn["device"], "dtype": dtype}
        return given | {name: value for name, value in further.items() if value is not None}


def sharding_of(drawn: Values, size: int, length: str = "x.seq_len") -> sp.Sharding:
    """Return the drawn sharding of the tokens over `size` ranks."""
    return EVERY_LAYOUT[drawn["sharding.layout"]](drawn[length], size, drawn["sharding.start"])


def called_in(mode: str, drawn: Values, layer: nn.Module, **given: Any) -> Tensor:
    """Call a layer in a mode, with the autocast that was drawn."""
    lower = precision(drawn)
    is_lower = drawn["(autocast)"] != "off" and lower.itemsize == 2
    with MODES[mode](), torch.autocast(device().type, lower, enabled=is_lower):
        out: Tensor = layer(**given)
    return out


def gradients_of(layer: nn.Module, x: Tensor, out: Tensor, upstream: Tensor) -> dict[str, Tensor]:
    """Return the gradients of the input and the weights that learn, by name."""
    leaves = {"x": x} | dict(layer.named_parameters())
    leaves = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
    assert out.requires_grad == bool(leaves)
    grads = torch.autograd.grad(out, list(leaves.values()), upstream.to(out)) if leaves else ()
    return dict(zip(leaves, grads, strict=True))


class Problem:
    """Hold the drawn tokens and upstream gradient of one group of ranks; fill and judge a layer."""

    def __init__(self, kind: Kind, drawn: Values, group: sp.Communicator) -> None:
        self.kind, self.drawn, self.group = kind, drawn, group
        self.sharding = sharding_of(drawn, group.size)
        shape = (drawn["x.batch"], drawn["x.seq_len"], drawn["hidden"])
        dtype = drawn["dtype"] or "float32"
        self.whole, self.grad = (normal(drawn["seed"] + n, shape, dtype) for n in (0, 1))
        self.whole = self.whole * drawn["x.magnitude"]
        self.whole = in_memory(self.whole, drawn["x.memory"]).contiguous()
        self.grad = in_memory(self.grad, drawn["x.upstream"]).contiguous()
        self.x = self.placed(self.whole, drawn["x.memory"]).requires_grad_(drawn["x.gradient"])

    def placed(self, whole: Tensor, memory: str) -> Tensor:
        """Return this rank's part of a tensor, with the drawn dims and the named memory layout."""
        mine = self.sharding.shard(whole, self.group.rank, 1)
        dims = {"two": mine.flatten(0, 1), "four": mine.unsqueeze(2)}
        mine = dims.get(self.drawn["x.dims"], mine).to(self.group.device)
        return in_memory(mine, memory).detach().clone(memory_format=torch.preserve_format)

    def fill(self, layer: nn.Module) -> nn.Module:
        """Fill a layer with random weights and return it; some are frozen or lower, as drawn."""
        for n, weight in enumerate(layer.parameters()):
            numbers = normal(self.drawn["seed"] + 7 + n, weight.shape, "float64")
            weight.data = numbers.to(weight) * min(0.5, weight.shape[-1] ** -0.5)
            learns = {"no weight": True, "some": (n + self.drawn["seed"]) % 2 == 0, "all": False}
            weight.requires_grad_(learns[self.drawn["(frozen)"]])
        if self.drawn["(autocast)"] == "weights of two dtypes":
            for linear in [module for module in layer.modules() if isinstance(module, nn.Linear)][
                ::2
            ]:
                linear.to(precision(self.drawn))
        return layer.train(self.drawn.get("(training)", True)).to(self.group.device)

    def given(self) -> Values:
        """Return the arguments of `forward`."""
        known: Values = {"x": self.x, "sharding": self.sharding}
        further = {"mask": "(call mask)", "seed": "seed.value"}
        known |= {name: self.drawn.get(factor) for name, factor in further.items()}
        return {name: known[name] for name in self.kind.takes if known[name] is not None}

    def judge(self, layer: nn.Module, out: Tensor) -> None:
        """Compare the output, then output and gradients of a second call in training mode."""
        self.compare(layer, {"out": out})
        out = called_in("training", self.drawn, layer, **self.given())
        upstream = self.placed(self.grad, self.drawn["x.upstream"])
        self.compare(layer, {"out": out, **gradients_of(layer, self.x, out, upstream)})

    def compare(self, layer: nn.Module, found: Mapping[str, Tensor]) -> None:
        """Compare results by name with the reference, which has the weights of `layer`.

        The reference has the tokens of all ranks. "out" and the gradient "x" are compared with this
        rank's part of it. Any other name is that of a weight, with the weight's gradient. Raise
        AssertionError if a result is wrong.
        """
        weights = {
            name: weight.detach().double().cpu() for name, weight in layer.named_parameters()
        }
        wanted = self.expected(weights)
        for name, actual in found.items():
            value, scale = wanted.values[name], wanted.scales[name]
            if name in ("out", "x"):
                value, scale = (self.sharding.shard(t, self.group.rank, 1) for t in (value, scale))
                actual = actual.reshape(value.shape)
            told = f"{type(layer).__name__} {name if name in ('out', 'x') else 'weights'}"
            allowed = bound(scale, precision(self.drawn))
            allowed += self.additions(layer, name, actual.dtype) * scale
            near(told, actual, value, allowed, f"{told} {name}")

    def additions(self, layer: nn.Module, name: str, dtype: torch.dtype) -> float:
        """Return the error that adding up the longest sum over tokens may cause, over its scale.

        A sum of n terms may be off by (n - 1) u times their sizes, for a round-off u (Higham,
        "Accuracy and Stability of Numerical Algorithms", 2002, section 4.2). Equal tokens come
        near this bound: the roundings of all partial sums have one sign. The scale only
        contains the roundings of the terms, which partly cancel.

        torch's kernel of layer norm adds the tokens in the dtype of its weights. Matrix products
        accumulate in float32 or wider; a feed-forward in chunks adds the products of the chunks.
        """
        batch, seq_len, _ = self.whole.shape
        terms = 0 if name in ("out", "x") else batch * seq_len
        if heads := self.drawn.get("num_heads"):
            # A query sums over its keys; the gradient of a key sums over the queries of all heads
            # that share it.
            shared = 1 if name == "out" else heads // (self.drawn["num_kv_heads"] or heads)
            terms = max(terms, shared * seq_len)
        owner = layer.get_submodule(name.rpartition(".")[0])
        is_norm, chunk = isinstance(owner, sp.LayerNorm), self.drawn.get("chunk")
        chunks = -(-batch * seq_len // chunk) if chunk and isinstance(owner, nn.Linear) else 0
        added = terms * unit_roundoff(dtype if is_norm else accumulation_dtype(dtype))
        # angles of up to `end` radians are rounded here and in the reference
        angles = 2 * self.sharding.end if self.drawn.get("rope") else 0
        return added + chunks * unit_roundoff(dtype) + angles * unit_roundoff(torch.float64)

    def expected(self, weights: Weights) -> reference.Reference:
        """Return the reference's values and error scales by name."""
        positions = (
            torch.cat([self.sharding.positions(rank) for rank in range(self.group.size)])
            .sort()
            .values
        )

        def run(rounding: Any, leaves: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
            x, grad = leaves["x"], rounding(self.grad.double())
            definition = partial(self.kind.definition, x, leaves, self.drawn, positions, rounding)
            out = definition() if x.numel() else 0 * x
            return (out * grad).sum(), {"out": out}

        tensors = {"x": self.whole, **weights}
        key = (
            self.kind.made.__name__,
            repr(sorted(self.drawn.items(), key=str)),
            contents(self.grad, *tensors.values()),
        )
        # two samples miss some of many elements; the mean over many features then replaces them
        samples = 2 if self.drawn["x.seq_len"] > 1000 and self.drawn["hidden"] > 16 else 8
        return once(key, lambda: reference.sensitivity(run, tensors, samples))


def on_ranks(kind: Kind, group: sp.Communicator, drawn: Values) -> Call:
    """Return the call of a layer, or of its constructor."""
    problem, given = Problem(kind, drawn, group), kind.arguments(drawn) | {"comm": group}

    def judge(layer: nn.Module) -> None:
        dtype = given.get("dtype", torch.float32)
        assert {weight.dtype for weight in layer.parameters()} == {dtype}
        problem.fill(layer)
        problem.judge(layer, called_in(drawn["(mode)"], drawn, layer, **problem.given()))

    if drawn["(called)"] == "constructor":
        return Call(kind.made, given, judge)
    layer = problem.fill(kind.made(**given))
    function = partial(called_in, drawn["(mode)"], drawn, layer)
    return Call(function, problem.given(), partial(problem.judge, layer))


def normalised(x: Tensor, weights: Weights, drawn: Values, _: Tensor, rounding: Any) -> Tensor:
    """Return the reference's layer norm, or its root mean square norm if there is no bias.

    `rounding` rounds x and every intermediate result.
    """
    eps = {} if drawn["eps"] == "default" else {"eps": drawn["eps"]}
    if "bias" in weights:
        return rounding(
            reference.layer_norm(
                rounding(x), weights["weight"], weights["bias"], **eps, rounding=rounding
            )
        )
    return rounding(reference.rms_norm(rounding(x), weights["weight"], **eps, rounding=rounding))


def check_fed_forward(weights: Weights, drawn: Values, of: str = "") -> None:
    """Check that a feed-forward has the weights, with the shapes, that were drawn."""
    hidden, inner = drawn["hidden"], drawn["ffn_hidden"]
    inner = 4 * hidden if inner == "default" else inner
    shapes = {"up": (inner, hidden), "down": (hidden, inner), "gate": (inner, hidden)}
    wanted = {name: shapes[name] for name in shapes if name != "gate" or drawn["gated"]}
    found = {name: tuple(x.shape) for name, x in weights.items() if x.dim() == 2 and of in name}
    assert found == {f"{of}{name}.weight": shape for name, shape in wanted.items()}
    assert (f"{of}up.bias" in weights) == drawn["bias"]


def fed_forward(x: Tensor, weights: Weights, drawn: Values, _: Tensor, rounding: Any) -> Tensor:
    """Return the reference's feed-forward: two linear layers, or three if it is gated.

    `rounding` rounds x and every intermediate result.
    """
    check_fed_forward(weights, drawn)
    return rounding(reference.feed_forward(rounding(x), weights, rounding))


NORM = TOKENS | {
    "x.dims": values("three", "two", "four"),
    "hidden": WIDTHS,
    "eps": values("default", 1e-3, 1.0),
}


KINDS = (
    (NORM, Kind(sp.LayerNorm, ("hidden", "eps"), normalised)),
    (NORM, Kind(sp.RMSNorm, ("hidden", "eps"), normalised)),
    (
        TOKENS
        | (
            {
                "x.dims": values("three", "two", "four"),
                "hidden": WIDTHS,
                "ffn_hidden": values("default") | WIDTHS,
                "gated": values(False, True),
                "bias": values(True, False),
            }
            | CHUNK
        )
        | LOWER,
        Kind(sp.FeedForward, ("hidden", "ffn_hidden", "gated", "bias", "chunk"), fed_forward),
    ),
)
SUBJECTS = [
    on_group(
        kind.made.__name__,
        factors | COMMON,
        partial(on_ranks, kind),
        covers=(f"{kind.made.__name__}.forward",),
    )
    for factors, kind in KINDS
]
