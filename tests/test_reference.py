"""Test the oracle and the tolerance: compute numbers in two ways, and make comparisons fail."""

import itertools
import math
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from oracle import reference
from torch import Tensor

from benchmarks.cases.block import alone
from sp_core.testing.tolerance import bound, check_close, error_ratio, unit_roundoff

Sizes = dict[str, Any]


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Seed the random numbers of tests that have no seed of their own."""
    torch.manual_seed(0)


def tensors(sq: int, sk: int, heads: int, kv_heads: int, dim: int) -> tuple[Tensor, ...]:
    """Draw q, k, v, grad_out and grad_lse for a batch of two, in float64."""
    shapes = [
        (2, sq, heads, dim),
        (2, sk, kv_heads, dim),
        (2, sk, kv_heads, dim),
        (2, sq, heads, dim),
        (2, heads, sq),
    ]
    return tuple(torch.randn(shape, dtype=torch.float64) for shape in shapes)


def sees(q: int, k: int, mask: Sizes) -> bool:
    """Return whether query q sees key k, written out in plain Python."""
    if mask.get("causal") and k > q:
        return False
    if mask.get("window") is not None and abs(q - k) >= mask["window"]:
        return False
    documents = mask.get("documents")
    if documents is None:
        return True
    kv_documents = mask.get("kv_documents") or documents
    return any(
        a <= q < b and c <= k < d
        for a, b, c, d in zip(
            documents, documents[1:], kv_documents, kv_documents[1:], strict=False
        )
    )


MASKS: list[Sizes] = [
    {},
    {"causal": True},
    {"causal": True, "window": 3},
    {"window": 2},
    {"causal": True, "documents": (0, 3, 3, 7)},
    {"documents": (0, 2, 7), "kv_documents": (0, 5, 7), "window": 4},
]


TERMS: list[dict[str, Any]] = [
    {},
    {"softcap": 0.8},
    {"sinks": torch.tensor([0.3, -0.2, 1.5, -2.0], dtype=torch.float64)},
    {"softcap": 0.8, "alibi": (0.5, 0.1, -0.3, 2.0)},
]


def logit(q: Tensor, k: Tensor, softcap: float | None = None, **_: Any) -> float:
    """Return the logit of a query and a key, written out in plain Python."""
    scaled = 0.7 * float(q @ k)
    return scaled if softcap is None else softcap * math.tanh(scaled / softcap)


@pytest.mark.parametrize("terms", TERMS)
@pytest.mark.parametrize("mask", MASKS)
def test_attention_is_the_sum_written_out(mask: Sizes, terms: dict[str, Any]) -> None:
    q, k, v, *_ = tensors(5, 6, 4, 2, 3)
    where, keys_at = [4, 0, 6, 2, 2], [5, 1, 0, 3, 6, 4]
    places: Sizes = {"q_positions": where, "kv_positions": keys_at}
    found = reference.attention(q, k, v, softmax_scale=0.7, **places, **mask, **terms).values
    for b, i, h in product(range(2), range(5), range(4)):
        keys = [(j, abs(where[i] - at)) for j, at in enumerate(keys_at) if sees(where[i], at, mask)]
        slope = terms.get("alibi", [0] * 4)[h]
        weights = [
            math.exp(logit(q[b, i, h], k[b, j, h // 2], **terms) - slope * far) for j, far in keys
        ]
        total = sum(weights) + (math.exp(terms["sinks"][h]) if "sinks" in terms else 0.0)
        expected = sum(
            (w / total * v[b, j, h // 2] for w, (j, _) in zip(weights, keys, strict=True)),
            torch.zeros(3, dtype=torch.float64),
        )
        torch.testing.assert_close(found["out"][b, i, h], expected, rtol=1e-13, atol=1e-13)
        lse = math.log(total) if total else -math.inf
        assert float(found["lse"][b, h, i]) == pytest.approx(lse, rel=1e-13)


@pytest.mark.parametrize("terms", TERMS)
@pytest.mark.parametrize("mask", MASKS)
def test_gradients_by_formula_are_slopes(mask: Sizes, terms: dict[str, Any]) -> None:
    """Compare with finite differences: all elements of an input move a little, at random."""
    q, k, v, do, dlse = tensors(7, 7, 4, 2, 3)
    inputs = {"q": q, "k": k, "v": v, **terms}
    gradients = reference.attention(**inputs, grad_out=do, grad_lse=dlse, **mask).values

    def total(name: str, moved: Tensor) -> Tensor:
        found = reference.attention(**{**inputs, name: moved}, **mask).values
        lse = found["lse"].masked_fill(found["lse"].isinf(), 0.0)
        return (found["out"] * do).sum() + (lse * dlse).sum()

    for name in {"q", "k", "v", "sinks"} & inputs.keys():
        step = 1e-5 * torch.randn_like(inputs[name])
        slope = (total(name, inputs[name] + step) - total(name, inputs[name] - step)) / 2
        wanted = (gradients[f"d{name}"] * step).sum()
        torch.testing.assert_close(slope, wanted, rtol=1e-6, atol=1e-12)


@settings(deadline=None)
@given(seed=st.integers(0, 99), size=st.sampled_from([1e-3, 1.0, 100.0]))
def test_scales_are_sizes_of_the_values(seed: int, size: float) -> None:
    """No element exceeds its scale. If nothing cancels, the scale equals the value."""
    torch.manual_seed(seed)
    q, k, v, do, dlse = tensors(5, 8, 4, 2, 3)
    result = reference.attention(q * size, k, v, do, dlse, causal=True)
    for name in ("out", "dq", "dk", "dv"):
        assert (result.values[name].abs() <= result.scales[name] * (1 + 1e-12)).all()
    same_sign = reference.attention(q * size, k, v.abs(), causal=True)
    out, scale = same_sign.values["out"], same_sign.scales["out"]
    torch.testing.assert_close(out, scale, rtol=1e-12, atol=0)
    assert result.growth == reference.attention(-q * size, k, v, causal=True).growth >= 5


def weights(
    hidden: int, heads: int, kv_heads: int, dim: int, ffn: int, *, gated: bool, bias: bool
) -> dict[str, Tensor]:
    """Draw the weights of a block, by the names of its modules."""
    shapes = {
        "attention.q_proj": (heads * dim, hidden),
        "attention.k_proj": (kv_heads * dim, hidden),
        "attention.v_proj": (kv_heads * dim, hidden),
        "attention.o_proj": (hidden, heads * dim),
        "feed_forward.up": (ffn, hidden),
        "feed_forward.down": (hidden, ffn),
    } | ({"feed_forward.gate": (ffn, hidden)} if gated else {})
    made = {
        f"{n}.weight": torch.randn(s, dtype=torch.float64) / s[1] ** 0.5 for n, s in shapes.items()
    }
    made |= {f"{n}.bias": torch.randn(s[0], dtype=torch.float64) for n, s in shapes.items() if bias}
    for name in ("norm1", "norm2"):
        made[f"{name}.weight"] = torch.rand(hidden, dtype=torch.float64) + 0.5
        made[f"{name}.bias"] = torch.randn(hidden, dtype=torch.float64)
    return made


def block(
    x: Tensor, w: dict[str, Tensor], do: Tensor, samples: int = 8, **options: Any
) -> reference.Reference:
    """Return the block's reference in float64 with all gradients."""

    def run(rounding: Any, given: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        out = reference.transformer_block(given["x"], given, rounding=rounding, **options)
        return (out * rounding(do.double())).sum(), {"out": out}

    return reference.sensitivity(run, {"x": x, **w}, samples)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_gradient_is_off_by_the_roundings_of_logits_that_the_backward_computes_again(
    dtype: torch.dtype,
) -> None:
    """A bias on all keys shifts the logits but no softmax, so its exact gradient is 0."""
    w = {n: t.to(dtype) for n, t in weights(8, 4, 4, 6, 20, gated=False, bias=True).items()}
    bias = w["attention.k_proj.bias"].add_(1e3).requires_grad_()
    x, do = torch.randn(2, 99, 8, dtype=dtype), torch.randn(2, 99, 8, dtype=dtype)
    scale = block(x, w, do, num_heads=4, norm="layer", causal=True).scales["attention.k_proj.bias"]
    case: Any = SimpleNamespace(mask="causal", shape={"heads": 4, "kv_heads": 4, "head_dim": 6})
    (found,) = torch.autograd.grad(alone(x, w, case), bias, do)
    assert check_close("bias", found, torch.zeros_like(scale), bound(scale, dtype)) > 0.01


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_comparison_of_blocks_fails_on_another_block(dtype: torch.dtype) -> None:
    """Find a missing causal mask, a window off by one, no rotary embedding, and a wrong eps."""
    w = {n: t.to(dtype) for n, t in weights(8, 4, 2, 6, 20, gated=True, bias=False).items()}
    x, do = torch.randn(2, 9, 8).to(dtype), torch.randn(2, 9, 8).to(dtype)
    right: Sizes = {"num_heads": 4, "causal": True, "window": 4, "rope_base": 100.0}
    expected = block(x, w, do, **right)
    for change in ({"causal": False}, {"window": 5}, {"rope_base": None}, {"eps": 2.0}):
        wrong = block(x, w, do, **{**right, **change}, samples=0)
        ratios = {
            n: error_ratio(wrong.values[n], expected.values[n], bound(s, dtype))
            for n, s in expected.scales.items()
        }
        assert max(ratios.values()) > 1, change


def test_sensitivity_of_a_cancelling_sum_is_that_of_its_terms() -> None:
    x = torch.tensor([[1e6, -1e6, 1.0]], dtype=torch.float64)
    found = reference.sensitivity(lambda _, given: (None, {"sum": given["x"].sum(-1)}), {"x": x})
    assert float(found.values["sum"]) == 1.0
    assert 5e5 < float(found.scales["sum"]) < 2e7


@pytest.mark.parametrize(
    ("dtype", "u", "least"),
    [
        (torch.float64, 2**-53, 2**-1074),
        (torch.float32, 2**-24, 2**-149),
        (torch.bfloat16, 2**-8, 2**-133),
        (torch.float16, 2**-11, 2**-24),
    ],
)
def test_the_bound_counts_what_it_says(dtype: torch.dtype, u: float, least: float) -> None:
    """A result may round to `least`, the smallest number of the dtype, or to 0. 0 stays 0."""
    terms, errors = [2.0, -3.0, 0.0, 1e-40], [0.25, -0.5, -1e-9, 0.0]
    scale, others = torch.tensor(terms, dtype=torch.float64), torch.tensor(errors)
    assert unit_roundoff(dtype) == u
    assert torch.equal(bound(scale, dtype), bound(scale, dtype, 1.0, 0, None))
    for growth, extra, single in itertools.product((1.0, 9.0), (0, 3), (None, others)):
        found = bound(scale, dtype, growth, extra, single).tolist()
        for got, term, error in zip(found, map(abs, terms), map(abs, errors), strict=True):
            due = 20 * ((u + min(u, 2**-24) * growth) * term + (least if term else 0.0))
            due += extra * u * term + (0.0 if single is None else 2 * error)
            assert got == pytest.approx(due, rel=1e-6, abs=0.0)


ONE, ZERO = torch.ones(2), torch.zeros(2)
INF, NAN = torch.tensor([1.0, math.inf]), torch.tensor([1.0, math.nan])


@pytest.mark.parametrize(
    ("actual", "expected", "allowed", "ratio"),
    [
        (ONE, ONE, ZERO, 0),
        (ONE + 1e-3, ONE, ZERO, math.inf),
        (INF, INF, ONE, 0),
        (-INF, INF, ONE, math.inf),
        (INF, ONE, ONE, math.inf),
        (ONE, INF, ONE, math.inf),
        (NAN, ONE, ONE, math.inf),
        (ONE, NAN, ONE, math.inf),
        (NAN, NAN, ONE, math.inf),
        (ONE * 2, ONE, INF * math.inf, math.inf),
        (ONE * 2, ONE, NAN, math.inf),
        (ONE[:1], ONE, ONE, math.inf),
        (ONE[None], ONE, ONE, math.inf),
        (ONE[:0], ONE[:0], ONE[:0], 0),
        (torch.tensor([1.5, 1.1]), ONE, torch.tensor([2.0, 0.05]), 2.0),
        (ONE * 2, ONE, -ONE, math.inf),
        (ONE, ONE, -ONE, math.inf),
        (ONE * 2, ONE, ONE * -math.inf, math.inf),
        (ONE * 2, ONE, ONE * -0.0, math.inf),
    ],
)
def test_error_ratio_of_what_is_not_a_number(
    actual: Tensor, expected: Tensor, allowed: Tensor, ratio: float
) -> None:
    assert error_ratio(actual, expected, allowed) == pytest.approx(ratio, rel=1e-6)


U64, HUGE = torch.uint64, 2**53


@pytest.mark.parametrize("allowed", [0.0, 1.0])
@pytest.mark.parametrize(
    ("actual", "expected", "error"),
    [
        (torch.tensor(1 + 2j), torch.tensor(1 + 5j), 3.0),
        (torch.tensor(4 + 6j), torch.tensor(1 + 2j), 5.0),
        (torch.tensor(1 + 2j).conj(), torch.tensor(1 + 2j), 4.0),
        (torch.tensor(2 + 1j), torch.tensor(2), 1.0),
        (torch.tensor(HUGE + 1), torch.tensor(HUGE), 1.0),
        (torch.tensor(-HUGE - 1), torch.tensor(-HUGE), 1.0),
        (torch.tensor(HUGE + 1), torch.tensor(float(HUGE), dtype=torch.float64), 1.0),
        (torch.tensor(-1), torch.tensor(-1 - 2**-52, dtype=torch.float64), 2**-52),
        (torch.tensor(2**64 - 1, dtype=U64), torch.tensor(2**64 - 2, dtype=U64), 1.0),
        (torch.tensor(2**64 - 1, dtype=U64), torch.tensor(2**63 - 1), 2.0**63),
        (torch.tensor(0, dtype=U64), torch.tensor(2**64 - 1, dtype=U64), 2.0**64),
        (torch.tensor(2**63, dtype=U64), torch.tensor(-(2**63)), 2.0**64),
        (torch.tensor(-(2**63)), torch.tensor(2**63 - 1), 2.0**64),
        (torch.tensor(True), torch.tensor(False), 1.0),
        (torch.tensor(-(2**31), dtype=torch.int32), torch.tensor(2**31 - 1), 2.0**32 - 1),
    ],
)
def test_errors_of_complex_and_of_whole_numbers_are_exact(
    actual: Tensor, expected: Tensor, error: float, allowed: float
) -> None:
    within, ratio = torch.tensor(allowed), error / allowed if allowed else math.inf
    for a, e in ((actual, expected), (expected, actual)):
        assert error_ratio(a, e, within) == ratio
        assert check_close("x", a, a, within) == 0
        if ratio > 1:
            with pytest.raises(AssertionError, match=r"x\[\] = .* is .* times the bound"):
                check_close("x", a, e, within)


def test_an_error_of_whole_numbers_is_not_rounded_down_to_its_bound() -> None:
    bound = torch.tensor(float(HUGE), dtype=torch.float64)
    assert check_close("x", torch.tensor(HUGE), torch.tensor(0), bound) == 1
    with pytest.raises(
        AssertionError, match=rf"x\[\] = {HUGE + 1}, expected 0, error 9.01e\+15 is 1 times"
    ):
        check_close("x", torch.tensor(HUGE + 1), torch.tensor(0), bound)


def test_check_close_names_the_worst_element() -> None:
    expected = torch.zeros(2, 3)
    actual = expected.clone()
    for ratio in (0.25, 1.0):
        assert check_close("out", actual + ratio, expected, torch.ones(2, 3)) == ratio
    actual[1, 2], actual[0, 1] = 3.0, 2.0
    with pytest.raises(
        AssertionError,
        match=r"out\[1, 2\] = 3\.0, expected 0\.0, error 3 is 3 times the bound 1 \(2 of 6 "
        r"elements out of bounds, dtype torch\.float32\)$",
    ):
        check_close("out", actual, expected, torch.ones(2, 3))
    with pytest.raises(
        AssertionError, match=r"out: shape \(2, 3\) given, expected \(3, 2\) \(bound \(3, 2\)\)"
    ):
        check_close("out", actual, expected.T, torch.ones(3, 2))
    with pytest.raises(AssertionError, match="nan"):
        check_close("out", actual * math.nan, expected, torch.ones(2, 3))
