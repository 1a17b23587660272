"""Laws of attention on one device: against the dense reference, and of merge and kernels."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any, NamedTuple, cast

import pytest
import torch
from hypothesis import example, given, settings, strategies as st
from oracle import reference
from oracle.strategies import SLOPES, slopes
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from sp_core.attention import (
    Logits,
    accumulation_dtype,
    attend,
    attend_backward,
    block_attention,
    block_attention_backward,
    kernels,
    local_attention,
    merge,
)
from sp_core.attention.shards import LSE_COLUMNS, _with_lse_columns
from sp_core.mask import Mask, plan_blocks
from sp_core.testing.tolerance import bound, check_close

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Random numbers of a test that has no seed of its own."""
    torch.manual_seed(0)


class Problem(NamedTuple):
    """One attention problem on one device."""

    batch: int
    num_kv_heads: int
    group: int
    head_dim: int
    q_positions: list[int]
    kv_positions: list[int]
    mask: dict[str, Any]
    scale: float
    logit: float
    dtype: torch.dtype
    seed: int
    softcap: float | None = None
    alibi: float | None = None

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """q, k, v (B, S, heads, D), grad_out and grad_lse."""
        generator = torch.Generator().manual_seed(self.seed)
        heads = self.num_kv_heads * self.group
        sq, sk = len(self.q_positions), len(self.kv_positions)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        size = self.logit**0.5
        q, k = (
            normal(self.batch, sq, heads, self.head_dim) * size,
            normal(self.batch, sk, self.num_kv_heads, self.head_dim) * size,
        )
        v, do = (
            normal(self.batch, sk, self.num_kv_heads, self.head_dim),
            normal(self.batch, sq, heads, self.head_dim),
        )
        q, k, v, do = (t.to(self.dtype) for t in (q, k, v, do))
        return q, k, v, do, normal(self.batch, heads, sq).to(accumulation_dtype(self.dtype))


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Every size from 0, every mask, three kinds of positions, all dtypes, logits to 10^3."""
    length = draw(st.integers(0, 40))
    documents = draw(
        st.none()
        | st.lists(st.integers(0, length), max_size=3).map(
            lambda inner: (0, *sorted(inner), length)
        )
    )
    mask = {
        "causal": draw(st.booleans()),
        "window": draw(st.none() | st.integers(1, 30)),
        "documents": documents,
    }

    def positions() -> list[int]:
        start, step = draw(st.integers(0, length)), draw(st.integers(1, 3))
        return draw(
            st.just([*range(start, length, step)])
            | st.lists(st.integers(0, length - 1), unique=True)
            if length
            else st.just([])
        )

    dtype = draw(st.sampled_from(DTYPES))
    return Problem(
        batch=draw(st.integers(1, 2) | st.just(0)),
        num_kv_heads=draw(st.integers(1, 2) | st.just(0)),
        group=draw(st.integers(1, 3)),
        head_dim=draw(st.integers(1, 9)),
        q_positions=positions(),
        kv_positions=positions(),
        mask=mask,
        scale=draw(st.sampled_from([0.3, 1.0, 0.0, -0.5])),
        logit=draw(st.sampled_from([1.0, 1.0, 30.0, *([1e3] if dtype.itemsize > 2 else [])])),
        dtype=dtype,
        seed=draw(st.integers(0, 99)),
        softcap=draw(st.none() | st.sampled_from([0.5, 5.0, 50.0])),
        alibi=draw(st.none() | st.sampled_from(SLOPES)),
    )


def check_problem(
    problem: Problem,
    *,
    against: Problem | None = None,
    use_lse: bool = True,
    between: Any = None,
) -> None:
    """Compare out, lse, dq, dk and dv with the reference of the same problem, or of another."""
    q, k, v, do, dlse = problem.tensors()
    truth = against or problem
    options = {
        "q_positions": truth.q_positions,
        "kv_positions": truth.kv_positions,
        "softmax_scale": truth.scale,
        "softcap": truth.softcap,
        "alibi": slopes(truth.num_kv_heads * truth.group, truth.alibi),
        **truth.mask,
    }
    where: Any = {"q_positions": problem.q_positions, "kv_positions": problem.kv_positions}
    expected = reference.attention(q, k, v, do, dlse if use_lse else None, **options)
    mask = Mask(**problem.mask)
    alibi = slopes(problem.num_kv_heads * problem.group, problem.alibi)
    call: dict[str, Any] = {**where, "mask": mask, "between": between}
    call["logits"] = Logits(problem.scale, problem.softcap, alibi=alibi)
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    out, lse = attend(q, k, v, **call)
    back = attend_backward(
        do.transpose(1, 2), q, k, v, out, lse, grad_lse=dlse if use_lse else None, **call
    )
    roundings = len(plan_blocks(problem.q_positions, problem.kv_positions, mask))

    found = {"out": out.transpose(1, 2), "lse": lse}
    for name, grad in zip(("dq", "dk", "dv"), back, strict=True):
        found[name] = grad.transpose(1, 2).to(problem.dtype)
    for name, actual in found.items():
        allowed = bound(expected.scales[name], problem.dtype, expected.growth, roundings)
        check_close(name, actual, expected.values[name], allowed)


CAUSAL = {"causal": True, "window": None, "documents": None}


@settings(deadline=None)
@example(Problem(1, 1, 2, 3, [*range(7)], [*range(7)], CAUSAL, -0.5, 1.0, torch.float32, 0), True)
@example(Problem(1, 1, 2, 3, [*range(7)], [*range(7)], CAUSAL, 0.0, 1.0, torch.float32, 0), True)
@given(problem=problems(), use_lse=st.booleans())
def test_attention_is_the_reference(problem: Problem, use_lse: bool) -> None:
    check_problem(problem, use_lse=use_lse)


@pytest.mark.parametrize(
    "mutation",
    [
        {"mask": {"causal": True, "window": 7}},
        {"mask": {"causal": False, "window": None}},
        {"scale": 0.31},
        {"softcap": 8.0},
        {"alibi": 0.05},
        {"q_positions": list(range(2, 14))},
    ],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_comparison_fails_on_another_problem(
    mutation: dict[str, Any], dtype: torch.dtype
) -> None:
    """A window off by one, no mask, a scale off by 3 % (20 % in 16 bits), positions off by one."""
    if dtype.itemsize == 2 and "scale" in mutation:
        mutation = {"scale": 0.36}
    right = Problem(
        1, 1, 2, 8, [*range(1, 13)], [*range(13)], {"causal": True, "window": 6}, 0.3, 9.0, dtype, 0
    )
    check_problem(right)
    with pytest.raises(AssertionError, match="times the bound"):
        check_problem(right._replace(**mutation), against=right)


@pytest.mark.parametrize("softcap", [None, 50.0], ids=["fused", "plain"])
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_values_that_no_query_sees_are_not_read(softcap: float | None, poison: float) -> None:
    """Padding, another document, keys behind a window, holes in an irregular mask."""
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
        clean = attend(q, k, v, **call)
        clean_grads = attend_backward(do, q, k, v, *clean, **call)
        k[:, :, hidden], v[:, :, hidden] = poison, poison
        dirty = attend(q, k, v, **call)
        for a, b in zip(
            (*clean, *clean_grads),
            (*dirty, *attend_backward(do, q, k, v, *dirty, **call)),
            strict=True,
        ):
            assert torch.equal(a, b)


def test_a_nan_that_is_seen_may_spread_inside_its_block_and_not_beyond() -> None:
    """The contract for values that are not finite, as the fused kernel has it.

    0 times NaN is NaN.
    """
    q, k, v = (torch.randn(1, 1, 128, 8) for _ in range(3))
    v[:, :, 100] = torch.nan
    inside, _ = block_attention(q, k, v, kind="causal", logits=Logits(0.3))
    assert inside[:, :, 100:].isnan().all()
    call: dict[str, Any] = {"q_positions": range(128), "kv_positions": range(128)}
    call["logits"] = Logits(0.3)
    apart, _ = attend(q, k, v, mask=Mask(causal=True, documents=(0, 64, 128)), **call)
    assert apart[:, :, :64].isfinite().all()


def test_a_second_derivative_is_refused_and_not_wrong() -> None:
    q = torch.randn(1, 3, 1, 2, requires_grad=True)
    (dq,) = torch.autograd.grad(
        cast("Tensor", local_attention(q, q, q)).sum(), q, create_graph=True
    )  # a constant gradient of out, too
    with pytest.raises(RuntimeError, match="differentiable once"):
        dq.sum().backward()


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Tensor, ...]]:
    """The results of the kernels that run, in order."""
    results: list[tuple[Tensor, ...]] = []

    def noted(run: Callable[..., Any], *given: Any) -> Any:
        results.append(run(*given))
        return results[-1]

    for direction in ("forward", "backward"):
        monkeypatch.setattr(kernels, direction, partial(noted, getattr(kernels, direction)))
    return results


def test_merge_keeps_what_the_other_side_did_not_see_bitwise() -> None:
    out, lse = torch.randn(2, 3, 4), torch.randn(2, 3) * 1e4
    nothing = (torch.zeros(2, 3, 4), torch.full((2, 3), -torch.inf))
    for merged in (merge(out, lse, *nothing), merge(*nothing, out, lse)):
        assert torch.equal(merged[0], out)
        assert torch.equal(merged[1], lse)
    assert merge(*nothing, *nothing)[0].eq(0).all()
    assert merge(out.bfloat16(), lse, *nothing)[0].dtype == torch.float32


def test_strides_do_not_matter() -> None:
    """The fused kernel reads a last dim that is not contiguous wrongly, without a word."""
    q, k, v = (torch.randn(1, 4, 33, 2).transpose(1, 3) for _ in range(3))
    wide = torch.randn(1, 2, 33, 1).expand(1, 2, 33, 4)
    for args in ((q, k, v), (wide, k, v), (q, wide, wide)):
        call: dict[str, Any] = {"kind": "causal", "logits": Logits(0.3)}
        out, lse = block_attention(*args, **call)
        dense = (args[0].contiguous(), args[1].contiguous(), args[2].contiguous())
        assert torch.equal(out, block_attention(*dense, **call)[0])
        grads = block_attention_backward(wide, *args, out, lse, **call)
        for a, b in zip(
            grads,
            block_attention_backward(wide.contiguous(), *dense, out, lse, **call),
            strict=True,
        ):
            assert torch.equal(a, b)


@pytest.mark.parametrize("empty", range(3))
def test_nothing_to_compute_is_not_given_to_a_kernel(empty: int) -> None:
    """Zero batch, queries or keys: the fused kernel would end the process."""
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
    """And no copy of what the kernel returns."""
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
    """exp(s - lse) of such a row would be infinite.

    A caller that merged nothing for it hands it over all the same.
    """
    q, do, out = (torch.randn(1, 2, 6, 4) for _ in range(3))
    k, v = (torch.randn(1, 2, 6, 4) for _ in range(2))
    lse = torch.full((1, 2, 6), -torch.inf)
    for softcap, kind in product((None, 50.0), ("full", "causal")):
        grads = block_attention_backward(
            do, q, k, v, out, lse, kind=kind, logits=Logits(0.3, softcap)
        )
        assert all((grad == 0).all() for grad in grads)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_gradient_of_the_lse_is_not_rounded_to_the_heads_dtype(dtype: torch.dtype) -> None:
    q, k = torch.randn(1, 2, 5, 3).to(dtype), torch.randn(1, 1, 7, 3).to(dtype)
    grad_lse = torch.randn(1, 2, 5)
    do, wide_q, wide_k, wide_v, out = _with_lse_columns(q, q, k, k, q, grad_lse)
    assert LSE_COLUMNS % 8 == 0  # as the kernels for CUDA need heads
    smallest = 2.0**-24 if dtype == torch.float16 else 0.0  # float16 ends there
    assert ((do * out)[..., 3:].double().sum(-1) + grad_lse.double()).abs().max() <= smallest
    assert (wide_q[..., 3:] == 0).all()
    assert torch.equal(wide_q @ wide_k.mT, q @ k.mT)
    assert torch.equal(do @ wide_v.mT, q @ k.mT)
