"""Domain of choosing a token: top-k, top-p and temperature against their definition."""

from __future__ import annotations

import math
from functools import partial

import torch

from domains.declared import Call, Parts, Values, pure, spans, values
from sp_core.llama import Sampling

SAMPLING: dict[str, Parts] = {
    "temperature": values(0.0, 1.0, 50.0, 1e-310),
    "top_k": {**values(None, 1, 10_000), "2 to 7": lambda c, v: c.randint(2, 7)},
    "top_p": {**values(None, 1.0, 1e-12), "0.3 to 0.9": lambda c, v: c.uniform(0.3, 0.9)},
    "seed": {**values(0, 10**18, -7), "1 to 99": lambda c, v: c.randint(1, 99)},
}
"""Parameters of `Sampling`, in their order."""

LOGITS: dict[str, Parts] = {
    "logits.size": spans((5, 9), (1, 1), (1000, 2000)),
    "logits.values": values("normal", "large", "equal", "some -inf"),
    "logits.dtype": values("float64", "float32", "bfloat16"),
    "random": values("fresh", "used"),
    "prompt": spans((0, 0), (1, 1000)),
}


def sampled(drawn: Values) -> Call:
    """Choose a token from logits."""
    sampling = Sampling(*(drawn[name] for name in SAMPLING))
    random = sampling.random(drawn["prompt"])
    noise = torch.Generator().manual_seed(drawn["seed"] % 2**16)
    x = torch.randn(drawn["logits.size"], generator=noise, dtype=torch.float64)
    made = {
        "normal": x,
        "large": x * 1e4,
        "equal": torch.ones_like(x),
        "some -inf": x.where(x > 0, -torch.inf),
    }
    logits = made[drawn["logits.values"]].to(getattr(torch, drawn["logits.dtype"]))
    logits[0] = 1.0  # so that one token is possible
    if drawn["random"] == "used":
        torch.rand((), generator=random)
    given = {"logits": logits, "random": random}
    return Call(sampling.choose, given, partial(judge, sampling, given, random.clone_state()))


def judge(sampling: Sampling, given: Values, random: torch.Generator, token: int) -> None:
    """Compare a choice with the definition: the drawn share of the total probability."""
    logits = [float(x) for x in given["logits"]]
    order = sorted(range(len(logits)), key=lambda place: (-logits[place], place))
    if sampling.temperature == 0:
        assert token == order[0]
        return
    order = order[: sampling.top_k]
    weights = [
        math.exp((logits[place] - logits[order[0]]) / sampling.temperature) for place in order
    ]
    sums = [math.fsum(weights[: n + 1]) for n in range(len(weights))]
    if sampling.top_p is not None:
        sums = sums[
            : 1 + next(n for n, total in enumerate(sums) if total >= sampling.top_p * sums[-1])
        ]
    drawn = float(torch.rand((), generator=random, dtype=torch.float64)) * sums[-1]
    assert token == order[next(n for n, total in enumerate(sums) if total > drawn)]


SUBJECTS = [
    pure(
        "llama.Sampling.choose",
        SAMPLING | LOGITS,
        sampled,
        "llama.Sampling",
        "llama.Sampling.random",
        together=tuple(
            {"temperature": "1e-310", "logits.values": name} for name in ("normal", "equal")
        ),
    ),
]
