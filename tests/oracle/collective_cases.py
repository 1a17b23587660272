"""Draw collectives with random arguments, and define the result of each."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

import sp_core as sp
from sp_core.sharding import split_sizes

DTYPES = [
    *["float64", "float32", "float16", "bfloat16"],
    *["int64", "int32", "int16", "int8", "uint8", "bool"],
]
MEMORIES = ("contiguous", "transposed", "expanded", "sliced at an odd offset", "every second")
UNEVEN = ("all_gather", "all_to_all", "shift", "gather_replicated")
"""Collectives whose tensors may have a different length along one dim on every rank."""

NEEDED: dict[str, dict[str, int]] = {"all_to_all": {"split_dim": 0, "concat_dim": 1}}
"""Arguments without a default, by collective."""

Arguments = Mapping[str, Any]


def in_memory(x: Tensor, memory: str) -> Tensor:
    """Return x, or its first slice expanded, in the memory layout that `memory` names."""
    if memory == "transposed":
        return x.transpose(0, -1).contiguous().transpose(0, -1)
    if memory == "sliced at an odd offset":
        return torch.cat([x.new_ones(1), x.reshape(-1), x.new_ones(2)])[1:-2].view(x.shape)
    if memory == "every second":
        return torch.repeat_interleave(x, 2, -1)[..., ::2]
    if memory == "expanded" and x.shape[-1]:
        return x[..., :1].expand(x.shape)
    return x.contiguous()


def total(tensors: Sequence[Tensor]) -> Tensor:
    """Return the sum of tensors, which is exact because their numbers are small and whole."""
    wide = torch.stack([x if x.dtype == torch.float64 else x.double() for x in tensors]).sum(0)
    return wide.to(tensors[0].dtype)


def part_of(x: Tensor, sizes: Sequence[int], dim: int, rank: int) -> Tensor:
    """Return part `rank` of a tensor that is cut along `dim`."""
    return x.narrow(dim, sum(sizes[:rank]), sizes[rank])


def scattered(inputs: list[Tensor], a: Arguments) -> list[Tensor]:
    """Return each rank's part of the sum of all inputs."""
    sizes = a.get("sizes") or split_sizes(inputs[0].shape[a["dim"]], len(inputs))
    return [part_of(total(inputs), sizes, a["dim"], rank) for rank in range(len(inputs))]


def exchanged(inputs: list[Tensor], a: Arguments) -> list[Tensor]:
    """Return for each rank its parts of all tensors, joined."""
    split, ranks = a["split_dim"], range(len(inputs))
    sizes = a.get("split_sizes") or split_sizes(inputs[0].shape[split], len(inputs))
    parts = [[part_of(x, sizes, split, rank) for x in inputs] for rank in ranks]
    return [torch.cat(each, a["concat_dim"]) for each in parts]


def reduced(inputs: list[Tensor], a: Arguments) -> list[Tensor]:
    """Return the sum, maximum or minimum for each rank."""
    best: dict[str, Callable[[list[Tensor]], Tensor]] = {
        "sum": total,
        "max": lambda x: torch.stack(x).amax(0),
        "min": lambda x: torch.stack(x).amin(0),
    }
    return [best[a.get("op", "sum")](inputs)] * len(inputs)


DEFINITIONS: dict[str, Callable[[list[Tensor], Arguments], list[Tensor]]] = {
    "all_gather": lambda x, a: [torch.cat(x, a["dim"])] * len(x),
    "reduce_scatter": scattered,
    "all_reduce": reduced,
    "all_to_all": exchanged,
    "shift": lambda x, a: [x[(rank - a["offset"]) % len(x)] for rank in range(len(x))],
    "broadcast": lambda x, a: [x[a["root"]]] * len(x),
    "reduce": lambda x, a: [
        total(x) if rank == a["root"] else torch.zeros_like(x[0]) for rank in range(len(x))
    ],
    "reduce_from_group": reduced,
    "gather_replicated": lambda x, a: [torch.cat(x, a["dim"])] * len(x),
    "copy_to_group": lambda x, a: list(x),
}
"""By collective, a function that returns the result of every rank for the tensors of all."""

OPS = list(DEFINITIONS)
SUMS = ("reduce_scatter", "all_reduce", "reduce", "copy_to_group", "reduce_from_group")


@dataclass(frozen=True)
class Case:
    """Describe a call of a collective on small integers, which every dtype adds exactly."""

    op: str
    dim: int
    other_dim: int
    dtype: str
    view: str
    offset: int
    given_sizes: bool
    non_blocking: bool
    seed: int
    algorithm: str = "auto"

    def lengths(self, size: int) -> tuple[int, ...]:
        """Return the length of each rank's shard along `dim`."""
        random = Random(self.seed)
        return tuple(random.randrange(5) for _ in range(size))

    def inputs(self, size: int) -> list[Tensor]:
        """Return every rank's input."""
        lengths = self.lengths(size)
        own = lengths if self.op in UNEVEN else [sum(lengths)] * size
        return [self._tensor(rank, length) for rank, length in enumerate(own)]

    def _tensor(self, rank: int, length: int) -> Tensor:
        shape = [3, 4, 2]
        shape[self.dim] = length
        random = torch.Generator().manual_seed(self.seed * 31 + rank)
        x = torch.randint(0, 5, shape, generator=random).to(getattr(torch, self.dtype))
        return in_memory(x, self.view)

    def root(self, size: int) -> int:
        """Return the root of a broadcast or a reduction."""
        return self.offset % size

    def arguments(self, size: int) -> dict[str, Any]:
        """Return the arguments of the call, without the tensor and the communicator."""
        sizes = self.lengths(size) if self.given_sizes else None
        along, root = {"dim": self.dim, "sizes": sizes}, {"root": self.root(size)}
        split, concat = self.other_dim - 3, self.dim - 3 * (self.seed % 2)
        exchange = {"split_dim": split, "concat_dim": concat, "concat_sizes": sizes}
        own: dict[str, dict[str, Any]] = {
            "all_gather": along,
            "gather_replicated": along,
            "reduce_scatter": {"dim": self.dim - 3, "sizes": sizes},
            "all_to_all": exchange,
            "shift": {**along, "offset": self.offset},
            "broadcast": root,
            "reduce": root,
        }
        chosen = {} if self.algorithm == "auto" else {"algorithm": self.algorithm}
        return own.get(self.op, {}) | chosen

    def expected(self, inputs: list[Tensor], rank: int, size: int) -> Tensor:
        """Return the result that a rank must get."""
        return DEFINITIONS[self.op](inputs, self.arguments(size))[rank]

    def call(self, x: Tensor, comm: sp.Communicator) -> Tensor:
        """Call the collective, or its `_start` function if drawn, and return the result."""
        start = getattr(sp, f"{self.op}_start", None) if self.non_blocking else None
        result: Any = (start or getattr(sp, self.op))(x, comm=comm, **self.arguments(comm.size))
        comm.poll()
        return result.wait() if isinstance(result, sp.Pending) else result


def cases(
    dtypes: list[str] = DTYPES, ops: list[str] = OPS, algorithm: str = "auto"
) -> st.SearchStrategy[Case]:
    """Draw any collective among `ops` with any arguments; those that sum take no bool."""
    drawn = st.builds(
        lambda op, dims, *rest: Case(op, dims[0], dims[1], *rest, algorithm),  # type: ignore[call-arg]
        st.sampled_from(ops),
        st.permutations([0, 1, 2]),
        st.sampled_from(dtypes),
        st.sampled_from(("plain", *MEMORIES[1:])),
        st.integers(-5, 5),
        st.booleans(),
        st.booleans(),
        st.integers(0, 999),
    )
    return drawn.filter(lambda case: case.dtype != "bool" or case.op not in SUMS)
