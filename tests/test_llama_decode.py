"""Sequences that grow with a split cache.

Any split into prefill and decode gives what one device gives for the whole sequence.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from llama_cases import Case, mesh_of
from tokenizers import Tokenizer, models

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


@pytest.mark.parametrize("mesh", range(14))
@spmd(4)
def test_a_sequence_ends_at_a_stop_string_in_its_new_tokens(comm: Any, mesh: int) -> None:
    """The string may span new tokens, but not begin in the prompt or in another sequence."""
    case = Case((6, 3), layers=2, vocab=31, seed=11)
    with mesh_of(comm, mesh, stages=2) as made:
        model = case.model(made)
        call = partial(generate, model, PROMPTS, max_tokens=9, sampling=Sampling(1.5))
        free = [bytes(tokens) for tokens in call()]
        seams = [bytes(p[-1:]) + text[:1] for p, text in zip(PROMPTS, free, strict=True)]
        strings = [free[0][1:3].decode(), free[1][6:8].decode(), *map(bytes.decode, seams)]
        decides = model.grid.model.rank == 0
        tokenizer = byte_tokenizer() if decides else Tokenizer(models.BPE())  # which has no text
        found = call(stop_strings=strings, tokenizer=tokenizer)
    texts = [text.decode() for text in free]
    cuts = [[text.find(x) + 2 for x in strings if x in text] for text in texts]
    wanted = [text[: min(cut, default=9)] for text, cut in zip(texts, cuts, strict=True)]
    assert [bytes(tokens).decode() for tokens in found] == wanted
    assert [*map(len, wanted)] == [3, 8, 9]


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
