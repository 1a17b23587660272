"""`generate`: continue prompts, greedily or at random with temperature, top-k and top-p.

Prompts are divided among replicas (ranks along the axis "dp"). All ranks of a replica work on the
same prompts and get the same tokens. `Sampling` says how a token is chosen from logits.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any
from zlib import crc32

import torch
from torch import Tensor

from sp_core import arguments
from sp_core.agreement import make_alike
from sp_core.collectives.api import all_gather, broadcast
from sp_core.llama.config import Tokens, check_sequences
from sp_core.llama.decode import Decoder
from sp_core.llama.model import Llama, check_model
from sp_core.segments import split_ranges

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_NONE = -1  # stands for the token after logits that are not finite


@dataclass(frozen=True)
class Sampling:
    """The rule by which the next token is chosen from logits.

    Args:
        temperature: 0 takes the most likely token; otherwise a divisor of the logits.
        top_k: choose among this many most likely tokens; None for all.
        top_p: of the tokens that top_k leaves, choose among the fewest most likely ones that have
            at least this share of the probability; None for all.
        seed: a whole number, from which each prompt's own random numbers follow.

    Raises:
        ValueError: temperature is negative or infinite, top_k below 1, or top_p not in (0, 1].
        TypeError: a value that is no number, or that is not a whole number where one is needed.

    Source: Holtzman et al. 2020, The Curious Case of Neural Text Degeneration, arXiv:1904.09751,
    section 3.1 (top-p).
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        """Raise TypeError if a value is no number, and ValueError if one is out of range."""
        arguments.check(**vars(self))

    def random(self, prompt: int) -> torch.Generator:
        """Return the random generator of the prompt with this index, equal on any mesh."""
        # torch uses the last 32 bits of a seed only
        return torch.Generator().manual_seed(crc32(f"{self.seed} {prompt}".encode()))

    def choose(self, logits: Tensor, random: torch.Generator) -> int:
        """Return a token chosen from logits (V,).

        Draw one number from `random`, or, with temperature 0, none: return the lowest token with
        the greatest logit. A token with logit -inf is never chosen.

        Raises:
            ValueError: a logit is NaN or infinity, or all are -inf.
        """
        if not logits.amax().isfinite():  # the maximum of numbers with NaN is NaN
            raise not_finite("the logits")
        if self.temperature == 0:
            return int(logits.argmax())
        order = logits.double().sort(descending=True, stable=True)
        # Differences are at most 0, so no quotient is infinity. The divisor is a tensor, because
        # CUDA multiplies by the reciprocal of a number, which may be infinity.
        temperature = order.values.new_full((), float(self.temperature))
        p = ((order.values - order.values[0]) / temperature).softmax(0)
        # CUDA rounds each sum its own way, and `torch.use_deterministic_algorithms` refuses them.
        sums = p[: self.top_k].cpu().cumsum(0)
        if self.top_p is not None:
            sums = sums[: torch.searchsorted(sums, float(self.top_p) * sums[-1]) + 1]
        uniform = torch.rand((), generator=random, dtype=torch.float64, device="cpu")
        return int(order.indices[torch.searchsorted(sums, uniform * sums[-1], right=True)])


def not_finite(what: str) -> ValueError:
    """Return the error for logits from which no token can be chosen; `what` names them."""
    return ValueError(
        f"{what} are not finite: NaN or infinity is among them, or all are -infinity. (NaN spreads "
        f"among prompts that are computed together.) Compute in another dtype, such as float32 "
        f"(dtype= of load, --dtype of sp-core), or check the weights of the model."
    )


def generate(
    model: Llama,
    prompts: Tokens,
    *,
    max_tokens: int,
    sampling: Sampling | None = None,
    stop: Sequence[int] | None = None,
    stop_strings: Sequence[str] = (),
    tokenizer: "Tokenizer | None" = None,
    on_token: Callable[[int, int], None] | None = None,
) -> list[list[int]]:
    """Continue prompts with new tokens. Every rank of the mesh calls this.

    Args:
        model: the model, on any mesh; faster on a CPU with frozen weights (see `Decoder`).
        prompts: for each prompt its tokens, at least one; equal on every rank. Each replica (ranks
            along the axis "dp") continues a part of the prompts.
        max_tokens: the most new tokens of a prompt.
        sampling: how to choose tokens; greedily if not given.
        stop: tokens after which a sequence ends; eos_token_id of the configuration if not given.
        stop_strings: texts. A sequence ends as soon as the text of its new tokens, special tokens
            included, contains one of these.
        tokenizer: needed for `stop_strings`; rank 0 of a replica decides with its tokenizer.
        on_token: called with the index of a prompt and a token as soon as the token is chosen, on
            all ranks of the prompt's replica.

    Returns:
        For each prompt the new tokens, including the one that ended its sequence, on every rank.

    Communication:
        Two agreements (32-byte all-reduces). As making a `Decoder` and `Decoder.prefill` once, and
        as `Decoder.decode` for each further token. After each call a broadcast of the chosen tokens
        in the replica. In the end an all-gather of the results over the replicas.

    Raises:
        ValueError: an empty prompt, a token that is not in the vocabulary, more tokens than the
            model has positions, a negative max_tokens, stop strings without a tokenizer, or logits
            that are not finite; then after all replicas have ended.
        DtypeError: a model of a half type under autocast to another half type.
        TypeError: an argument of the wrong type, an empty stop string, or a part of the model that
            was replaced or has hooks.
        RankError: too little memory for keys and values.
        CollectiveMismatch: ranks with different arguments or autocast.

    All of these errors are raised on every rank, but that of a wrong `model` on this rank.
    """
    check_model(model)
    grid = model.grid
    stop = model.config.eos_token_id if stop is None else stop
    sampling, max_tokens = sampling or Sampling(), arguments.plain(max_tokens)
    ending: dict[str, Any] = {"stop": stop, "stop_strings": stop_strings, "tokenizer": tokenizer}
    grid.everyone.agree_on(
        lambda: (
            f"generate({list(map(list, prompts))}, {max_tokens}, {model.precision}, {sampling}, "
            f"{sorted(set(stop))}, {sorted(set(stop_strings))})"
        ),
        lambda: _check(model, prompts, max_tokens, sampling, on_token=on_token, **ending),
    )
    share = split_ranges(len(prompts), grid.replicas.size)[grid.replicas.rank]
    results = {number: list[int]() for number in share}
    decoder = _decoder(model, [len(prompts[number]) + max_tokens for number in share])
    if share:
        ends = partial(_ends, **ending)
        for number, token in _chosen(decoder, prompts, results, max_tokens, sampling, ends):
            results[number].append(token)
            if on_token is not None and token != _NONE:
                on_token(number, token)
    line = [number for tokens in results.values() for number in (len(tokens), *tokens)]
    own = torch.tensor(line, dtype=torch.int64, device=grid.replicas.device)
    everybodys = iter(all_gather(own, comm=grid.replicas).tolist())
    # in `line` the tokens of a sequence follow their number
    found = [list(islice(everybodys, length)) for length in everybodys]
    if wrong := [number for number, tokens in enumerate(found) if _NONE in tokens]:
        raise not_finite(f"the logits of prompts {wrong}")
    return found


def _decoder(model: Llama, room: Sequence[int]) -> Decoder:
    """Make this replica's decoder. An error of one replica is raised on all, which wait for it."""
    return make_alike(model.grid.everyone, lambda: (Decoder(model, room), "decoders of generate()"))


def _chosen(
    decoder: Decoder,
    prompts: Tokens,
    said: Mapping[int, Sequence[int]],
    max_tokens: int,
    sampling: Sampling,
    ends: Callable[[Sequence[int]], bool],
) -> Iterator[tuple[int, int]]:
    """Yield (index of a prompt, chosen token) for this replica's prompts, as tokens are chosen.

    All ranks of the replica yield `_NONE` for logits that rank 0 finds not finite.

    Args:
        decoder: has room for this replica's prompts and their new tokens.
        prompts, max_tokens, sampling: as in `generate`.
        said: for each prompt of this replica, by index, the new tokens so far. The caller adds each
            token that is yielded.
        ends: whether a sequence ends with the last of its new tokens.
    """
    randoms = {number: sampling.random(number) for number in said}
    # for each sequence the tokens that the decoder has not been given yet
    new, step = {number: list(prompts[number]) for number in said}, decoder.prefill
    for _ in range(max_tokens):
        logits, step = step(list(new.values())), decoder.decode
        going_on = [number for number in said if new[number]]
        chosen = dict.fromkeys(going_on, _NONE)
        for number, row in zip(going_on, logits, strict=True):
            with suppress(ValueError):  # other ranks must not wait for this one
                chosen[number] = sampling.choose(row, randoms[number])
        told = [
            2 * token + (token == _NONE or ends([*said[number], token]))
            for number, token in chosen.items()
        ]
        received = torch.tensor(told, dtype=torch.int64, device=logits.device)
        told = broadcast(received, comm=decoder.model.grid.model).tolist()
        new = {number: [] for number in said}
        for number, (token, is_last) in zip(going_on, (divmod(x, 2) for x in told), strict=True):
            yield number, token
            new[number] = [] if is_last else [token]
        if not any(new.values()) or _NONE in told:  # 2 * _NONE + 1 is _NONE
            break


def _ends(
    tokens: Sequence[int],
    stop: Sequence[int],
    stop_strings: Sequence[str],
    tokenizer: "Tokenizer | None",
) -> bool:
    """Return whether a sequence with these new tokens ends; other arguments as in `generate`."""
    if tokens[-1] in stop:
        return True
    said = tokenizer.decode(tokens, skip_special_tokens=False) if tokenizer and stop_strings else ""
    return any(text in said for text in stop_strings)


def _check(model: Llama, prompts: Tokens, max_tokens: int, sampling: Sampling, **more: Any) -> None:
    """Raise an error, on this rank, if an argument of `generate` is wrong."""
    arguments.check(prompts=prompts, max_tokens=max_tokens, **more)
    arguments.check_type(
        "sampling", sampling, Sampling, "Pass Sampling(...), or None to choose greedily."
    )
    if (texts := more["stop_strings"]) and more["tokenizer"] is None:
        raise ValueError(
            f"stop_strings={list(texts)} were given without a tokenizer; pass tokenizer=, such as "
            f"that of the model's folder."
        )
    check_sequences(prompts, model.config, "prompt", more=max_tokens)
