"""Laws of attention on one device.

Against the dense reference, of the merge, of the kernels that it stands on.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import pytest
import torch
from hypothesis import given, settings, strategies as st
from oracle import reference
from oracle.strategies import SLOPES, slopes
from torch import Tensor

from sp_core.attention import (
    Logits,
    accumulation_dtype,
    attend,
    attend_backward,
    block_attention,
    local_attention,
)
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
    backend: str | None = None,
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
    call: dict[str, Any] = {**where, "mask": mask, "backend": backend, "between": between}
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


@settings(deadline=None)
@given(problem=problems(), use_lse=st.booleans())
def test_attention_is_the_reference(problem: Problem, use_lse: bool) -> None:
    check_problem(problem, use_lse=use_lse)


@settings(deadline=None)
@given(problem=problems())
def test_the_plain_kernel_is_the_reference(problem: Problem) -> None:
    check_problem(problem, backend="plain")


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


@pytest.mark.parametrize("backend", ["plain", "flash_cpu"])
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_values_that_no_query_sees_are_not_read(backend: str, poison: float) -> None:
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
            "logits": Logits(0.3),
            "backend": backend,
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
