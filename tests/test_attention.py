"""Test attention on one device: the dense reference, merging, and what the kernels are given."""

import math
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from domains.declared import Call, Row
from domains.numeric import attended
from domains.subjects import BY_NAME
from hypothesis import example, given, settings, strategies as st
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.functional import scaled_dot_product_attention

from sp_core.attention import (
    Logits,
    attend,
    attend_backward,
    block_attention,
    block_attention_backward,
    kernels,
    local_attention,
    merge,
    merge_into,
)
from sp_core.attention.shards import LSE_COLUMNS, _with_lse_columns
from sp_core.mask import Mask

attention_of: Any = local_attention
"""The function without its types: whether it returns one tensor or two depends on `return_lse`."""


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Seed torch for tests that have no seed of their own."""
    torch.manual_seed(0)


LOCAL = BY_NAME["local_attention"]
LARGE = {"101 to 140", "17 to 64", "65 to 128", "129 to 256", "257 to 300", "10 to 17"}
"""Parts of the domain with many tokens. They are left out here, because examples would be slow."""


def rows(**chosen: tuple[str, ...]) -> st.SearchStrategy[Row]:
    """Draw rows of the domain of `local_attention`; `chosen` limits the parts of some factors."""
    parts = {
        factor: [part for part in LOCAL.factors[factor] if part not in LARGE]
        for factor in LOCAL.factors
    }
    return st.fixed_dictionaries(
        {factor: st.sampled_from(names) for factor, names in (parts | chosen).items()}
    )


def judge(call: Call) -> None:
    """Make a call, and compare its results and all gradients with the reference."""
    call.judge(call())


def there_and_back(do: Tensor, q: Tensor, k: Tensor, v: Tensor, **call: Any) -> tuple[Tensor, ...]:
    """Run attention forward and backward; return out, lse, dq, dk and dv."""
    out, lse = attend(q, k, v, **call)
    return out, lse, *attend_backward(do, q, k, v, out, lse, **call)


SCALED = LOCAL.base | {"mask": "given", "causal": "True", "q.dtype": "float32"}


@settings(deadline=None)
@example(row=SCALED | {"softmax_scale": "-0.5"}, seed=0)
@example(row=SCALED | {"softmax_scale": "0.0"}, seed=0)
@given(row=rows(), seed=st.integers(0, 99))
def test_attention_is_the_reference(row: Row, seed: int) -> None:
    judge(attended(LOCAL.draw(row, seed)))


@pytest.mark.parametrize(
    "change",
    [
        {"mask": Mask(causal=True, window=7)},
        {"mask": None},
        {"softmax_scale": 0.31},
        {"softcap": 8.0},
        {"alibi": (0.05,)},
        {"q_positions": range(1, 14)},
    ],
)
@pytest.mark.parametrize("dtype", kernels.FLOATS)
def test_the_comparison_fails_on_another_problem(
    change: dict[str, Any], dtype: torch.dtype
) -> None:
    """Problems differ in window, mask, scale (3 %, or 20 % for 16 bits), softcap or positions."""
    if dtype.itemsize == 2 and "softmax_scale" in change:
        change = {"softmax_scale": 0.36}
    row = LOCAL.base | {"mask": "given", "q.dtype": str(dtype).removeprefix("torch.")}
    sizes = {"(length)": 13, "(kv_length)": 13, "k.heads": 1, "q.group": 1, "q.head_dim": 8}
    drawn = LOCAL.draw(row, 0) | sizes | {"q.magnitude": 9.0, "causal": True, "window": 6}
    call = attended(drawn | {"softmax_scale": 0.3, "return_lse": "no"})
    judge(call)
    with pytest.raises(AssertionError, match="times the bound"):
        call.judge(call.function(**call.arguments | change))


def test_tensors_without_a_tangent_are_taken_at_a_level_of_forward_mode() -> None:
    q, k, v = torch.randn(3, 1, 5, 2, 8)
    with forward_ad.dual_level():
        out = attention_of(q, k, v)
    assert torch.equal(out, attention_of(q, k, v))


def test_alibi_depends_on_distances_alone_however_far_the_positions() -> None:
    q, k, v = torch.randn(3, 1, 6, 2, 8)
    near, far = (
        attention_of(q, k, v, alibi=(0.5, 0.25), q_positions=at, kv_positions=at)
        for at in (range(6), range(2**40 + 1, 2**40 + 7))
    )
    assert torch.equal(near, far)


def test_distances_are_exact_in_float64() -> None:
    """Float32 has no 2**24 + 1."""
    v = torch.tensor([0.0, 1.0]).double().view(1, 2, 1, 1)
    at: dict[str, Any] = {"q_positions": [2**24 + 1], "kv_positions": [0, 1]}
    out = attention_of(0 * v[:, :1], 0 * v, v, alibi=(1.0,), **at)
    assert out.item() == pytest.approx(1 / (1 + math.exp(-1)))


def test_a_tile_whose_biases_are_all_minus_infinity_adds_nothing() -> None:
    x = torch.randn(1, 512, 1, 8, requires_grad=True)
    out = attention_of(x, x, x, mask=Mask(causal=True), alibi=(1e38,))
    (grad,) = torch.autograd.grad(out.sum(), x)
    assert torch.equal(out, x)
    assert grad.isfinite().all()


def test_a_head_without_a_sink_has_a_gradient_where_nothing_is_seen() -> None:
    sinks = torch.tensor([-torch.inf, 1.0], requires_grad=True)
    q, k, v = torch.randn(3, 1, 3, 2, 8)
    out = attention_of(q, k, v, sinks=sinks, mask=Mask(True), kv_positions=[1, 2, 3])
    (grad,) = torch.autograd.grad(out.sum(), sinks)
    assert grad.isfinite().all()
    assert grad[0] == 0


@pytest.mark.parametrize("dtype", kernels.HALF)
def test_products_for_the_gradient_of_a_sink_may_leave_the_range_of_float16(
    dtype: torch.dtype,
) -> None:
    """GradScaler begins with a factor of 65536."""
    x, sinks = torch.full((1, 4, 1, 8), 4.0), torch.zeros(1, requires_grad=True)
    found = list[Tensor]()
    for kind in (dtype, torch.float32):
        out = attention_of(0 * x.to(kind), 0 * x.to(kind), x.to(kind), sinks=sinks)
        found += torch.autograd.grad(out, sinks, torch.full_like(out, 2.0**15))
    torch.testing.assert_close(*found, rtol=2.0**-8, atol=0)


def test_attention_inside_autocast_is_that_outside() -> None:
    found, x = [], [each.requires_grad_() for each in torch.randn(3, 1, 6, 2, 8)]
    for forward, backward in product((False, True), repeat=2):
        with torch.autocast("cpu", torch.bfloat16, enabled=forward):
            out = attention_of(*x, softcap=5.0)
        with torch.autocast("cpu", torch.bfloat16, enabled=backward):
            found.append(torch.cat([out, *torch.autograd.grad(out.sum(), x)]))
    assert all(torch.equal(found[0], other) for other in found)


@pytest.mark.parametrize("dtype", kernels.HALF)
def test_a_result_of_a_half_type_is_rounded_after_its_sinks(dtype: torch.dtype) -> None:
    sinks, v = torch.linspace(-9, 9, 16), torch.randn(1, 1, 16, 8).to(dtype)
    weight = torch.sigmoid(-sinks)[:, None]  # of the only key, whose score is 0
    assert torch.equal(attention_of(0 * v, 0 * v, v, sinks=sinks), (weight * v).to(dtype))


def test_equal_terms_of_any_type_make_equal_logits() -> None:
    """Ranks agree on logits by their text."""
    caps: Any = (5.0, 5, np.float32(5), Fraction(5))
    slopes: Any = [0.3], torch.tensor([0.3], dtype=torch.float64)
    q = torch.ones(1, 2, 1, 4).half()
    made = [Logits.of(q, softcap=cap, alibi=slope) for cap, slope in product(caps, slopes)]
    assert {repr(logits) for logits in made} == {repr(made[0])}


@pytest.mark.parametrize("softcap", [None, 50.0], ids=["fused", "plain"])
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_values_that_no_query_sees_are_not_read(softcap: float | None, poison: float) -> None:
    """Unseen keys are padding, another document, behind a window, or holes of positions."""
    cases = [
        (Mask(causal=True), range(40), range(64), range(40, 64)),
        (Mask(documents=(0, 30, 64)), range(30), range(64), range(30, 64)),
        (Mask(causal=True, window=5), range(40, 64), range(64), range(36)),
        (Mask(causal=True), [50, 3, 20, 11] * 9, [60, 2, 55, 1, 70] * 7, None),
    ]
    for mask, q_positions, kv_positions, unseen in cases:
        hidden = ~mask.allowed(q_positions, kv_positions).any(0)
        assert unseen is None or hidden.nonzero()[:, 0].tolist() == [*unseen]
        q, do = (torch.randn(1, 2, len(q_positions), 8) for _ in range(2))
        k, v = (torch.randn(1, 2, len(kv_positions), 8) for _ in range(2))
        call: dict[str, Any] = {
            "q_positions": q_positions,
            "kv_positions": kv_positions,
            "mask": mask,
            "logits": Logits(0.3, softcap),
        }
        clean = there_and_back(do, q, k, v, **call)
        k[:, :, hidden], v[:, :, hidden] = poison, poison
        assert all(map(torch.equal, clean, there_and_back(do, q, k, v, **call)))


@pytest.mark.parametrize("scale", [0.3, 0.0, -0.3])
@pytest.mark.parametrize("dtype", kernels.FLOATS)
def test_a_query_that_is_not_a_number_has_no_result(dtype: torch.dtype, scale: float) -> None:
    """However few keys a block has, the other queries of the block have theirs."""
    for keys, kind in product(range(1, 35), ("full", "causal")):
        q, k, v = torch.randn(3, 1, 2, keys, 8).to(dtype).unbind()
        q[:, :, ::3] = torch.nan
        out, lse = kernels.block_attention(q, k, v, kind=kind, logits=Logits(scale))
        finite = torch.arange(keys) % 3 > 0
        assert torch.equal(out.isfinite().all(-1), finite.expand(1, 2, keys)), (keys, kind)
        assert torch.equal(lse.isfinite(), finite.expand(1, 2, keys)), (keys, kind)


@pytest.fixture
def ran(substitute: Any) -> list[tuple[Tensor, ...]]:
    """Return a list to which every kernel call adds its results."""
    results: list[tuple[Tensor, ...]] = []

    def noted(run: Callable[..., Any], *given: Any) -> Any:
        results.append(run(*given))
        return results[-1]

    wrapped = {name: partial(noted, vars(kernels)[name]) for name in ("forward", "backward")}
    substitute(kernels, **wrapped)
    return results


def test_a_merge_has_right_first_and_second_derivatives() -> None:
    """Queries that saw no key on one side, or on neither, have derivatives too."""
    parts = [torch.randn(shape).double().requires_grad_() for shape in ((5, 3), (5,)) * 2]
    parts[1].data[4] += 1e3
    blind = torch.tensor([[0, 1, 0, 1, 0], [0, 0, 1, 1, 0]]).bool()

    def merged(*parts: Tensor) -> tuple[Tensor, Tensor]:
        a, b = (
            (out.masked_fill(hidden[:, None], 0.0), lse.masked_fill(hidden, -torch.inf))
            for out, lse, hidden in zip(parts[::2], parts[1::2], blind, strict=True)
        )
        out, lse = merge(*a, *b)
        return out, lse.masked_fill(blind.all(0), 0.0)

    assert torch.autograd.gradcheck(merged, parts)
    assert torch.autograd.gradgradcheck(merged, parts)


def test_exchanging_the_parts_of_a_merge_changes_nothing_if_one_lse_is_float64() -> None:
    a, b = (
        (torch.randn(2, 3, 4), torch.randn(2, 3).to(dtype))
        for dtype in (torch.float32, torch.float64)
    )
    for one, other in zip(merge(*a, *b), merge(*b, *a), strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


def test_a_merge_in_place_rounds_alike_whatever_the_strides() -> None:
    for length in range(2, 64):
        outs, lses, found = torch.randn(2, 3, length, 4), 3 * torch.randn(2, 3, length), []
        for each in (lses, lses.mT.contiguous().mT):
            out, lse = outs[0].clone(), each[0].clone()
            merge_into(out, lse, outs[1], each[1])
            found.append(torch.cat((out, lse.unsqueeze(-1)), -1))
        assert torch.equal(*found)


@pytest.mark.parametrize("empty", range(3))
def test_nothing_to_compute_is_not_given_to_a_kernel(empty: int) -> None:
    """With an empty batch, no queries or no keys the fused kernel would end the process."""
    b, sq, sk = (0 if i == empty else 2 for i in range(3))
    q, k = torch.randn(b, 2, sq, 4), torch.randn(b, 2, sk, 4)
    out, lse = block_attention(q, k, k, logits=Logits(0.3))
    assert (out == 0).all()
    assert (lse == -torch.inf).all()
    assert all(
        (g == 0).all() for g in block_attention_backward(q, q, k, k, out, lse, logits=Logits(0.3))
    )


def test_one_causal_block_is_one_kernel_call_and_the_result_of_torch(
    ran: list[tuple[Tensor, ...]],
) -> None:
    """The results and gradients are the kernel's own tensors, not copies of them."""
    q, k, v = (torch.randn(1, 150, 2, 16, requires_grad=True) for _ in range(3))
    do = torch.randn(1, 150, 2, 16)
    out: Any = local_attention(q, k, v, mask=Mask(causal=True))
    grads = torch.autograd.grad(out, (q, k, v), do)
    (made, _), made_grads = ran
    assert [x.data_ptr() for x in (out, *grads)] == [x.data_ptr() for x in (made, *made_grads)]
    fused = scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True
    ).transpose(1, 2)
    assert torch.equal(out, fused)
    for a, b in zip(grads, torch.autograd.grad(fused, (q, k, v), do), strict=True):
        assert torch.equal(a, b)


def test_a_row_whose_lse_is_minus_infinity_has_no_gradient() -> None:
    """The kernel would compute exp(s - lse), which is infinite for such a row."""
    q, do, out = (torch.randn(1, 2, 6, 4) for _ in range(3))
    k, v = (torch.randn(1, 2, 6, 4) for _ in range(2))
    lse = torch.full((1, 2, 6), -torch.inf)
    for softcap, kind in product((None, 50.0), ("full", "causal")):
        grads = block_attention_backward(
            do, q, k, v, out, lse, kind=kind, logits=Logits(0.3, softcap)
        )
        assert all((grad == 0).all() for grad in grads)


@pytest.mark.parametrize("scale", [2.0**-27, 1.0, 2.0**16, 2.0**28])
@pytest.mark.parametrize("dtype", kernels.FLOATS)
def test_the_gradient_of_the_lse_is_not_rounded_to_the_heads_dtype(
    dtype: torch.dtype, scale: float
) -> None:
    """It may be beyond the greatest float16, 65504: GradScaler begins with a factor of 65536."""
    q, k = torch.randn(1, 2, 5, 3).to(dtype), torch.randn(1, 1, 7, 3).to(dtype)
    grad_lse = torch.randn(1, 2, 5) * scale
    do, wide_q, wide_k, wide_v, out = _with_lse_columns(q, q, k, k, q, grad_lse)
    assert LSE_COLUMNS % 8 == 0  # kernels for CUDA need a multiple of 8 elements
    smallest = 2.0**-48 if dtype == torch.float16 else 0.0  # the square of the smallest float16
    total = (do.double() * out.double())[..., 3:].sum(-1)
    assert (total + grad_lse.double()).abs().max() <= smallest
    assert (wide_q[..., 3:] == 0).all()
    assert torch.equal(wide_q @ wide_k.mT, q @ k.mT)
    assert torch.equal(do @ wide_v.mT, q @ k.mT)


def test_small_gradients_of_the_lse_of_many_float16_queries_add_up() -> None:
    q, k = torch.ones(1, 2**16, 1, 8).half(), torch.zeros(1, 1, 1, 8).half().requires_grad_()
    _, lse = local_attention(q, k, k, softmax_scale=1.0, return_lse=True)
    (lse.sum() * 2.0**-27).backward()
    assert k.grad is not None
    assert k.grad.unique().tolist() == [2.0**-11]


@pytest.mark.parametrize("name", ["q_positions", "kv_positions"])
@pytest.mark.parametrize("kind", [list, torch.tensor])
def test_positions_may_be_changed_before_the_backward(name: str, kind: Any) -> None:
    x = torch.randn(1, 6, 1, 4, requires_grad=True)
    at = kind([5, 4, 3, 2, 1, 0])
    out = attention_of(x, x, x, mask=Mask(causal=True), alibi=(0.5,), **{name: at})
    (wanted,) = torch.autograd.grad(out.sum(), x, retain_graph=True)
    at[0], at[5] = 0, 5
    assert torch.equal(wanted, *torch.autograd.grad(out.sum(), x))
