"""Collectives with random arguments on random data, and what each must give by its definition, for any number of ranks."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

import sp_core as sp
from sp_core.sharding import split_sizes

DTYPES = [
    "float64",
    "float32",
    "float16",
    "bfloat16",
    "int64",
    "int32",
    "int16",
    "int8",
    "uint8",
    "bool",
]
VIEWS = ["plain", "transposed", "every second", "expanded"]


@dataclass(frozen=True)
class Case:
    """A collective on random small integers, which every dtype adds exactly; shards along `dim` have random lengths."""

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
        random = Random(self.seed)
        return tuple(random.randrange(5) for _ in range(size))

    def inputs(self, size: int) -> list[Tensor]:
        """Every rank's input."""
        free = self.op in ("all_gather", "all_to_all", "shift", "gather_replicated")
        total = sum(self.lengths(size))
        return [
            self._tensor(rank, length if free else total)
            for rank, length in enumerate(self.lengths(size))
        ]

    def _tensor(self, rank: int, length: int) -> Tensor:
        shape = [3, 4, 2]
        shape[self.dim] = length
        random = torch.Generator().manual_seed(self.seed * 31 + rank)
        x = torch.randint(0, 5, shape, generator=random).to(getattr(torch, self.dtype))
        if self.view == "transposed":
            return x.transpose(0, 2).contiguous().transpose(0, 2)
        if self.view == "every second":
            return torch.repeat_interleave(x, 2, 1)[:, ::2]
        if self.view == "expanded" and shape[2]:
            return x[..., :1].expand(x.shape)
        return x

    def root(self, size: int) -> int:
        return self.offset % size

    def arguments(self, size: int) -> dict[str, Any]:
        chosen = {} if self.algorithm == "auto" else {"algorithm": self.algorithm}
        return self._own_arguments(size) | chosen

    def _own_arguments(self, size: int) -> dict[str, Any]:
        sizes = self.lengths(size) if self.given_sizes else None
        match self.op:
            case "all_gather" | "gather_replicated":
                return {"dim": self.dim, "sizes": sizes}
            case "reduce_scatter":
                return {"dim": self.dim - 3, "sizes": sizes}
            case "all_to_all":
                return {"split_dim": self.other_dim, "concat_dim": self.dim, "concat_sizes": sizes}
            case "shift":
                return {"dim": self.dim, "offset": self.offset, "sizes": sizes}
            case "broadcast" | "reduce":
                return {"root": self.root(size)}
            case _:
                return {}

    def expected(self, inputs: list[Tensor], rank: int, size: int) -> Tensor:
        match self.op:
            case "all_gather" | "gather_replicated":
                return torch.cat(inputs, self.dim)
            case "reduce_scatter":
                sizes = (
                    self.lengths(size)
                    if self.given_sizes
                    else split_sizes(sum(self.lengths(size)), size)
                )
                return part_of(sum_of(inputs), sizes, self.dim, rank)
            case "all_reduce" | "reduce_from_group":
                return sum_of(inputs)
            case "all_to_all":
                parts = split_sizes(inputs[0].shape[self.other_dim], size)
                return torch.cat(
                    [part_of(x, parts, self.other_dim, rank) for x in inputs], self.dim
                )
            case "shift":
                return inputs[(rank - self.offset) % size]
            case "broadcast":
                return inputs[self.root(size)]
            case "reduce":
                return sum_of(inputs) if rank == self.root(size) else torch.zeros_like(inputs[0])
            case _:
                return inputs[rank]

    def call(self, x: Tensor, comm: sp.Communicator) -> Tensor:
        start = getattr(sp, f"{self.op}_start", None)
        if self.non_blocking and start is not None:
            pending = start(x, comm=comm, **self.arguments(comm.size))
            comm.poll()
            result: Tensor = pending.wait()
        else:
            result = getattr(sp, self.op)(x, comm=comm, **self.arguments(comm.size))
        return result


OPS = [
    *["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "shift", "broadcast", "reduce"],
    *["copy_to_group", "reduce_from_group", "gather_replicated"],
]
SUMS = ("reduce_scatter", "all_reduce", "reduce", "copy_to_group", "reduce_from_group")


@st.composite
def cases(
    draw: st.DrawFn, dtypes: list[str] = DTYPES, ops: list[str] = OPS, algorithm: str = "auto"
) -> Case:
    op = draw(st.sampled_from(ops))
    dims = draw(st.permutations([0, 1, 2]))
    dtype = draw(st.sampled_from([name for name in dtypes if name != "bool" or op not in SUMS]))
    return Case(
        op,
        dims[0],
        dims[1],
        dtype,
        draw(st.sampled_from(VIEWS)),
        draw(st.integers(-5, 5)),
        draw(st.booleans()),
        draw(st.booleans()),
        draw(st.integers(0, 999)),
        algorithm,
    )


def sum_of(tensors: list[Tensor]) -> Tensor:
    return torch.stack([x.double() for x in tensors]).sum(0).to(tensors[0].dtype)


def part_of(x: Tensor, sizes: tuple[int, ...], dim: int, rank: int) -> Tensor:
    """Part `rank` of a tensor that is cut along `dim`."""
    return x.narrow(dim, sum(sizes[:rank]), sizes[rank])
