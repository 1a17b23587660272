"""Describe the meshes, the sizes and the planted faults of the training runs."""

from __future__ import annotations

import inspect
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from benchmarks.corpus import source_bytes
from sp_core.llama import LlamaConfig, model, train
from sp_core.nn import gradients, loss

CORPUS_BYTES = 1 << 20
DTYPES = ("float64", "float32")


class Place(msgspec.Struct, frozen=True):
    """A mesh and how it is used.

    Args:
        axes: of the mesh.
        scheme: of attention over the ranks that share a sequence.
        layout: which of them owns which tokens.
        tp_sp: whether tensor ranks split the tokens too.
    """

    axes: dict[str, Any]
    scheme: str | None = None
    layout: str = "zigzag"
    tp_sp: bool = False

    @property
    def name(self) -> str:
        """Return a name for people and for files."""
        axes = [f"{axis}{size}" for axis, size in self.axes.items()]
        return "_".join(filter(None, (*axes, self.scheme, "sp" * self.tp_sp)))


def places(ranks: int) -> list[Place]:
    """Return every scheme on every mesh: all ranks along one axis, and two along each of two."""
    single = [
        Place({"dp": ranks}),
        Place({"ring": ranks}),
        Place({"ring": ranks}, "allgather_kv", "contiguous"),
        Place({"ulysses": ranks}, None, "striped"),
        Place({"tp": ranks}),
        Place({"tp": ranks}, tp_sp=True),
    ]
    pairs = [
        Place({"dp": 2, "ring": 2}, None, "striped"),
        Place({"dp": 2, "ring": 2}, "allgather_kv", "zigzag"),
        Place({"dp": 2, "ulysses": 2}),
        Place({"dp": 2, "tp": 2}),
        Place({"ring": 2, "ulysses": 2}),
        Place({"ring": 2, "tp": 2}, None, "contiguous"),
        Place({"ring": 2, "tp": 2}, "allgather_kv", "striped"),
        Place({"ulysses": 2, "tp": 2}, None, "contiguous", tp_sp=True),
    ]
    return [*single, *(pairs if ranks == 4 else [])]


MODEL: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 144,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 24,
}
"""A million parameters; 3 and 4 tensor ranks share key/value heads, 4 do not divide the heads."""


class Setting(msgspec.Struct, frozen=True):
    """A training run.

    Args:
        steps: how many.
        every: steps between those at which gradients are compared.
        sequences: in a batch.
        shortest, longest: lengths of sequences, in tokens.
        learning_rate: of AdamW, reached after `warmup` steps.
        max_norm: to which gradients are clipped.
        perturbed: runs from weights that differ by one unit in the last place.
        seed: of weights, batches and perturbations.
        model: sizes of the LLaMA.
    """

    steps: int = 150
    every: int = 25
    sequences: int = 4
    shortest: int = 16
    longest: int = 64
    learning_rate: float = 1e-3
    warmup: int = 20
    max_norm: float = 1.0
    perturbed: int = 3
    seed: int = 1
    model: dict[str, Any] = msgspec.field(default_factory=lambda: dict(MODEL))

    @property
    def config(self) -> LlamaConfig:
        """Return the architecture."""
        return LlamaConfig(**self.model)

    @property
    def checkpoints(self) -> range:
        """Return the steps before which gradients are compared; the last is after the training."""
        return range(0, self.steps + 1, self.every)

    def batch(self, step: int) -> list[list[int]]:
        """Return pieces of the standard library's source, of unequal lengths, as bytes."""
        chance = random.Random(f"{self.seed} {step}")
        lengths = [chance.randint(self.shortest, self.longest) for _ in range(self.sequences)]
        text = source_bytes(CORPUS_BYTES)
        starts = [chance.randrange(len(text) - length) for length in lengths]
        return [list(text[a : a + n]) for a, n in zip(starts, lengths, strict=True)]


FAULTS = {
    "gradients of norms are not reduced": (
        *(gradients, "reduce_gradients", "    gradients = [_own_gradient"),
        "    wanted = [pair for pair in wanted if pair[0].dim() > 1]\n"
        "    gradients = [_own_gradient",
    ),
    "a mean of the ranks' means": (
        *(loss, "next_token_loss", "int(all_reduce(valid.sum(), comm=data))"),
        "max(int(valid.sum()), 1) * data.size",
    ),
    "labels shifted inside each shard": (
        *(loss, "next_token_labels", "    return labels\n"),
        "    return torch.cat((tokens[:, 1:], torch.full_like(tokens[:, :1], IGNORED)), 1)\n",
    ),
}
"""A module, a function, a text in it, and what stands there instead."""


@contextmanager
def planted(name: str) -> Iterator[None]:
    """Train with a fault inside the block.

    Raises:
        LookupError: the library no longer reads as the fault expects.
    """
    module, function, text, wrong = FAULTS[name]
    right = getattr(module, function)
    source = inspect.getsource(right)
    callers = [each for each in (train, model) if vars(each).get(function) is right]
    if source.count(text) != 1 or not callers:
        what = f"{function} has no {text!r}, or is not what a step calls"
        raise LookupError(f"{what}; plant the fault elsewhere.")
    names = dict(vars(module))
    exec(compile(source.replace(text, wrong), f"<{name}>", "exec"), names)
    for caller in callers:
        setattr(caller, function, names[function])
    try:
        yield
    finally:
        for caller in callers:
            setattr(caller, function, right)
