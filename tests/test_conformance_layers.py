"""Parallel layers on trial: ours pass, and a planted fault is seen in the result that it spoils."""

from __future__ import annotations

from itertools import chain
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conformance import layers, pair
from conformance.adapters import our_layers
from conformance.layers import CAPABILITIES, Layers, posed, problems, smallest, told
from conformance.trial import Trial, judged
from hypothesis import given as drawn, settings, strategies as st
from torch import Tensor

Made = type[our_layers.Pair]
NEEDS = SimpleNamespace(dtype="float32")


def on_trial(
    made: Made,
    capability: str,
    examples: int,
    size: int,
    seconds: float = 60.0,
) -> dict[str, Any]:
    """The verdict on layers whose ranks are threads; without time, on the first problem."""
    trial = Trial(layers, SimpleNamespace(Pair=made), "", lambda comm: None, seconds=seconds)
    strategy = problems(capability, size, NEEDS, gradients=capability != "forward")
    return judged(trial, strategy, size, examples)


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_our_own_layers_pass(capability: str) -> None:
    found = on_trial(our_layers.Pair, capability, examples=3, size=3)
    assert found["verdict"] == "pass", found
    assert found["examples"] >= 3
    assert 0 < found["error"] <= 0.5


class NotSummed(our_layers.Pair):
    """Each rank's own part of the output."""

    def forward(self, x: Tensor) -> Tensor:
        inner, rank = self.up(x), self.down.comm.rank
        own = torch.nn.functional.linear(inner, self.down.weight, self.down.bias)
        return own.split(list(self.down.lengths), 1)[rank]


class OwnTokensOnly(our_layers.Pair):
    """The input's gradient is that of this rank's features, because it is not summed over ranks."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.detach()) + 0 * x


class OwnBiasGradient(our_layers.Pair):
    """Each rank has the gradient of its own tokens, as before a sum over ranks."""

    def finish(self) -> None:
        self.down.bias.grad /= self.down.comm.size


class NoGradient(our_layers.Pair):
    """The second weight is never trained."""

    def finish(self) -> None:
        self.down.weight.grad = None


class SecondUseForgotten(our_layers.Pair):
    """Only the last use of a weight counts."""

    def finish(self) -> None:
        self.up.weight.grad /= 2


class NarrowSum(our_layers.Pair):
    """The output is rounded to float32."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).float().to(x.dtype)


@pytest.mark.parametrize(
    ("made", "capability", "result"),
    [
        (NotSummed, "forward", "out"),
        (OwnTokensOnly, "backward", "d x"),
        (OwnBiasGradient, "bias", "d down.bias"),
        (NoGradient, "backward", "d down.weight"),
        (SecondUseForgotten, "twice", "d up.weight"),
        (NarrowSum, "float64", "out"),
    ],
)
def test_a_planted_fault_is_seen_at_once(made: Made, capability: str, result: str) -> None:
    found = on_trial(made, capability, examples=1, size=2, seconds=0.0)
    assert found["verdict"] == "wrong", found
    assert found["result"] == result
    assert told(posed(found["problem"])) == found["problem"]


def test_a_problem_is_what_its_capability_says() -> None:
    @settings(max_examples=60)
    @drawn(data=st.data(), size=st.integers(2, 4), capability=st.sampled_from(sorted(CAPABILITIES)))
    def holds(data: st.DataObject, size: int, capability: str) -> None:
        problem: Layers = data.draw(problems(capability, size, NEEDS, gradients=True))
        lengths = [len(shard) for shard in problem.shards]
        assert list(chain(*problem.shards)) == list(range(problem.seq_len))
        assert min(lengths) > 0
        assert (problem.seq_len % size != 0) == (capability == "uneven length")
        assert (problem.inner % size != 0) == (capability == "uneven features")
        assert (problem.hidden % 2 == 1) == (capability == "odd sizes")
        assert (problem.inner // size % 2 == 1 and lengths[0] % 2 == 1) or capability != "odd sizes"
        assert (problem.times == 2) == (capability == "twice")
        assert bool(problem.frozen) == (capability == "frozen")
        assert problem.bias == (capability == "bias")
        assert problem.dtype == (capability if "float" in capability else "float32")
        assert smallest(problem).startswith(f"P {size}, B {problem.batch}, S {problem.seq_len}, ")
        assert posed(told(problem)) == problem

    holds()


def test_the_parts_of_all_ranks_are_the_whole() -> None:
    problem = told(Layers(2, 5, 3, 7, True, "", 1, "float64", True, 7, ((0, 1), (2, 3), (4,))))
    whole = pair.alone(problem)
    dims = {"out": 1, "d x": 1, "d up.weight": 0, "d up.bias": 0, "d down.weight": 1}
    for name, dim in dims.items():
        parts = [pair.part(problem, name, whole[name], rank) for rank in range(3)]
        assert torch.equal(torch.cat(parts, dim), whole[name])
    bias = whole["d down.bias"]
    assert torch.equal(pair.part(problem, "d down.bias", bias, 1), bias)
