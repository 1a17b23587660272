"""Declare the domain of parallel linear layers, on whole numbers: all sums are exact."""

from functools import partial
from random import Random

import torch
from oracle.collective_cases import MEMORIES, in_memory
from oracle.strategies import DTYPES
from torch import Tensor, nn

import sp_core as sp
from domains import layers
from domains.declared import Call, Values, leaf, same, spans, values, whole
from domains.exact import places
from domains.layers import MODES, TOKENS
from domains.placements import HELD
from domains.situations import on_group
from sp_core.segments import split_sizes

SPLIT = {"ColumnParallelLinear": "linear.out_features", "RowParallelLinear": "linear.in_features"}
"""By layer, the factor of the features that are split over the ranks."""


def sizes(chance: Random, drawn: Values, *, of: str, held: str) -> tuple[int, ...]:
    """Return how many features each rank has: dealt in a way of `HELD`, to ranks in any order."""
    found = [sum(map(len, part)) for part in HELD[held](chance, drawn[of], drawn["comm.ranks"])]
    return tuple(chance.sample(found, len(found)))


def whole_numbers(drawn: Values, key: int, *shape: int) -> Tensor:
    """Return small whole numbers."""
    return whole(31 * drawn["seed"] + key, shape, drawn["linear.dtype"], -2, 2)


def ordinary(drawn: Values) -> nn.Linear:
    """Return the ordinary layer with all weights, the same on every rank."""
    lower = drawn["(autocast)"] == "on, lower weights"
    dtype = layers.precision(drawn) if lower else getattr(torch, drawn["linear.dtype"])
    linear = nn.Linear(
        drawn["linear.in_features"], drawn["linear.out_features"], drawn["linear.bias"], dtype=dtype
    )
    for key, (name, parameter) in enumerate(linear.named_parameters()):
        numbers = whole_numbers(drawn, key, *parameter.shape)
        parameter.data = in_memory(numbers.to(dtype), drawn["linear.memory"])
        parameter.requires_grad_(drawn["linear.frozen"] not in (name, "all"))
    return linear


class Case:
    """Hold an ordinary layer and one rank's input, and judge the parallel layer made of it."""

    def __init__(self, name: str, drawn: Values, group: sp.Communicator) -> None:
        self.is_column, self.made = name == "ColumnParallelLinear", getattr(sp, name)
        self.drawn, self.group, self.rank = (
            drawn | {"dtype": drawn["linear.dtype"]},
            group,
            group.rank,
        )
        self.sharding = (
            layers.sharding_of(drawn, group.size) if drawn["(tokens)"] == "split" else None
        )
        self.linear = ordinary(self.drawn)
        self.sizes = list(drawn["sizes"] or split_sizes(drawn[SPLIT[name]], group.size))
        sharding = self.sharding or sp.Sharding.contiguous(drawn["x.seq_len"], 1)
        self.gathered = places(
            [int(p) for rank in range(sharding.size) for p in sharding.positions(rank)]
        )
        shape = (drawn["x.batch"], drawn["x.seq_len"])
        self.whole = whole_numbers(drawn, 5, *shape, drawn["linear.in_features"])
        self.grad = whole_numbers(drawn, 6, *shape, drawn["linear.out_features"])
        self.whole = in_memory(self.whole, drawn["x.memory"]).contiguous()
        self.grad = in_memory(self.grad, drawn["x.upstream"]).contiguous()
        if drawn["(autocast)"] == "on, lower x":
            self.whole = self.whole.to(layers.precision(self.drawn))
        mine = self.part("x", self.whole)
        self.x = leaf(mine.to(group.device), drawn["x.memory"], learns=drawn["x.gradient"])

    def tokens(self, whole: Tensor) -> Tensor:
        """Return this rank's tokens with all features."""
        return whole if self.sharding is None else self.sharding.shard(whole, self.rank, 1)

    def features(self, whole: Tensor) -> Tensor:
        """Return all tokens, in the order of an all-gather, with this rank's features."""
        return whole.index_select(1, self.gathered).split(self.sizes, 2)[self.rank]

    def judge(self, layer: sp.ColumnParallelLinear | sp.RowParallelLinear, out: Tensor) -> None:
        """Compare result, gradients and `to_linear` with the ordinary layer in float64."""
        made, given = layer.parameters(), self.linear.parameters()
        assert [p.requires_grad for p in made] == [p.requires_grad for p in given]
        x = self.whole.double().requires_grad_()
        weight, bias = (
            (None if t is None else t.detach().double().requires_grad_())
            for t in (self.linear.weight, self.linear.bias)
        )
        whole = nn.functional.linear(x, weight, bias)
        take = self.features if self.is_column else self.tokens
        self.same(out, take(whole), self.x)
        out = layers.called_in("training", self.drawn, layer, x=self.x)
        self.same(out, take(whole), self.x)
        upstream = in_memory(take(self.grad).to(out), self.drawn["x.upstream"])
        whole.backward(self.grad.double())
        for name, found in layers.gradients_of(layer, self.x, out, upstream).items():
            of = {"x": x, "weight": weight, "bias": bias}[name]
            assert of is not None
            assert of.grad is not None
            like = self.x if name == "x" else getattr(self.linear, name)
            self.same(found, self.part(name, of.grad), like)
        self.judge_whole(layer.to_linear())

    def part(self, name: str, whole: Tensor) -> Tensor:
        """Return this rank's part of the input, of a parameter, or of a gradient of these."""
        if name == "x":
            return self.tokens(whole) if self.is_column else self.features(whole)
        if name == "bias" and not self.is_column:
            return whole
        return whole.split(self.sizes, 0 if self.is_column else 1)[self.rank]

    def judge_whole(self, linear: nn.Linear) -> None:
        """Compare an ordinary layer with the one that was given."""
        assert type(linear) is nn.Linear
        found = dict(linear.named_parameters())
        assert found.keys() == dict(self.linear.named_parameters()).keys()
        for name, parameter in self.linear.named_parameters():
            self.same(found[name], parameter, parameter)
            assert found[name].requires_grad == parameter.requires_grad

    def same(self, found: Tensor, wanted: Tensor, like: Tensor) -> None:
        """Compare bit for bit, in the dtype of `like`."""
        same(found.detach().cpu(), wanted.detach().to(like.dtype))


def on_ranks(name: str, group: sp.Communicator, drawn: Values) -> Call:
    """Return the call of a layer, its constructor, `from_linear` or `to_linear`, as drawn."""
    case, asked = Case(name, drawn, group), drawn["(called)"]
    forward = partial(layers.called_in, drawn["(mode)"], case.drawn)
    given = {
        "linear": case.linear,
        "comm": group,
        "sharding": case.sharding,
        "sizes": drawn["sizes"],
    }
    if asked in ("from_linear", "constructor"):
        function = case.made if asked == "constructor" else case.made.from_linear
        return Call(function, given, lambda layer: case.judge(layer, forward(layer, x=case.x)))
    layer = case.made.from_linear(**given)
    if asked == "to_linear":
        return Call(layer.to_linear, {}, case.judge_whole)
    return Call(partial(forward, layer), {"x": case.x}, partial(case.judge, layer))


SUBJECTS = [
    on_group(
        name,
        (
            {
                name: TOKENS[name]
                for name in (
                    "x.seq_len",
                    "x.batch",
                    "x.memory",
                    "x.upstream",
                    "x.gradient",
                    "sharding.layout",
                    "sharding.start",
                )
            }
            | {
                "(tokens)": values("split", "all on every rank"),
                "linear.in_features": spans((2, 9), (1, 1), (17, 40)),
                "linear.out_features": spans((2, 9), (1, 1), (17, 40)),
                "linear.bias": values(True, False),
                "linear.dtype": values(*DTYPES),
                "linear.frozen": values("none", "weight", "bias", "all"),
                "linear.memory": values(*MEMORIES),
                "(autocast)": values("off", "on", "on, lower x", "on, lower weights"),
                "(mode)": values(*MODES),
                "(called)": values("forward", "from_linear", "constructor", "to_linear"),
            }
        )
        | {
            "sizes": {
                "default": lambda c, v: None,
                "uneven": partial(sizes, of=of, held="unevenly"),
                "on one rank": partial(sizes, of=of, held="all on the last rank"),
            }
        },
        partial(on_ranks, name),
        together=(
            {"(tokens)": "all on every rank"},
            {"linear.frozen": "weight"},
            {"linear.frozen": "bias"},
            {
                "(tokens)": "all on every rank",
                "(autocast)": "on",
                "linear.dtype": "float32",
                "linear.bias": "False",
            },
            *(
                {"(autocast)": f"on, lower {which}", "linear.dtype": "float32", "(tokens)": tokens}
                for which in ("x", "weights")
                for tokens in ("split", "all on every rank")
            ),
        ),
        covers=tuple(f"{name}.{method}" for method in ("from_linear", "to_linear", "forward")),
    )
    for name, of in SPLIT.items()
]
