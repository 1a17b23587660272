"""Sequences that grow with a split cache.

Any split into prefill and decode gives what one device gives for the whole sequence.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from llama_cases import Case, mesh_of

import sp_core as sp
from sp_core.llama import Decoder, Sampling, byte_tokenizer, generate
from sp_core.testing import spmd

pytestmark = pytest.mark.usefixtures("short_slots")
"""Whether it is a prefill, and how many tokens each sequence gets."""


GREEDY = Case((6, 3), layers=1, scaling="llama3", vocab=31, seed=11)
PROMPTS = [[5, 1, 4], [2], [7, 7, 0, 3, 9, 30, 8]]


@spmd(1, 3)
def test_each_rank_keeps_its_share_of_the_tokens(comm: Any) -> None:
    """After any steps; what these compute is judged in domains/decoding.py."""
    with sp.Mesh(comm, ring=comm.size) as mesh:
        decoder = Decoder(GREEDY.model(mesh), [9, 4])
        for step, new in ((decoder.prefill, [[1] * 5, [2]]), (decoder.decode, [[3], [4, 5]])):
            step(new)
            (cache,) = decoder.caches
            kept = [len(owned) for owned in cache.owned]
            assert sum(kept) == sum(cache.lengths)
            assert max(kept) - min(kept) <= 1


@pytest.mark.parametrize("axes", [{"tp": 2}, {"ring": 2}, {"pp": 2}])
@spmd(2)
def test_a_token_costs_one_comparison(comm: Any, axes: dict[str, Any]) -> None:
    """Afterwards the ranks compare every call again, also if the decoder was given a bad token."""
    case = Case((6, 3), layers=2, vocab=31, seed=11)
    with sp.Mesh(comm, **axes) as mesh:
        decoder = Decoder(case.model(mesh), [9])
        decoder.prefill([[1] * 5])
        (group,) = (mesh[axis] for axis in axes)
        group.counters.reset()
        decoder.decode([[3]])
        assert group.counters["control"].calls == 1
        with pytest.raises(ValueError, match="vocabulary"):
            decoder.decode([[31]])
        sp.all_reduce(torch.zeros(1), comm=group)
        assert group.counters["control"].calls == 3


@spmd(1, 2)
def test_a_stop_string_may_span_tokens(comm: Any) -> None:
    with sp.Mesh(comm, tp=comm.size) as mesh:
        model, more = GREEDY.model(mesh), {"tokenizer": byte_tokenizer(), "max_tokens": 6}
        free = bytes(generate(model, [[5, 1, 4]], **more)[0])
        found = bytes(generate(model, [[5, 1, 4]], stop_strings=[free[1:3].decode()], **more)[0])
    assert found == free[: free.index(free[1:3]) + 2]
    assert len(found) < len(free)


@pytest.mark.parametrize("mesh", range(10))
@spmd(4)
def test_sampled_tokens_depend_on_the_seed_and_on_nothing_else(comm: Any, mesh: int) -> None:
    sampling = Sampling(temperature=1.5, top_k=20, top_p=0.95, seed=3)
    with mesh_of(comm, mesh, check="off") as made:
        found = generate(GREEDY.model(made), PROMPTS, max_tokens=3, sampling=sampling)
    with sp.Mesh(comm.Split(comm.rank, 0), tp=1) as alone_mesh:
        assert found == generate(GREEDY.model(alone_mesh), PROMPTS, max_tokens=3, sampling=sampling)
        assert found != generate(
            GREEDY.model(alone_mesh), PROMPTS, max_tokens=3, sampling=Sampling(1.5, 20, 0.95, 4)
        )
