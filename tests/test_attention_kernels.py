"""Laws of the pieces of attention.

Merging partial results, the kernels and what they do not survive, their choice.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from sp_core.attention import (
    Logits,
    backend_for,
    block_attention,
    block_attention_backward,
    kernels,
    local_attention,
    merge,
)
from sp_core.attention.shards import _with_lse_columns
from sp_core.mask import Mask

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Random numbers of a test that has no seed of its own."""
    torch.manual_seed(0)


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """The kernels that run, in order: name and direction."""
    calls: list[tuple[str, str]] = []

    def noted(direction: str, run: Callable[..., Any], backend: str, *given: Any) -> Any:
        calls.append((backend, direction))
        return run(backend, *given)

    for direction in ("forward", "backward"):
        run = getattr(kernels, direction)
        monkeypatch.setattr(kernels, direction, partial(noted, direction, run))
    return calls


def test_merge_keeps_what_the_other_side_did_not_see_bitwise() -> None:
    out, lse = torch.randn(2, 3, 4), torch.randn(2, 3) * 1e4
    nothing = (torch.zeros(2, 3, 4), torch.full((2, 3), -torch.inf))
    for merged in (merge(out, lse, *nothing), merge(*nothing, out, lse)):
        assert torch.equal(merged[0], out)
        assert torch.equal(merged[1], lse)
    assert merge(*nothing, *nothing)[0].eq(0).all()
    assert merge(out.bfloat16(), lse, *nothing)[0].dtype == torch.float32


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["full", "causal", "partial"])
@pytest.mark.parametrize("group", [1, 3])
def test_the_fused_kernel_agrees_with_the_plain_one(
    dtype: torch.dtype, kind: str, group: int, ran: list[tuple[str, str]]
) -> None:
    """What the module says of the CPU kernel.

    Dtypes, groups, alignment, masks of each dtype, any scale, sizes past one tile.
    """
    for sq, sk, scale in (
        (7, 7, 0.3),
        (300, 300, 0.3),
        (70, 600, -0.4),
        (600, 70, 0.0),
        (300, 300, -0.4),
    ):
        if kind == "causal" and sq != sk:
            continue
        q, do = (torch.randn(2, sq, 2 * group, 16).to(dtype).transpose(1, 2) for _ in range(2))
        k, v = (torch.randn(2, sk, 2, 16).to(dtype).transpose(1, 2) for _ in range(2))
        allowed = torch.rand(sq, sk) < 0.5 if kind == "partial" else None
        call: dict[str, Any] = {"kind": kind, "allowed": allowed, "logits": Logits(scale)}
        ran.clear()
        out, lse = block_attention(q, k, v, **call)
        grads = block_attention_backward(do, q, k, v, out, lse, **call)
        assert set(ran) == {("flash_cpu", "forward"), ("flash_cpu", "backward")}
        plain = block_attention(q, k, v, backend="plain", **call)
        plain_grads = block_attention_backward(do, q, k, v, *plain, backend="plain", **call)
        tolerance: dict[str, Any] = {"rtol": 0.0, "atol": 400 * torch.finfo(dtype).eps}
        for a, b in zip((out, lse, *grads), (*plain, *plain_grads), strict=True):
            torch.testing.assert_close(a.double(), b.double(), **tolerance)


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


@pytest.mark.parametrize("backend", ["plain", None])
@pytest.mark.parametrize("empty", range(3))
def test_nothing_to_compute_is_not_given_to_a_kernel(empty: int, backend: str | None) -> None:
    """Zero batch, queries or keys: the fused kernel would end the process."""
    b, sq, sk = (0 if i == empty else 2 for i in range(3))
    q, k = torch.randn(b, 2, sq, 4), torch.randn(b, 2, sk, 4)
    out, lse = block_attention(q, k, k, logits=Logits(0.3), backend=backend)
    assert (out == 0).all()
    assert (lse == -torch.inf).all()
    assert all(
        (g == 0).all()
        for g in block_attention_backward(q, q, k, k, out, lse, logits=Logits(0.3), backend=backend)
    )


def test_the_kernel_itself_still_dies_of_nothing() -> None:
    """When this fails, torch has mended it and the guard can go."""
    call = "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, q, q)"
    script = f"import torch; q = torch.ones(1, 1, 0, 4); {call}"
    assert (
        subprocess.run(
            [sys.executable, "-c", script], check=False, capture_output=True, timeout=120
        ).returncode
        != 0
    )


def test_one_causal_block_is_one_kernel_call_and_the_result_of_torch(
    ran: list[tuple[str, str]],
) -> None:
    q, k, v = (torch.randn(1, 150, 2, 16, requires_grad=True) for _ in range(3))
    do = torch.randn(1, 150, 2, 16)
    out: Any = local_attention(q, k, v, mask=Mask(causal=True))
    grads = torch.autograd.grad(out, (q, k, v), do)
    assert [direction for _, direction in ran] == ["forward", "backward"]
    fused = scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True
    ).transpose(1, 2)
    assert torch.equal(out, fused)
    for a, b in zip(grads, torch.autograd.grad(fused, (q, k, v), do), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("device", "dtype", "head_dim", "kind", "expected"),
    [
        ("cpu", torch.float64, 3, "partial", "flash_cpu"),
        ("cpu", torch.float16, 64, "causal", "flash_cpu"),
        ("cuda", torch.bfloat16, 128, "causal", "flash_cuda"),
        ("cuda", torch.bfloat16, 264, "full", "efficient_cuda"),
        ("cuda", torch.bfloat16, 12, "full", "plain"),
        ("cuda", torch.float32, 12, "full", "efficient_cuda"),
        ("cuda", torch.float32, 64, "partial", "plain"),
        ("cuda", torch.float64, 64, "full", "plain"),
        ("meta", torch.float32, 64, "full", "plain"),
    ],
)
def test_the_backend_can_be_asked(
    device: str, dtype: torch.dtype, head_dim: int, kind: str, expected: str
) -> None:
    assert backend_for(device, dtype, head_dim, kind, Logits(1.0)) == expected


def test_a_row_whose_lse_is_minus_infinity_has_no_gradient() -> None:
    """exp(s - lse) of such a row would be infinite.

    A caller that merged nothing for it hands it over all the same.
    """
    q, do, out = (torch.randn(1, 2, 6, 4) for _ in range(3))
    k, v = (torch.randn(1, 2, 6, 4) for _ in range(2))
    lse = torch.full((1, 2, 6), -torch.inf)
    for backend, kind in itertools.product(("plain", "flash_cpu"), ("full", "causal")):
        grads = block_attention_backward(
            do, q, k, v, out, lse, kind=kind, logits=Logits(0.3), backend=backend
        )
        assert all((grad == 0).all() for grad in grads)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_gradient_of_the_lse_is_not_rounded_to_the_heads_dtype(dtype: torch.dtype) -> None:
    q, k = torch.randn(1, 2, 5, 3).to(dtype), torch.randn(1, 1, 7, 3).to(dtype)
    grad_lse = torch.randn(1, 2, 5)
    do, wide_q, wide_k, wide_v, out = _with_lse_columns(q, q, k, k, q, grad_lse)
    smallest = 2.0**-24 if dtype == torch.float16 else 0.0  # float16 ends there
    assert ((do * out)[..., 3:].double().sum(-1) + grad_lse.double()).abs().max() <= smallest
    assert (wide_q[..., 3:] == 0).all()
    assert torch.equal(wide_q @ wide_k.mT, q @ k.mT)
    assert torch.equal(do @ wide_v.mT, q @ k.mT)
