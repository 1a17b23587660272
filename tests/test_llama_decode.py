"""Sequences that grow with a split cache.

Any split into prefill and decode gives what one device gives for the whole sequence.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from llama_cases import Case, mesh_of

import sp_core as sp
from sp_core.llama import Decoder, Sampling, generate
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


WRONG: dict[str, tuple[str, list[list[int]], int]] = {
    "an empty prompt": ("prompt 1 is empty", [[1], []], 4),
    "too many positions": ("exceeds the model's 128 positions", [[1]], 128),
    "a token beyond the vocabulary": ("vocabulary has 0..30", [[31]], 1),
    "a negative number": ("max_tokens=-1", [[1]], -1),
}


@pytest.mark.parametrize("wrong", sorted(WRONG))
@spmd(1, 4)
def test_bad_requests_are_refused_on_every_rank(comm: Any, wrong: str) -> None:
    text, prompts, count = WRONG[wrong]
    with mesh_of(comm, 4) as mesh:
        with pytest.raises(ValueError, match=text):
            generate(GREEDY.model(mesh), prompts, max_tokens=count)
        if comm.size > 1:
            with pytest.raises(sp.CollectiveMismatch, match="generate"):
                generate(GREEDY.model(mesh), [[comm.rank]], max_tokens=1)


@spmd(2)
def test_a_decoder_refuses_what_it_has_no_room_for(comm: Any) -> None:
    with sp.Mesh(comm, ring=2) as mesh:
        decoder = Decoder(GREEDY.model(mesh), [3, 2])
        decoder.prefill([[1, 2], []])
        for tokens, text in (
            ([[1, 2], [3]], "room for 3"),
            ([[1]], "there are 2"),
            ([[], []], "no token"),
        ):
            with pytest.raises(ValueError, match=text):
                decoder.decode(tokens)
        assert decoder.decode([[1], [3]]).shape == (2, 31)


@pytest.mark.parametrize(
    ("options", "text"),
    [((-1.0,), "temperature"), ((1.0, 0), "top_k"), ((1.0, None, 0.0), "top_p")],
)
def test_sampling_that_makes_no_sense_is_refused(options: tuple[Any, ...], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Sampling(*options)


def test_top_k_and_top_p_leave_out_the_unlikely() -> None:
    logits = torch.tensor([0.1, 0.4, 0.2, 0.3]).log()
    random = torch.Generator().manual_seed(0)
    for sampling, allowed in (
        (Sampling(1.0), {0, 1, 2, 3}),
        (Sampling(1.0, top_k=2), {1, 3}),
        (Sampling(1.0, top_p=0.75), {1, 2, 3}),
        (Sampling(1.0, top_k=3, top_p=0.5), {1, 3}),
        (Sampling(1.0, top_p=0.01), {1}),
    ):
        assert {sampling.choose(logits, random) for _ in range(300)} == allowed
    halves = torch.zeros(2)  # one token alone has exactly the probability that is asked for
    assert {Sampling(1.0, top_p=0.5).choose(halves, random) for _ in range(100)} == {0}
    draws = torch.tensor([Sampling(1.0).choose(logits, random) for _ in range(4000)])
    found = torch.bincount(draws, minlength=4) / 4000
    assert (found - logits.exp()).abs().max() < 0.04  # five standard deviations
