"""Test how the next token is chosen: from logits of any kind, and alike on all ranks."""

from contextlib import nullcontext
from fractions import Fraction
from functools import partial
from inspect import signature
from typing import Any

import numpy as np
import pytest
import torch
from llama_cases import Case, Damaged
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import sp_core as sp
from sp_core.llama import Sampling, create, generate
from sp_core.testing import spmd

pytestmark = pytest.mark.usefixtures("short_slots")


def test_each_prompt_of_each_seed_has_random_numbers_of_its_own() -> None:
    drawn = [
        float(torch.rand((), generator=Sampling(1.0, seed=seed).random(prompt)))
        for seed in (0, 1, 12, 2**32, 2**62)
        for prompt in range(25)  # prompt 23 of seed 1 is not prompt 3 of seed 12
    ]
    assert len({*drawn}) == 5 * 25
    assert (Sampling().seed, signature(create).parameters["seed"].default) == (0, 0)


@pytest.mark.parametrize(
    ("limits", "count"),
    [
        *(({"top_k": np.uint8(3)}, 3), ({"top_p": 0.5}, 2), ({"top_k": 2, "top_p": 0.5}, 1)),
        *(({"top_p": Fraction(1, 2)}, 2), ({"temperature": Fraction(10**400, 10**400 - 1)}, 4)),
    ],
)
def test_as_many_tokens_are_chosen_from_as_the_limits_leave(limits: Any, count: int) -> None:
    """Four tokens are equally likely. top_p=0.5 leaves half of those that top_k leaves."""
    rule = Sampling(**{"temperature": 1.0, **limits})
    drawn = {rule.choose(torch.zeros(4), rule.random(prompt)) for prompt in range(50)}
    assert drawn == {*range(count)}


@pytest.mark.parametrize("rule", [Sampling(), Sampling(1.0), Sampling(1.0, top_k=2, top_p=0.5)])
@pytest.mark.parametrize(
    ("logits", "usable"),
    [
        ([0.0, -torch.inf, -torch.inf], True),
        ([0.0, torch.nan, 1.0], False),
        ([torch.nan] * 3, False),
        ([0.0, torch.inf, torch.nan], False),
        ([0.0, torch.inf, 1.0], False),
        ([-torch.inf] * 3, False),
    ],
)
def test_a_token_is_chosen_only_from_logits_that_are_usable(
    rule: Sampling, logits: list[float], usable: bool
) -> None:
    """A logit of -inf forbids a token, which is usable if another token is possible."""
    refused = pytest.raises(ValueError, match=r"the logits are not finite.* such as float32")
    with nullcontext() if usable else refused:
        assert rule.choose(torch.tensor(logits), rule.random(0)) == 0


@pytest.mark.parametrize("axes", [{"tp": 2}, {"dp": 2}, {"ring": 2}, {"pp": 2}])
@pytest.mark.parametrize("rule", [Sampling(), Sampling(1.0)])
@spmd(2)
def test_logits_that_are_not_finite_are_an_error_on_all_ranks(
    comm: Any, axes: dict[str, Any], rule: Sampling
) -> None:
    """The logits are NaN once the third new token of the second prompt has been added."""
    case, prompts, seen = Case((6, 3), layers=2, vocab=31, seed=11), [[5, 1, 4], [2]], list[Any]()
    with sp.Mesh(comm, **axes) as mesh:
        call = partial(generate, prompts=prompts, max_tokens=9, sampling=rule)
        free = call(case.model(mesh))
        token = free[1][2]
        assert token not in {*free[0][:3], *free[1][:2], *prompts[0], *prompts[1]}
        model = Damaged(**vars(case), token=token).model(mesh)
        with pytest.raises(ValueError, match=r"prompts \[(0, )?1\] are not finite") as caught:
            call(model, on_token=lambda *given: seen.append(given))
        assert [token for number, token in seen if number == 1] in ([], free[1][:3])
        assert len(seen) <= 3 + 4 or "dp" in axes  # no prompt of the replica goes on
        assert call(model, prompts=[[3], [6]], max_tokens=1)
    assert comm.allgather(str(caught.value)) == [str(caught.value)] * comm.size


class Refusing(Sampling):
    """A rule that finds all logits not finite."""

    def choose(self, logits: torch.Tensor, random: torch.Generator) -> int:
        return super().choose(logits * torch.nan, random)

    def __repr__(self) -> str:
        return repr(Sampling())


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("axes", [{"tp": 2}, {"ring": 2}, {"pp": 2}])
@spmd(2)
def test_the_first_rank_of_a_replica_finds_out_whether_logits_are_finite(
    comm: Any, rank: int, axes: dict[str, Any]
) -> None:
    case = Case((6, 3), layers=2, vocab=31, seed=11)
    with sp.Mesh(comm, **axes) as mesh:
        call = partial(generate, case.model(mesh), [[5, 1, 4], [2]], max_tokens=3)
        rule = Refusing() if comm.rank == rank else Sampling()
        with nullcontext() if rank else pytest.raises(ValueError, match=r"prompts \[0, 1\]"):
            assert call(sampling=rule) == call()


class AsCuda(TorchDispatchMode):
    """Compute as torch does on CUDA, and draw the greatest random number below 1.

    A division by a number multiplies by its reciprocal.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.div.Tensor and isinstance(args[1], float):
            return args[0] * (1 / args[1])
        found = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.rand.generator:
            return torch.full_like(found, 1 - 2**-53)
        return found


class OnGpu(torch.Tensor):
    """Refuse `cumsum`, as torch does on CUDA if only deterministic algorithms are allowed."""

    def cumsum(self, *_: Any, **__: Any) -> Any:
        raise RuntimeError("cumsum_cuda_kernel does not have a deterministic implementation")

    def cpu(self, *_: Any, **__: Any) -> Any:
        return self.as_subclass(torch.Tensor)


@pytest.mark.parametrize(
    ("rule", "chosen"),
    [
        (Sampling(1e-310), {4}),  # its reciprocal is infinity, and infinity times 0 is NaN
        *((Sampling(1.0, **limit), {*range(5)}) for limit in ({}, {"top_k": 7}, {"top_p": 1.0})),
    ],
)
def test_a_gpu_chooses_a_token_that_is_possible(rule: Sampling, chosen: set[int]) -> None:
    """Not all tokens are possible."""
    possible = torch.randn(5, generator=torch.Generator().manual_seed(2))
    logits = F.pad(possible, (0, 3), value=-torch.inf).as_subclass(OnGpu)
    with AsCuda():  # type: ignore[no-untyped-call]
        assert rule.choose(logits, rule.random(0)) in chosen
