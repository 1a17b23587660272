"""Laws of packs: small blocks in tiles of one kernel call give the attention of the reference."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings, strategies as st
from test_attention import Problem, check_problem, problems

from sp_core.attention import attend, attend_backward, kernels, packs
from sp_core.attention.logits import Logits
from sp_core.mask import Mask, plan_blocks
from sp_core.sharding import Sharding


@pytest.fixture
def packing() -> Iterator[None]:
    """Pack every block of few tokens, into tiles so small that short sequences have many."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packs, "SIDES", (2, 4, 9))
        patch.setattr(packs, "LEAST_BLOCKS", 1)
        patch.setattr(packs, "ELEMENTS", 64)
        packs._packed.cache_clear()
        yield
    packs._packed.cache_clear()


@st.composite
def packed_problems(draw: st.DrawFn) -> Problem:
    """Many short documents, in shards of every layout."""
    problem = draw(problems())
    length, size = draw(st.integers(1, 60)), draw(st.integers(1, 3))
    inner = draw(st.lists(st.integers(0, length), max_size=length))
    mask = {"causal": draw(st.booleans()), "window": None, "documents": (0, *sorted(inner), length)}
    layouts = [Sharding.contiguous, Sharding.zigzag, Sharding.striped]
    sharding = draw(st.sampled_from(layouts))(length, size)
    q, kv = (sharding.positions(draw(st.integers(0, size - 1))).tolist() for _ in range(2))
    dtype = draw(st.sampled_from([torch.float32, torch.float64]))
    return problem._replace(q_positions=q, kv_positions=kv, mask=mask, dtype=dtype)


def written(batch: int, q: list[int], kv: list[int], documents: tuple[int, ...]) -> Problem:
    mask = {"causal": True, "window": None, "documents": documents}
    return Problem(batch, 1, 1, 1, q, kv, mask, 0.3, 1.0, torch.float32, 0)


@pytest.mark.usefixtures("packing")
@settings(deadline=None)
@example(problem=written(2, [*range(12)], [*range(12)], (0, 3, 5, 9, 12)), use_lse=True)
@example(problem=written(1, [*range(9, 13)], [0, 1, *range(9, 13)], (0, 20)), use_lse=True)
@given(problem=packed_problems(), use_lse=st.booleans())
def test_packed_documents_are_the_reference(problem: Problem, use_lse: bool) -> None:
    check_problem(problem, use_lse=use_lse)


@pytest.mark.usefixtures("packing")
@settings(deadline=None)
@given(problem=problems(), use_lse=st.booleans())
def test_any_problem_with_packs_is_the_reference(problem: Problem, use_lse: bool) -> None:
    check_problem(problem, use_lse=use_lse)


def call(bounds: tuple[int, ...], length: int) -> dict[str, Any]:
    mask = Mask(causal=True, documents=bounds)
    where = {"q_positions": range(length), "kv_positions": range(length)}
    return {**where, "mask": mask, "logits": Logits(0.3)}


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_poisoned_document_leaves_its_neighbours_alone(poison: float) -> None:
    """Padding with any content in a document of its own is safe."""
    bounds = tuple(range(0, 65, 8))
    q, k, v, do = torch.randn(4, 1, 2, 64, 8, generator=torch.Generator().manual_seed(0)).unbind()
    blocks = plan_blocks(range(64), range(64), Mask(causal=True, documents=bounds))
    assert packs.packed(blocks, q, None, Logits(0.3))[1]
    clean = attend(q, k, v, **call(bounds, 64))
    grads = attend_backward(do, q, k, v, *clean, **call(bounds, 64))
    for x in (q, k, v, do):
        x[:, :, 56:] = poison
    dirty = attend(q, k, v, **call(bounds, 64))
    dirty_grads = attend_backward(do, q, k, v, *dirty, **call(bounds, 64))
    for a, b in zip((*clean, *grads), (*dirty, *dirty_grads), strict=True):
        torch.testing.assert_close(b[:, :, :56], a[:, :, :56])


def test_hundreds_of_documents_take_few_kernel_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(kernels, "forward", counted(calls, "forward"))
    monkeypatch.setattr(kernels, "backward", counted(calls, "backward"))
    q, k, v, do = torch.randn(4, 1, 2, 4096, 64).unbind()
    bounds = tuple(range(0, 4097, 8))
    out, lse = attend(q, k, v, **call(bounds, 4096))
    attend_backward(do, q, k, v, out, lse, **call(bounds, 4096))
    assert 2 <= len(calls) <= 16


def counted(calls: list[str], name: str) -> Any:
    """Return a kernel that notes its calls."""
    kernel = getattr(kernels, name)

    def run(*given: Any) -> Any:
        calls.append(name)
        return kernel(*given)

    return run
