"""Sequences that grow with a split cache: any split into prefill and decode gives what one device gives for the whole sequence."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from domains.models import Expected
from hypothesis import strategies as st
from llama_cases import MESHES, Case, cases, mesh_of, meshes, schemes
from oracle import reference
from oracle.once import contents
from oracle.ways import Way, ways
from torch import Tensor

import sp_core as sp
from sp_core.llama import Decoder, Sampling, generate
from sp_core.testing import event, given, spmd, tier
from sp_core.testing.tolerance import check_close

pytestmark = pytest.mark.usefixtures("short_slots")
Step = tuple[bool, list[int]]
"""Whether it is a prefill, and how many tokens each sequence gets."""


@st.composite
def step_lists(draw: st.DrawFn) -> list[Step]:
    """A batch of one to three unequal sequences, that grow by prefills and decodes in any order, by one token or several."""
    batch = draw(st.integers(1, 3))
    first = draw(_not_all_zero(st.integers(0, 6), batch))
    some = _not_all_zero(st.sampled_from([0, 1, 1, 2, 4]), batch)
    return [
        (draw(st.booleans()), first),
        *draw(st.lists(st.tuples(st.booleans(), some), max_size=4)),
    ]


def _not_all_zero(counts: st.SearchStrategy[int], batch: int) -> st.SearchStrategy[list[int]]:
    return st.lists(counts, min_size=batch, max_size=batch).map(
        lambda found: found if any(found) else [1, *found[1:]]
    )


@given(
    max_ranks=4,
    max_examples=16,
    case=cases(),
    steps=step_lists(),
    mesh=meshes(),
    scheme=schemes(),
    way=ways(),
    tp_sp=st.booleans(),
)
def test_any_split_into_prefill_and_decode_gives_the_same_logits(
    comm: Any, case: Case, steps: list[Step], mesh: int, scheme: str | None, way: Way, tp_sp: bool
) -> None:
    """After every step the logits are those of one device over all tokens so far, and those of a fresh prefill of them.

    Each rank keeps its share of the tokens.
    """
    batch = len(steps[0][1])
    totals = [sum(counts[i] for _, counts in steps) for i in range(batch)]
    texts = case.tokens(batch, max(totals))

    def run(rounding: Any, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"logits": reference.llama(texts, weights, rounding=rounding, **case.options())}

    wanted = Expected("llama decode", case, run, contents(texts), samples=4)
    with mesh_of(comm, mesh, stages=case.layers, **way) as made:
        model = case.model(made, scheme, tp_sp=tp_sp)
        decoder, lengths = Decoder(model, totals), [0] * batch
        size = model.grid.sequence.size
        for whole, counts in steps:
            new = [texts[i, lengths[i] : lengths[i] + n].tolist() for i, n in enumerate(counts)]
            logits = (decoder.prefill if whole else decoder.decode)(new)
            lengths = [a + b for a, b in zip(lengths, counts, strict=True)]
            last = [(i, lengths[i] - 1) for i, n in enumerate(counts) if n]
            wanted.check(
                "logits", logits, lambda x, last=last: torch.stack([x[place] for place in last])
            )
            allowed = torch.stack([wanted.allowed("logits")[place] for place in last])
            fresh = Decoder(model, lengths).prefill(
                [texts[i, :length].tolist() for i, length in enumerate(lengths)]
            )
            filled = [i for i, length in enumerate(lengths) if length]
            again = fresh[[filled.index(i) for i, _ in last]].cpu()
            check_close(
                "logits beside those of a fresh prefill", logits.cpu(), again.double(), 2 * allowed
            )
            event(
                "fewer new tokens than sequence ranks" if sum(counts) < size else "at least as many"
            )
            for cache, part in zip(decoder.caches, decoder.parts, strict=True):
                kept = [len(owned) for owned in cache.owned]
                assert sum(kept) == sum(lengths[number] for number in part)
                assert max(kept) - min(kept) <= 1
        heads = model.layers[model.own[0]].self_attn.k_proj.weight.shape[0] // case.head_dim
        token = 2 * len(model.own) * heads * case.head_dim
        assert (
            sum(cache.rows.numel() for cache in decoder.caches)
            <= (sum(totals) / size + len(decoder.caches)) * token
        )


GREEDY = Case((6, 3), layers=1, scaling="llama3", vocab=31, seed=11)
PROMPTS = [[5, 1, 4], [2], [7, 7, 0, 3, 9, 30, 8]]


def alone(case: Case, prompt: list[int], count: int) -> list[int]:
    """Greedily, by the reference over the whole sequence each time."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(case.logits(torch.tensor([tokens]))[0, -1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("mesh", range(6))
@spmd(1, 2, 3, 4)
def test_greedy_tokens_are_those_of_one_device_on_every_mesh(comm: Any, mesh: int) -> None:
    """64 tokens where ranks are threads. A replica without a prompt does nothing, so there is one."""
    single = [number for number, axes in enumerate(MESHES[comm.size]) if axes["dp"] == 1]
    if mesh >= len(single):
        return
    count = 64 if tier() == "threads" else 6
    with mesh_of(comm, single[mesh], check="off") as made:
        found = generate(GREEDY.model(made), PROMPTS[:1], max_tokens=count)
    assert found == [greedy_answer()[:count]]


@functools.cache
def greedy_answer() -> list[int]:
    """The reference's 64 tokens, which are not always the same few."""
    answer = alone(GREEDY, PROMPTS[0], 64)
    assert len(set(answer)) > 5
    return answer


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


@spmd(1, 2)
def test_a_sequence_ends_at_a_stop_token_and_the_others_go_on(comm: Any) -> None:
    full = [alone(GREEDY, prompt, 8) for prompt in PROMPTS]
    stop = full[0][3]
    want = [tokens[: tokens.index(stop) + 1] if stop in tokens else tokens for tokens in full]
    seen: list[tuple[int, int]] = []
    with sp.Mesh(comm, ring=comm.size) as mesh:
        model = GREEDY.model(mesh)
        assert (
            generate(
                model, PROMPTS, max_tokens=8, stop=[stop], on_token=lambda *what: seen.append(what)
            )
            == want
        )
        assert generate(model, PROMPTS, max_tokens=0) == [[], [], []]
        assert generate(model, [], max_tokens=3) == []
    assert [[token for number, token in seen if number == i] for i in range(3)] == want


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
