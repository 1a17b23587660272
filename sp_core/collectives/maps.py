"""Every collective as a linear map from the shards of all ranks to the results of all ranks, with its transpose.

    AllGather  <-> ReduceScatter        AllToAll <-> AllToAll with split and concat swapped      Broadcast <-> Reduce
    AllReduce  <-> AllReduce            Shift    <-> Shift the other way

A map knows all sizes, so running it needs no agreement. It brings a tensor into the flat form that a transport moves, and back.
Shapes: `*` stands for the other dimensions.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from sp_core.collectives import choice
from sp_core.collectives.flat import back, elements, flattened, packed, unmark
from sp_core.communicator import Communicator
from sp_core.transport import Handle
from sp_core.transport import transfer as tr
from sp_core.transport.transfer import Transfer


@dataclass(frozen=True)
class Result:
    """The result of a collective. Call it once the transfer is complete.

    Args:
        out: the tensor. Its memory is there from the beginning, its values are not.
        finish: brings what was received into `out`, where that is not the memory that receives.
    """

    out: Tensor
    finish: Callable[[], object] | None = None

    def __call__(self) -> Tensor:
        """Return the tensor with its values."""
        if self.finish is not None:
            self.finish()
        return self.out


@dataclass(frozen=True)
class Prepared:
    """A collective ready to run: what moves, the flat buffers, and the result.

    `refresh` brings the input into `send` again, where that is not the memory of the input itself.
    """

    transfer: Transfer
    send: Tensor | None
    recv: Tensor | None
    result: Result
    refresh: Callable[[], object] | None = None


@dataclass(frozen=True)
class Started:
    """A collective under way."""

    handle: Handle
    result: Result


@dataclass(frozen=True)
class Map(ABC):
    """A collective over `comm` with all its sizes known; `name` is what it is counted under.

    `algorithm` goes over to the map of the gradients, which uses it if it has one of that name.
    """

    name: ClassVar[str]
    comm: Communicator
    algorithm: str = field(default="auto", kw_only=True)

    @property
    @abstractmethod
    def transpose(self) -> Map:
        """The map of the gradients."""

    @abstractmethod
    def run(self, x: Tensor) -> Tensor:
        """Carry it out."""

    @abstractmethod
    def start(self, x: Tensor) -> Started:
        """Begin it. The buffers live as long as the handle."""


class FlatMap(Map):
    """A collective over flat buffers, which an algorithm or the MPI library carries out."""

    @abstractmethod
    def prepare(self, x: Tensor) -> Prepared:
        """Bring `x` into flat form."""

    def run(self, x: Tensor) -> Tensor:
        """Carry it out."""
        prepared = self.prepare(x)
        choice.run(self.comm, prepared.transfer, prepared.send, prepared.recv, self.algorithm)
        return prepared.result()

    def start(self, x: Tensor) -> Started:
        """Begin it. The buffers live as long as the handle."""
        prepared = self.prepare(x)
        handle = choice.start(self.comm, prepared.transfer, prepared.send, prepared.recv, self.algorithm)
        return Started(handle, prepared.result)


@dataclass(frozen=True)
class AllGather(FlatMap):
    """`(sizes[r], *)` on rank r to `(sum(sizes), *)` on every rank, along `dim`."""

    name = "all_gather"
    dim: int
    sizes: tuple[int, ...]

    @property
    def transpose(self) -> Map:
        return ReduceScatter(self.comm, self.dim, self.sizes, algorithm=self.algorithm)

    def prepare(self, x: Tensor) -> Prepared:
        rows = x.movedim(self.dim, 0)
        transfer = tr.all_gather(elements(self.sizes, rows), self.comm.rank)
        recv = x.new_empty((sum(self.sizes), *rows.shape[1:]))
        send, refresh = flattened(rows)
        return Prepared(transfer, send, recv.view(-1), Result(back(recv, self.dim)), refresh)


@dataclass(frozen=True)
class ReduceScatter(FlatMap):
    """`(sum(sizes), *)` on every rank to the sum of everybody's rows of rank r, `(sizes[r], *)`, along `dim`."""

    name = "reduce_scatter"
    dim: int
    sizes: tuple[int, ...]

    @property
    def transpose(self) -> Map:
        return AllGather(self.comm, self.dim, self.sizes, algorithm=self.algorithm)

    def prepare(self, x: Tensor) -> Prepared:
        rows = x.movedim(self.dim, 0)
        transfer = tr.reduce_scatter(elements(self.sizes, rows), self.comm.rank)
        recv = x.new_empty((self.sizes[self.comm.rank], *rows.shape[1:]))
        send, refresh = flattened(rows)
        return Prepared(transfer, send, recv.view(-1), Result(back(recv, self.dim)), refresh)


@dataclass(frozen=True)
class AllReduce(FlatMap):
    """The sum (or max, min) of everybody's tensor, on every rank."""

    name = "all_reduce"
    reduction: str = "sum"

    @property
    def transpose(self) -> Map:
        return self

    def prepare(self, x: Tensor) -> Prepared:
        library = choice.chosen(self.comm, self.name, self.algorithm) == "mpi"
        if library and self.reduction != "sum" and x.is_floating_point():
            return self._prepare_extremum(x)
        recv = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        send, refresh = flattened(x)
        return Prepared(tr.all_reduce(x.numel(), self.reduction), send, recv.view(-1), Result(recv), refresh)

    def _prepare_extremum(self, x: Tensor) -> Prepared:
        """NaN travels beside the numbers: MPI compares it as each library happens to, and loses other numbers over it."""
        send = self._marked(x)
        recv, out = torch.empty_like(send), torch.empty(x.shape, dtype=x.dtype, device=x.device)
        transfer = tr.all_reduce(send.numel(), self.reduction)
        result = Result(out, partial(unmark, recv, out))
        return Prepared(transfer, send.view(-1), recv.view(-1), result, lambda: send.copy_(self._marked(x)))

    def _marked(self, x: Tensor) -> Tensor:
        """The numbers, and where there are none."""
        least = -torch.inf if self.reduction == "max" else torch.inf
        marks = x.isnan().to(x.dtype) * (1 if self.reduction == "max" else -1)
        return torch.stack((x.detach().masked_fill(x.isnan(), least), marks))


@dataclass(frozen=True)
class AllToAll(FlatMap):
    """Rank r keeps part r of `split_dim` of everybody's tensor, put together along `concat_dim`.

    Rank r holds `concat_sizes[r]` of `concat_dim` and all of `split_dim` before, and `split_sizes[r]` of `split_dim` and all of
    `concat_dim` after. Each piece travels with `concat_dim` first, so that what arrives is the result without another copy.
    """

    name = "all_to_all"
    split_dim: int
    concat_dim: int
    split_sizes: tuple[int, ...]
    concat_sizes: tuple[int, ...]

    @property
    def transpose(self) -> Map:
        return AllToAll(self.comm, self.concat_dim, self.split_dim, self.concat_sizes, self.split_sizes, algorithm=self.algorithm)

    def prepare(self, x: Tensor) -> Prepared:
        rank = self.comm.rank
        rows = x.movedim((self.concat_dim, self.split_dim), (0, 1))  # (concat, split, *)
        rest = math.prod(rows.shape[2:])
        mine, kept = self.concat_sizes[rank], self.split_sizes[rank]
        transfer = tr.all_to_all(
            tuple(mine * part * rest for part in self.split_sizes),
            tuple(part * kept * rest for part in self.concat_sizes),
            max(self.split_sizes) * max(self.concat_sizes) * rest,
        )
        pieces = rows.detach().split(list(self.split_sizes), 1)
        send, refresh = flattened(rows) if mine == 1 else packed(pieces)  # of a single row the pieces lie one after the other
        recv = x.new_empty((sum(self.concat_sizes), kept, *rows.shape[2:]))
        return Prepared(transfer, send, recv.view(-1), Result(recv.movedim((0, 1), (self.concat_dim, self.split_dim))), refresh)


@dataclass(frozen=True)
class Broadcast(FlatMap):
    """The root's tensor on every rank. The others pass a tensor of the same shape, whose values are not read."""

    name = "broadcast"
    root: int

    @property
    def transpose(self) -> Map:
        return Reduce(self.comm, self.root, algorithm=self.algorithm)

    def prepare(self, x: Tensor) -> Prepared:
        transfer = tr.broadcast(x.numel(), self.comm.rank, self.root)
        if self.comm.rank == self.root:
            send, refresh = flattened(x)
            out = torch.empty_like(x)
            return Prepared(transfer, send, None, Result(out, partial(out.copy_, x)), refresh)
        recv = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        return Prepared(transfer, None, recv.view(-1), Result(recv))


@dataclass(frozen=True)
class Reduce(FlatMap):
    """The sum of everybody's tensor on the root; zeros on the others."""

    name = "reduce"
    root: int

    @property
    def transpose(self) -> Map:
        return Broadcast(self.comm, self.root, algorithm=self.algorithm)

    def prepare(self, x: Tensor) -> Prepared:
        transfer = tr.reduce(x.numel(), self.comm.rank, self.root)
        recv = torch.zeros(x.shape, dtype=x.dtype, device=x.device)
        send, refresh = flattened(x)
        return Prepared(transfer, send, recv.view(-1) if self.comm.rank == self.root else None, Result(recv), refresh)


@dataclass(frozen=True)
class Shift(FlatMap):
    """Rank r's tensor goes to rank `(r + offset) % size`. Rank r holds `sizes[r]` along `dim` before."""

    name = "shift"
    offset: int
    dim: int
    sizes: tuple[int, ...]

    @property
    def transpose(self) -> Map:
        moved = tuple(self.sizes[(rank - self.offset) % self.comm.size] for rank in range(self.comm.size))
        return replace(self, offset=-self.offset, sizes=moved)

    def prepare(self, x: Tensor) -> Prepared:
        rows = x.movedim(self.dim, 0)
        transfer = tr.shift(elements(self.sizes, rows), self.comm.rank, self.offset)
        recv = x.new_empty((self.sizes[(self.comm.rank - self.offset) % self.comm.size], *rows.shape[1:]))
        send, refresh = flattened(rows)
        return Prepared(transfer, send, recv.view(-1), Result(back(recv, self.dim)), refresh)
