"""The check of the scaling experiment can fail, and its measurements count what they say."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor

import sp_core as sp
from benchmarks.cases import block
from benchmarks.cases.setting import BlockSetting
from benchmarks.corpus import source_bytes
from benchmarks.records import Case, make_case
from benchmarks.sample import makespans, timing
from sp_core.testing import run_threads

SHAPE = {"batch": 2, "seq": 48, "hidden": 64, "heads": 4, "kv_heads": 2, "head_dim": 16, "ffn": 256}
CONTIGUOUS = {"layout": "contiguous", "mask": "full"}
TINY, CAUSAL = (
    make_case("layers", "allgather_kv", {"sp": 2}, SHAPE, "auto", mask=mask)
    for mask in ("full", "causal")
)


@pytest.fixture
def weights() -> dict[str, Tensor]:
    """Weights of the tiny block, drawn as the worker draws them."""
    alone = BlockSetting(
        make_case("layers", "allgather_kv", {"sp": 1}, SHAPE, "auto", **CONTIGUOUS)
    )

    def drawn(comm: Any) -> dict[str, Tensor]:
        with sp.Mesh(comm, sp=1) as mesh:
            (layer, _, _), _ = block.block(alone, mesh, lambda name: contextlib.nullcontext())
            return {name: weight.detach() for name, weight in layer.state_dict().items()}

    return run_threads(1, drawn)[0]


def outputs(
    weights: dict[str, Tensor], dtype: torch.dtype, case: Case = TINY
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor, Tensor]]:
    """Input, single-device output and float64 output in a dtype."""
    x = block.tokens(case, torch.arange(case.shape["seq"])).to(dtype)
    cast = {name: weight.to(dtype) for name, weight in weights.items()}
    return x, block.alone(x, cast, case), block.exact(x, cast, case)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize(
    "fault", ["one token", "shards swapped", "zeros", "not finite", "own keys only", "none"]
)
def test_a_wrong_output_is_found(
    weights: dict[str, Tensor],
    dtype: torch.dtype,
    fault: str,
    sampled: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also in the second sequence, where no token is computed in float64 if only some are."""
    if sampled:
        monkeypatch.setitem(block.EXACT_FLOPS, "cpu", 0.0)
    x, alone, truth = outputs(weights, dtype)
    wrong = alone.clone()
    if fault == "one token":
        wrong[1, 7] = alone[1, 8]
    if fault == "shards swapped":
        wrong = torch.cat(alone.chunk(2, 1)[::-1], 1)
    if fault == "zeros":
        wrong[:, -1] = 0
    if fault == "not finite":
        wrong[0, 0, 0] = float("nan")
    if fault == "own keys only":
        cast = {name: weight.to(dtype) for name, weight in weights.items()}
        wrong = torch.cat([block.alone(part, cast, TINY) for part in x.chunk(2, 1)], 1)
    verdict = block.judge(wrong, alone, truth, TINY)
    assert verdict.passed == (fault == "none")
    if fault == "none":
        assert (verdict.max_abs_error, verdict.tokens) == (0.0, 48 if sampled else 2 * 48)


def test_an_error_just_above_the_bound_is_found(weights: dict[str, Tensor]) -> None:
    """Where the single device errs most, and further: near to it, but too far from float64."""
    _, alone, truth = outputs(weights, torch.float32)
    worst = (alone - truth[2]).flatten().argmax()
    bound = block.judge(alone, alone, truth, TINY).bound
    for part, passed in ((0.4, True), (0.8, False)):
        ranks = alone.flatten().clone()
        ranks[worst] += part * bound
        assert block.judge(ranks.view_as(alone), alone, truth, TINY).passed == passed


def test_a_single_device_that_is_off_itself_proves_nothing(weights: dict[str, Tensor]) -> None:
    """As with TF32, whose 10 bits of mantissa are rounded here."""
    _, alone, truth = outputs(weights, torch.float32)
    coarse = (alone * 1024).round() / 1024
    verdict = block.judge(coarse, coarse, truth, TINY)
    assert not verdict.passed
    assert "The single device itself is too far off" in str(verdict)


@pytest.mark.parametrize("causal", [False, True])
def test_a_sample_of_tokens_has_the_values_of_the_whole(
    weights: dict[str, Tensor], causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CAUSAL if causal else TINY
    x, _, (_, _, whole) = outputs(weights, torch.float32, case)
    monkeypatch.setitem(block.EXACT_FLOPS, "cpu", 0.0)
    monkeypatch.setattr(block, "SAMPLED_TOKENS", 5)
    rows, positions, sample = block.exact(x, weights, case)
    assert rows.tolist() == [0]
    assert positions.tolist() == [0, 12, 24, 35, 47]
    torch.testing.assert_close(sample, whole[rows][:, positions])


@pytest.mark.parametrize("fault", ["none", "one token", "own keys only", "output"])
def test_a_wrong_gradient_is_found(weights: dict[str, Tensor], fault: str) -> None:
    case = make_case("layers", "ring", {"sp": 2}, SHAPE, "auto", mask="causal", direction="both")
    x, y, _ = outputs(weights, torch.float32, case)
    upstream = torch.randn(x.shape, generator=torch.Generator().manual_seed(0))
    grad = block.gradient(x, weights, case, upstream)
    if fault == "one token":
        grad[1, 7] = grad[1, 8]
    if fault == "own keys only":
        shards = zip(x.chunk(2, 1), upstream.chunk(2, 1), strict=True)
        grad = torch.cat([block.gradient(a, weights, case, b) for a, b in shards], 1)
    verdict = block.judged(y + (fault == "output"), [grad], x, upstream, weights, case)
    assert verdict.passed == (fault == "none")


def test_the_time_of_a_step_spans_all_ranks() -> None:
    spans = [[(0.0, 3.0), (10.0, 12.0)], [(1.0, 2.0), (10.5, 15.5)]]
    assert makespans(spans) == [3.0, 5.5]
    told = timing(spans, 1)
    assert told["median_s"] == 4.25
    assert told["barrier_skew_s"] == {"median": 0.75, "p95": 1.0, "max": 1.0}
    assert told["skew_limited"]


def test_the_text_is_python_and_as_long_as_asked() -> None:
    text = source_bytes(5000)
    assert len(text) == 5000
    assert text == source_bytes(9000)[:5000]
    assert b"import " in text
