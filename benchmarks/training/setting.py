"""The meshes and sizes of the training runs."""

from __future__ import annotations

import inspect
import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import msgspec

from benchmarks.corpus import source_bytes
from benchmarks.launching import UsageError
from sp_core.llama import LlamaConfig, train
from sp_core.llama.train import Layout
from sp_core.nn import gradients, loss
from sp_core.sharding import Sharding

CORPUS_BYTES = 1 << 20
DTYPES = ("float64", "float32")
LAYOUTS: dict[str, Layout] = {
    "contiguous": Sharding.contiguous,
    "zigzag": Sharding.zigzag,
    "striped": Sharding.striped,
}


class Place(msgspec.Struct, frozen=True):
    """A mesh, the attention scheme over the ranks that share a sequence, which of them owns which tokens, and whether by TP-SP."""

    axes: dict[str, Any]
    scheme: str | None = None
    layout: str = "zigzag"
    tp_sp: bool = False

    @property
    def name(self) -> str:
        """For people and for files."""
        parts = [
            *(f"{axis}{size}" for axis, size in self.axes.items()),
            self.scheme,
            "sp" * self.tp_sp,
        ]
        return "_".join(part for part in parts if part)


def places(ranks: int) -> list[Place]:
    """Every scheme on every mesh of so many ranks: all of them along one axis, and two along each of two axes."""
    if ranks == 1:
        return [Place({"tp": 1})]
    kinds = {
        "dp": Place({"dp": ranks}),
        "ring": Place({"ring": ranks}),
        "allgather_kv": Place({"ring": ranks}, "allgather_kv", "contiguous"),
        "ulysses": Place({"ulysses": ranks}, None, "striped"),
        "tp": Place({"tp": ranks}),
        "tp_sp": Place({"tp": ranks}, tp_sp=True),
    }
    if ranks != 4:
        return list(kinds.values())
    pairs = [
        *(
            Place({"dp": 2, "ring": 2}, scheme, layout)
            for scheme, layout in ((None, "striped"), ("allgather_kv", "zigzag"))
        ),
        Place({"dp": 2, "ulysses": 2}),
        Place({"dp": 2, "tp": 2}),
        Place({"ring": 2, "ulysses": 2}),
        *(
            Place({"ring": 2, "tp": 2}, scheme, layout)
            for scheme, layout in ((None, "contiguous"), ("allgather_kv", "striped"))
        ),
        Place({"ulysses": 2, "tp": 2}, None, "contiguous", tp_sp=True),
    ]
    return [*kinds.values(), *pairs]


MODEL: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 144,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 24,
}
"""A million parameters; 3 and 4 tensor ranks share key/value heads, and 4 do not divide the heads."""


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

    def __post_init__(self) -> None:
        """Refuse what makes no run."""
        least = {"steps": 1, "every": 1, "sequences": 1, "shortest": 2, "perturbed": 1, "warmup": 1}
        for name, low in least.items():
            if getattr(self, name) < low:
                raise UsageError(f"{name}={getattr(self, name)} was given; pass at least {low}.")
        if self.longest < self.shortest:
            raise UsageError(
                f"longest={self.longest} is less than shortest={self.shortest}; pass at least as much."
            )

    @property
    def config(self) -> LlamaConfig:
        """The architecture."""
        return LlamaConfig(**self.model)

    @property
    def checkpoints(self) -> range:
        """The steps before which gradients are compared; the last one comes after the training."""
        return range(0, self.steps + 1, self.every)

    def batch(self, step: int) -> list[list[int]]:
        """Pieces of the standard library's source, of unequal lengths, as bytes."""
        chance = random.Random(f"{self.seed} {step}")
        lengths = [chance.randint(self.shortest, self.longest) for _ in range(self.sequences)]
        text = source_bytes(CORPUS_BYTES)
        starts = [chance.randrange(len(text) - length) for length in lengths]
        return [
            list(text[start : start + length])
            for start, length in zip(starts, lengths, strict=True)
        ]


def chosen(ranks: Iterable[int], only: str) -> dict[int, list[Place]]:
    """The meshes of these numbers of ranks whose names contain a text.

    Raises:
        UsageError: there is none.
    """
    found = {size: [place for place in places(size) if only in place.name] for size in ranks}
    found = {size: some for size, some in found.items() if some}
    if not found:
        raise UsageError(f"no mesh of the ranks asked for has a name with {only!r} in it.")
    return found


@dataclass(frozen=True)
class Fault:
    """A text in a function, and what stands there instead."""

    module: ModuleType
    function: str
    right: str
    wrong: str


FAULTS = {
    "gradients of norms are not reduced": Fault(
        gradients,
        "reduce_gradients",
        "    gradients = [parameter.grad",
        "    wanted = [pair for pair in wanted if pair[0].dim() > 1]\n    gradients = [parameter.grad",
    ),
    "a mean of the ranks' means": Fault(
        loss,
        "next_token_loss",
        "int(all_reduce(valid.sum(), comm=data))",
        "max(int(valid.sum()), 1) * data.size",
    ),
    "labels shifted inside each shard": Fault(
        loss,
        "next_token_labels",
        "return sharding.shard(labels, comm.rank, 1)",
        "return torch.cat((tokens[:, 1:], torch.full_like(tokens[:, :1], IGNORED)), 1)",
    ),
}


@contextmanager
def planted(name: str) -> Iterator[None]:
    """Train with a fault inside the block.

    Raises:
        LookupError: the library no longer reads as the fault expects.
    """
    fault = FAULTS[name]
    right = getattr(fault.module, fault.function)
    source = inspect.getsource(right)
    if source.count(fault.right) != 1 or getattr(train, fault.function) is not right:
        raise LookupError(
            f"{fault.function} has no {fault.right!r}, or is not what a step calls; plant the fault elsewhere."
        )
    names = dict(vars(fault.module))
    exec(compile(source.replace(fault.right, fault.wrong), f"<{name}>", "exec"), names)
    setattr(train, fault.function, names[fault.function])
    try:
        yield
    finally:
        setattr(train, fault.function, right)
