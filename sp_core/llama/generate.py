"""Choosing tokens: greedily, or at random with temperature, top-k and top-p; the same ones on every rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sp_core import arguments
from sp_core.collectives.api import all_gather, broadcast
from sp_core.llama.decode import Decoder, Tokens
from sp_core.llama.grid import Grid
from sp_core.llama.model import Llama, check_model, check_tokens
from sp_core.segments import split_ranges

OnToken = Callable[[int, int], None]
"""Called with the number of a prompt and its next token."""


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen from logits.

    Args:
        temperature: 0 takes the most likely one; else the logits are divided by it.
        top_k: only from so many of the most likely ones; all if None.
        top_p: only from the fewest most likely ones whose probabilities add up to this; all if None.
        seed: of the random numbers, any whole number; each prompt has its own sequence of them.

    Raises:
        ValueError: a number that makes no sense.

    Source: Holtzman et al. 2020, The Curious Case of Neural Text Degeneration, arXiv:1904.09751, section 3.1 (top-p).
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse what makes no sense."""
        if not 0 <= self.temperature < torch.inf:
            raise ValueError(f"temperature={self.temperature} was given; pass a number of at least 0.")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k={self.top_k} was given; pass at least 1, or None for all tokens.")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} was given; pass a number above 0 and at most 1, or None for all tokens.")

    def random(self, prompt: int) -> torch.Generator:
        """The random numbers of a prompt, whichever ranks it is on."""
        return torch.Generator().manual_seed((self.seed * 1_000_003 + prompt) % 2**63)

    def choose(self, logits: Tensor, random: torch.Generator) -> int:
        """A token, from logits (V,); the first one of equal ones."""
        if self.temperature == 0:
            return int(logits.argmax())
        order = logits.double().sort(descending=True, stable=True)
        p = ((order.values - order.values[0]) / self.temperature).softmax(0)  # at most 0: no quotient is infinity
        if self.top_k is not None:
            p[self.top_k :] = 0
        if self.top_p is not None:
            p[p.cumsum(0) - p >= self.top_p * p.sum()] = 0
        chances = p.cumsum(0)
        drawn = torch.rand((), generator=random, dtype=torch.float64).to(chances.device) * chances[-1]
        return int(order.indices[int((chances <= drawn).sum())])


def generate(
    model: Llama,
    prompts: Tokens,
    *,
    max_tokens: int,
    sampling: Sampling | None = None,
    stop: Sequence[int] | None = None,
    on_token: OnToken | None = None,
) -> list[list[int]]:
    """Continue prompts.

    Args:
        model: the weights.
        prompts: of any lengths, at least one token each; the same on every rank. Replicas take shares of them.
        max_tokens: how many to add at most.
        sampling: how to choose; greedily if not given.
        stop: tokens after which a sequence ends; those of the model's configuration if not given.
        on_token: called as tokens are chosen, on the ranks of the replica that does.

    Returns:
        The new tokens of each prompt, with the one that stopped it, on every rank.

    Communication:
        That of `Decoder.prefill` once and of `Decoder.decode` for each further token, and each time a broadcast of the tokens
        chosen. In the end an all-gather of the results over the replicas.

    Raises:
        ValueError: an empty prompt, a token that is not in the vocabulary, or more tokens than the model has positions.
        CollectiveMismatch: ranks with different arguments. On every rank.
    """
    check_model(model)
    stop = model.config.eos_token_id if stop is None else stop
    sampling = Sampling() if sampling is None else sampling
    model.grid.everyone.agree_on(
        lambda: f"generate({list(map(list, prompts))}, {max_tokens}, {sampling}, {sorted(set(stop))})",
        lambda: _check(model, prompts, max_tokens, sampling, stop, on_token),
    )
    share = split_ranges(len(prompts), model.grid.replicas.size)[model.grid.replicas.rank]
    batch = _Batch(model, [list(prompts[number]) for number in share], max_tokens, set(stop))
    randoms = [sampling.random(number) for number in share]
    for _ in range(max_tokens):
        waiting = [number for number, done in enumerate(batch.done) if not done]
        if not waiting:
            break
        logits = batch.logits()
        chosen = torch.tensor([sampling.choose(row, randoms[number]) for number, row in zip(waiting, logits, strict=True)])
        for number, token in zip(waiting, broadcast(chosen.to(logits.device), comm=model.grid.model).tolist(), strict=True):
            batch.add(number, token)
            if on_token is not None:
                on_token(share[number], token)
    return _everybodys(batch.results, model.grid)


class _Batch:
    """The prompts of one replica and what has been added to them."""

    def __init__(self, model: Llama, prompts: list[list[int]], max_tokens: int, stops: set[int]) -> None:
        self.decoder = Decoder(model, [len(prompt) + max_tokens for prompt in prompts])
        self.stops = stops
        self.new = prompts  # tokens that the decoder has not seen yet
        self.results: list[list[int]] = [[] for _ in prompts]
        self.done = [False] * len(prompts)

    def logits(self) -> Tensor:
        """After the newest tokens, of the sequences that go on."""
        first = not any(self.results)
        logits = self.decoder.prefill(self.new) if first else self.decoder.decode(self.new)
        self.new = [[] for _ in self.new]
        return logits

    def add(self, number: int, token: int) -> None:
        """One more token for a sequence."""
        self.results[number].append(token)
        self.done[number] = token in self.stops
        self.new[number] = [] if self.done[number] else [token]


def _check(
    model: Llama, prompts: Tokens, max_tokens: int, sampling: Sampling, stop: Sequence[int], on_token: OnToken | None
) -> int:
    arguments.check(prompts=prompts, max_tokens=max_tokens, stop=stop, on_token=on_token)
    arguments.check_type("sampling", sampling, Sampling, "Pass Sampling(...), or None to choose greedily.")
    limit = model.config.max_position_embeddings
    if max_tokens < 0:
        raise ValueError(f"max_tokens={max_tokens} was given; pass at least 0.")
    for number, prompt in enumerate(prompts):
        if not prompt:
            raise ValueError(f"prompt {number} is empty; give at least one token, such as the one that begins a text.")
        if len(prompt) + max_tokens > limit:
            raise ValueError(
                f"prompt {number} has {len(prompt)} tokens; with {max_tokens} more it exceeds the model's {limit} positions."
            )
        check_tokens(torch.tensor(prompt), model.config)
    return 0


def _everybodys(results: list[list[int]], grid: Grid) -> list[list[int]]:
    """The results of all replicas, one after the other: each sequence travels behind its length."""
    line = [number for tokens in results for number in (len(tokens), *tokens)]
    rest = all_gather(torch.tensor(line, dtype=torch.int64, device=grid.replicas.device), comm=grid.replicas).tolist()
    everything = []
    while rest:
        length = rest[0]
        everything.append(rest[1 : 1 + length])
        rest = rest[1 + length :]
    return everything
