"""The domain of parallel linear layers: ordinary layers of small whole numbers, which no order of summation rounds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from random import Random
from typing import Any

import torch
from oracle.strategies import DTYPES
from torch import Tensor, nn

import sp_core as sp
from domains import layers, situations
from domains.collectives import MEMORIES, in_memory
from domains.declared import Call, Parts, Subject, Values, spans, values
from domains.exact import places
from domains.layers import MODES, TOKENS
from domains.situations import COMMUNICATOR, SITUATIONS
from sp_core.segments import split_sizes

Parallel = sp.ColumnParallelLinear | sp.RowParallelLinear
SPLIT = {"ColumnParallelLinear": "linear.out_features", "RowParallelLinear": "linear.in_features"}
"""The features that the ranks share."""


def uneven(chance: Random, drawn: Values, *, of: str) -> tuple[int, ...]:
    """Return features of each rank, any number on each."""
    inner = sorted(chance.randint(0, drawn[of]) for _ in range(drawn["comm.ranks"] - 1))
    return tuple(stop - start for start, stop in pairwise((0, *inner, drawn[of])))


def on_one(chance: Random, drawn: Values, *, of: str) -> tuple[int, ...]:
    """Return features of each rank, all of them on one."""
    size = drawn["comm.ranks"]
    chosen = chance.randrange(size)
    return tuple(drawn[of] * (rank == chosen) for rank in range(size))


def whole_numbers(drawn: Values, key: int, *shape: int) -> Tensor:
    """Return small whole numbers."""
    generator = torch.Generator().manual_seed(31 * drawn["seed"] + key)
    return torch.randint(-2, 3, shape, generator=generator).to(
        getattr(torch, drawn["linear.dtype"])
    )


def ordinary(drawn: Values) -> nn.Linear:
    """Return the whole layer as every rank holds it."""
    dtype = getattr(torch, drawn["linear.dtype"])
    linear = nn.Linear(
        drawn["linear.in_features"], drawn["linear.out_features"], drawn["linear.bias"], dtype=dtype
    )
    for key, (name, parameter) in enumerate(linear.named_parameters()):
        parameter.data = in_memory(
            whole_numbers(drawn, key, *parameter.shape), drawn["linear.memory"]
        )
        parameter.requires_grad_(drawn["linear.frozen"] not in (name, "all"))
    return linear


class Case:
    """A parallel layer on one rank, and what the whole one gives on the whole sequence in float64."""

    def __init__(self, name: str, drawn: Values, group: sp.Communicator) -> None:
        self.is_column = name == "ColumnParallelLinear"
        self.made: Any = getattr(sp, name)
        self.drawn, self.group, self.rank = drawn, group, group.rank
        self.sharding = (
            layers.sharding_of(drawn, group.size) if drawn["(tokens)"] == "split" else None
        )
        self.linear = ordinary(drawn)
        self.sizes = list(drawn["sizes"] or split_sizes(drawn[SPLIT[name]], group.size))
        sharding = self.sharding or sp.Sharding.contiguous(drawn["x.seq_len"], 1)
        self.gathered = places(
            [int(p) for rank in range(sharding.size) for p in sharding.positions(rank)]
        )
        shape = (drawn["x.batch"], drawn["x.seq_len"])
        self.whole = whole_numbers(drawn, 5, *shape, drawn["linear.in_features"])
        self.grad = whole_numbers(drawn, 6, *shape, drawn["linear.out_features"])
        if drawn["x.memory"] == "expanded":
            self.whole = self.whole[..., :1].expand(self.whole.shape).clone()
        if drawn["x.upstream"] == "expanded":
            self.grad = self.grad[..., :1].expand(self.grad.shape).clone()
        mine = self.tokens(self.whole) if self.is_column else self.features(self.whole)
        self.x = (
            in_memory(mine.to(group.device), drawn["x.memory"])
            .detach()
            .requires_grad_(drawn["x.gradient"])
        )

    def tokens(self, whole: Tensor) -> Tensor:
        """Return this rank's tokens with all features."""
        return whole if self.sharding is None else self.sharding.shard(whole, self.rank, 1)

    def features(self, whole: Tensor) -> Tensor:
        """Return all tokens, in the order of an all-gather, with this rank's features."""
        return whole.index_select(1, self.gathered).split(self.sizes, 2)[self.rank]

    def made_of(self) -> Values:
        """Return the arguments of `from_linear`."""
        return {
            "linear": self.linear,
            "comm": self.group,
            "sharding": self.sharding,
            "sizes": self.drawn["sizes"],
        }

    def forward(self, layer: Parallel, mode: str, x: Tensor) -> Tensor:
        """Call a layer in the mode that was drawn."""
        lower = layers.precision(self.drawn | {"dtype": self.drawn["linear.dtype"]})
        with (
            MODES[mode](),
            torch.autocast(
                "cpu", lower, enabled=self.drawn["(autocast)"] == "on" and lower.itemsize == 2
            ),
        ):
            out: Tensor = layer(x)
        return out

    def judge(self, layer: Parallel, out: Tensor) -> None:
        """Compare the result with that of the ordinary layer, then gradients, then the ordinary layer made of it."""
        x = self.whole.double().requires_grad_()
        weight, bias = (
            (None if t is None else t.detach().double().requires_grad_())
            for t in (self.linear.weight, self.linear.bias)
        )
        whole = nn.functional.linear(x, weight, bias)
        take = self.features if self.is_column else self.tokens
        self.same(out, take(whole))
        out = self.forward(layer, "training", self.x)
        self.same(out, take(whole))
        leaves = {"x": self.x} | dict(layer.named_parameters())
        leaves = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
        assert out.requires_grad == bool(leaves)
        upstream = in_memory(take(self.grad).to(out), self.drawn["x.upstream"])
        grads = (
            dict(
                zip(leaves, torch.autograd.grad(out, list(leaves.values()), upstream), strict=True)
            )
            if leaves
            else {}
        )
        wanted = dict(
            zip(
                ("x", "weight", "bias"),
                torch.autograd.grad(
                    whole, [t for t in (x, weight, bias) if t is not None], self.grad.double()
                ),
                strict=False,
            )
        )
        take = self.tokens if self.is_column else self.features
        for name, found in grads.items():
            self.same(found, take(wanted["x"]) if name == "x" else self.part(name, wanted[name]))
        self.judge_whole(layer.to_linear())

    def part(self, name: str, whole: Tensor) -> Tensor:
        """Return this rank's part of a parameter or of its gradient."""
        if name == "bias" and not self.is_column:
            return whole
        return whole.split(self.sizes, 0 if self.is_column else 1)[self.rank]

    def judge_whole(self, linear: nn.Linear) -> None:
        """Compare an ordinary layer with the one that was given."""
        assert type(linear) is nn.Linear
        found = dict(linear.named_parameters())
        assert found.keys() == dict(self.linear.named_parameters()).keys()
        for name, parameter in self.linear.named_parameters():
            self.same(found[name], parameter)

    def same(self, found: Tensor, wanted: Tensor) -> None:
        """Compare bit for bit, in the dtype of the layer."""
        dtype = self.linear.weight.dtype
        torch.testing.assert_close(found.detach().cpu(), wanted.detach().to(dtype), rtol=0, atol=0)


@contextmanager
def on_ranks(name: str, comm: Any, drawn: Values) -> Iterator[Call]:
    """Make a layer on one axis of a mesh; the call is that of the layer, or one that makes or unmakes it."""
    with situations.opened(comm, drawn, situations.lengths(drawn)) as mesh:
        group = situations.group_of(mesh, drawn)
        case = Case(
            name, drawn | {"seed": drawn["seed"] + 31 * situations.number_of(mesh, group)}, group
        )
        if drawn["(called)"] in ("from_linear", "constructor"):
            function = case.made if drawn["(called)"] == "constructor" else case.made.from_linear
            yield Call(
                function,
                case.made_of(),
                lambda layer: case.judge(layer, case.forward(layer, drawn["(mode)"], case.x)),
            )
            return
        layer = case.made.from_linear(**case.made_of())
        if drawn["(called)"] == "to_linear":
            yield Call(layer.to_linear, {}, case.judge_whole)
        else:
            yield Call(
                partial(case.forward, layer, drawn["(mode)"]),
                {"x": case.x},
                partial(case.judge, layer),
            )


LINEAR: dict[str, Parts] = {
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
} | {
    "(tokens)": values("split", "all on every rank"),
    "linear.in_features": spans((2, 9), (1, 1), (17, 40)),
    "linear.out_features": spans((2, 9), (1, 1), (17, 40)),
    "linear.bias": values(True, False),
    "linear.dtype": values(*DTYPES),
    "linear.frozen": values("none", "weight", "bias", "all"),
    "linear.memory": values(*MEMORIES),
    "(autocast)": values("off", "on"),
    "(mode)": values(*MODES),
    "(called)": values("forward", "from_linear", "constructor", "to_linear"),
}
SUBJECTS = [
    Subject(
        name,
        COMMUNICATOR
        | LINEAR
        | {
            "sizes": {
                "default": lambda c, v: None,
                "uneven": partial(uneven, of=of),
                "on one rank": partial(on_one, of=of),
            }
        }
        | SITUATIONS,
        partial(on_ranks, name),
        situations.ranks,
        tuple(f"{name}.{method}" for method in ("from_linear", "to_linear", "forward")),
    )
    for name, of in SPLIT.items()
]
