"""Test `conformance`: the stand-in is exact, a right library passes, a wrong one does not."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conformance import attention, flash_standin, layers
from conformance.adapters import our_layers, ours
from conformance.attention import Needs
from conformance.trial import Trial, judged
from hypothesis import given as drawn, settings, strategies as st
from oracle import reference
from torch import Tensor

from sp_core.testing.tolerance import bound, check_close

NEEDS = Needs(("contiguous", "zigzag", "striped"), dtype="float64")
FLOAT32 = replace(NEEDS, dtype="float32", document_pieces=2)
Call = Callable[..., Any]


def drawn_tensors(seed: int, *shapes: tuple[int, ...]) -> list[Tensor]:
    random = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=random, dtype=torch.float64) for shape in shapes]


def check(want: Any, **found: Tensor) -> None:
    for name, x in found.items():
        allowed = bound(want.scales[name], torch.float64, want.growth)
        check_close(name, x, want.values[name], allowed)


@settings(max_examples=40)
@drawn(
    queries=st.integers(1, 9),
    keys=st.integers(1, 9),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 3),
    causal=st.booleans(),
    window=st.none() | st.integers(1, 6),
    seed=st.integers(0, 2**16),
)
def test_the_stand_in_is_attention_aligned_at_the_bottom_right(
    queries: int,
    keys: int,
    kv_heads: int,
    group: int,
    seed: int,
    window: int | None,
    *,
    causal: bool,
) -> None:
    """The last query has the position of the last key, and a window is counted from there."""
    like_q, like_k = (2, queries, kv_heads * group, 4), (2, keys, kv_heads, 4)
    q, k, v, grad = drawn_tensors(seed, like_q, like_k, like_k, like_q)
    rest: dict[str, Any] = {"causal": causal, "window": window, "softmax_scale": 0.7}
    rest |= {"q_positions": range(keys - queries, keys), "kv_positions": range(keys)}
    reach = -1 if window is None else window - 1
    sides = (reach, -1 if causal else reach)
    how: Any = (0.0, 0.7, causal, *sides, 0.0, None, False)
    out, lse, *_ = flash_standin._flash_attn_forward(q, k, v, *how)
    want = reference.attention(q, k, v, grad, **rest)
    check(want, out=out)
    expected = torch.where(want.values["lse"].isinf(), math.inf, want.values["lse"])
    scale = want.scales["lse"] * (1 + want.values["lse"].abs().nan_to_num(posinf=0))
    check_close("lse", lse, expected, bound(scale, torch.float32, want.growth))
    found: Any = [torch.full_like(x, math.nan) for x in (q, k, v)]
    flash_standin._flash_attn_backward(grad, q, k, v, out, expected, *found, *how)
    leaves: Any = [x.requires_grad_() for x in (q, k, v)]
    public = flash_standin.flash_attn_func(
        q, k, v, softmax_scale=0.7, causal=causal, window_size=sides
    )
    assert torch.equal(public, out)
    for dq, dk, dv in (found, torch.autograd.grad(public, leaves, grad)):
        check(want, dq=dq, dk=dk, dv=dv)


def test_packed_documents_of_the_stand_in_do_not_see_each_other() -> None:
    cuts = torch.tensor([0, 3, 4, 9], dtype=torch.int32)
    q, k, v, grad = drawn_tensors(1, *4 * [(9, 2, 4)])
    lengths = (cuts, cuts, 5, 5)
    out, lse, *_ = flash_standin._flash_attn_varlen_forward(q, k, v, *lengths, 0.0, 0.5, True)
    assert lse.dtype == torch.float32
    options: dict[str, Any] = {"causal": True, "documents": cuts.tolist(), "softmax_scale": 0.5}
    want = reference.attention(*(q[None], k[None], v[None]), grad[None], **options)
    check(want, out=out[None])
    found: Any = [torch.full_like(x, math.nan) for x in (q, k, v)]
    flash_standin._flash_attn_varlen_backward(
        *(grad, q, k, v, out, want.values["lse"][0], found[0], found[1], found[2], *lengths),
        *(0.0, 0.5, True, -1, -1, 0.0, None, False),
    )
    leaves: Any = [x.requires_grad_() for x in (q, k, v)]
    public = flash_standin.flash_attn_varlen_func(q, k, v, *lengths, softmax_scale=0.5, causal=True)
    assert torch.equal(public, out)
    for dq, dk, dv in (found, torch.autograd.grad(public, leaves, grad)):
        check(want, dq=dq[None], dk=dk[None], dv=dv[None])


def on_trial(
    call: Call,
    capability: str,
    examples: int = 6,
    size: int = 2,
    seconds: float = 60.0,
    subject: Any = attention,
) -> dict[str, Any]:
    """Return the verdict on a call, with ranks as threads; `seconds=0` tries only one problem."""
    adapter: Any = SimpleNamespace(**{subject.CALL: call})
    trial = Trial(subject, adapter, "", lambda comm: None, seconds=seconds)
    gradients = capability not in ("full", "forward")
    needs = NEEDS if subject is attention else FLOAT32
    return judged(trial, subject.problems(capability, size, needs, gradients), size, examples)


@pytest.mark.parametrize(
    ("subject", "call", "capability"),
    [(attention, ours.attend, name) for name in attention.CAPABILITIES]
    + [(layers, our_layers.Pair, name) for name in layers.CAPABILITIES],
)
def test_our_own_pass(subject: Any, call: Call, capability: str) -> None:
    """The error must not be 0, as it would be if a problem had no results."""
    found = on_trial(call, capability, examples=4, size=3, subject=subject)
    assert found["verdict"] == "pass", found
    assert found["examples"] >= 4
    assert 0 < found["error"] <= 0.5


def a_mask_not_shifted(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """Compute causal attention as if every rank's first token were the sequence's first."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(
        q, k, v, is_causal=options["causal"], scale=options["softmax_scale"]
    ).transpose(1, 2)


def half_a_gradient(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    return ours.attend(q, (k + k.detach()) / 2, v, **options)


@pytest.mark.parametrize(
    ("attend", "capability", "results"),
    [
        (a_mask_not_shifted, "full", {"out"}),
        (half_a_gradient, "backward", {"dk"}),
    ],
)
def test_a_planted_fault_is_wrong_with_a_small_example(
    attend: Call, capability: str, results: set[str]
) -> None:
    found = on_trial(attend, capability, examples=10)
    assert found["verdict"] == "wrong", found
    assert found["result"] in results
    problem = found["problem"]
    assert [problem[size] for size in ("seq_len", "batch", "kv_heads", "head_dim")] == [4, 1, 2, 8]
    assert found["relative"] > 1e-5


@pytest.mark.parametrize(
    ("error", "only", "verdict", "said"),
    [
        (ValueError("S must be even"), None, "refused", "'ValueError: S must be even'"),
        (IndexError("no rank"), 1, "crashed", "rank 0: fine; rank 1: raised IndexError: no rank"),
        (RuntimeError("[gloo] Timed out"), None, "hung", "rank 0: stuck RuntimeError: [gloo] T"),
    ],
    ids=["on every rank", "on one rank", "of a process group"],
)
def test_an_error_is_a_refusal_a_crash_or_a_hang_by_where_it_was_raised(
    error: Exception, only: int | None, verdict: str, said: str
) -> None:
    def attend(*qkv: Tensor, comm: Any, **_: Any) -> Tensor:
        if only in (None, comm.rank):
            raise error
        return qkv[0] * 1.0

    found = on_trial(attend, "full", seconds=0.0)
    assert found["verdict"] == verdict
    assert said in str(found)


def test_a_trial_without_time_left_tries_nothing_new_and_forgets_no_failure() -> None:
    passed, failed = (
        on_trial(attend, "causal", examples=20, seconds=0.0)
        for attend in (ours.attend, half_a_gradient)
    )
    assert (passed["verdict"], passed["examples"]) == ("pass", 1)
    assert (failed["verdict"], failed["examples"]) == ("wrong", 1)


def not_summed(pair: Any, x: Tensor) -> Any:
    own = F.linear(pair.up(x), pair.down.weight, pair.down.bias)
    return torch.split(own, list(pair.down.lengths or ()), 1)[pair.down.comm.rank]


FORWARD = our_layers.Pair.forward
WRONG_PAIRS: dict[str, tuple[str, Call, str, str]] = {
    "the output is not summed over the ranks": ("forward", not_summed, "forward", "out"),
    "the input gets no gradient through the layers": (
        "forward",
        lambda pair, x: FORWARD(pair, x.detach()) + 0 * x,
        "backward",
        "d x",
    ),
    "the gradient of the bias is too small by the factor P": (
        "finish",
        lambda pair: pair.down.bias.grad.div_(pair.down.comm.size),
        "bias",
        "d down.bias",
    ),
    "the second weight has no gradient": (
        "finish",
        lambda pair: setattr(pair.down.weight, "grad", None),
        "backward",
        "d down.weight",
    ),
    "of two uses only one counts in the gradient of the first weight": (
        "finish",
        lambda pair: pair.up.weight.grad.div_(2),
        "twice",
        "d up.weight",
    ),
    "the output is rounded to float32": (
        "forward",
        lambda pair, x: FORWARD(pair, x).float().to(x.dtype),
        "float64",
        "out",
    ),
}
"""By fault: the method to replace, its replacement, the capability, and the wrong result."""


@pytest.mark.parametrize("fault", WRONG_PAIRS)
def test_a_planted_fault_is_seen_at_once(fault: str) -> None:
    name, method, capability, result = WRONG_PAIRS[fault]
    made = type("Pair", (our_layers.Pair,), {name: method})
    found = on_trial(made, capability, examples=1, seconds=0.0, subject=layers)
    assert found["verdict"] == "wrong", found
    assert found["result"] == result


def fits_attention(problem: Any, size: int, capability: str) -> None:
    uneven = problem.seq_len % size != 0
    assert uneven or problem.seq_len % (2 * size) == 0
    assert (problem.kv_heads * problem.group % size != 0) == (capability == "uneven heads")
    assert (problem.group > 1) == (capability in ("GQA", "MQA"))
    assert (problem.mask.window is not None) == (capability == "window")
    assert all(cut % (2 * size) == 0 for cut in problem.mask.documents or ())


def fits_layers(problem: Any, size: int, capability: str) -> None:
    odd = problem.inner // size % 2 == 1 and len(problem.shards[0]) % 2 == 1
    assert (problem.inner % size != 0) == (capability == "uneven features")
    assert (problem.hidden % 2 == 1) == (capability == "odd sizes")
    assert odd or capability != "odd sizes"
    assert (problem.times == 2) == (capability == "twice")
    assert bool(problem.frozen) == (capability == "frozen")
    assert problem.bias == (capability == "bias")


@pytest.mark.parametrize(("subject", "fits"), [(attention, fits_attention), (layers, fits_layers)])
def test_a_problem_is_what_its_capability_says(subject: Any, fits: Call) -> None:
    @settings(max_examples=60)
    @drawn(st.data(), st.integers(2, 4), st.sampled_from(sorted(subject.CAPABILITIES)))
    def holds(data: st.DataObject, size: int, capability: str) -> None:
        problem = data.draw(subject.problems(capability, size, FLOAT32, gradients=True))
        tokens = sorted(token for shard in problem.shards for token in shard)
        assert tokens == list(range(problem.seq_len))
        assert min(map(len, problem.shards)) > 0
        assert (problem.seq_len % size != 0) == (capability == "uneven length")
        assert problem.dtype == (capability if "float" in capability else "float32")
        start = f"P {size}, B {problem.batch}, S {problem.seq_len}, "
        told = subject.told(problem)
        assert json.loads(json.dumps(told)) == told
        assert subject.smallest(told).startswith(start)
        fits(problem, size, capability)

    holds()
