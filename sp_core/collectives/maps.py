"""Define each collective as a linear map from the tensors of all ranks to the results of all ranks.

    AllGather  <-> ReduceScatter     AllToAll <-> AllToAll with split and concat swapped
    Broadcast  <-> Reduce            Shift    <-> Shift the other way
    AllReduce  <-> AllReduce

The arrows show transposes, which are the maps of the gradients. A `Map` knows all sizes, so it runs
without an agreement of the ranks. The map copies a tensor into a flat buffer that a transport
moves, and back. `*` in a shape stands for the other dimensions.
"""

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from sp_core.collectives.execution import Ready, bind
from sp_core.communicator import Communicator
from sp_core.compiling import eager
from sp_core.programs import ALGORITHMS, Operation, operation, usable
from sp_core.scratch import used
from sp_core.transport import HostTransport, Work


def nothing() -> None:
    """Do nothing: stands for a copy that is not needed."""


@dataclass(frozen=True)
class Prepared:
    """Hold the buffers of a collective.

    Args:
        operation: this rank's view of the collective.
        send, recv: flat buffers of the input and of what is received; None: this rank has none.
        out: the result, without values until `result` is called.
        refresh: copies the input into `send` again; `nothing` if `send` is the input's memory.
        finish: fills `out`; `nothing` if `out` is the memory of `recv`.
    """

    operation: Operation
    send: Tensor | None
    recv: Tensor | None
    out: Tensor
    refresh: Work = nothing
    finish: Work = nothing

    def overwrite(self) -> None:
        """Tell torch that `out` changes, so that a backward that saved it raises an error."""
        torch.autograd.graph.increment_version(self.out)

    def result(self) -> Tensor:
        """Fill `out`, once the transfer is complete, and return it."""
        self.finish()
        self.overwrite()
        return used(self.out)


@dataclass(frozen=True)
class Map(ABC):
    """Hold a collective over `comm` with all its sizes. Subclasses add the sizes as fields.

    `name` names the collective in counters. `algorithm` is the name that the caller asked for; the
    transpose has the same. `planned` says that the collective is prepared once for many runs.
    """

    name: ClassVar[str]
    comm: Communicator
    algorithm: str = field(default="auto", kw_only=True)
    planned: bool = field(default=False, kw_only=True)

    @property
    def transpose(self) -> "Map":
        """Return the collective that the gradients go through in backward."""
        fields = {**vars(self), "planned": False}
        return _TRANSPOSED[self.name](**fields)

    @abstractmethod
    def prepare(self, x: Tensor) -> Prepared:
        """Return the buffers to run the collective on x. Copy x if it is not contiguous."""

    @eager
    def run(self, x: Tensor) -> Tensor:
        """Run the collective on x, and return the result."""
        prepared = self.prepare(x)
        self._bind(prepared).run(once=True)
        return prepared.result()

    @eager
    def start(self, x: Tensor) -> tuple[Tensor, Callable[[], Tensor]]:
        """Begin the collective on x without waiting.

        Return (the result, without values yet; a function that waits, and returns the result). The
        function holds the handle, which keeps the buffers alive until the end.
        """
        prepared = self.prepare(x)
        out, finish = prepared.out, prepared.finish
        handle = self._bind(prepared).start(once=True)

        def wait() -> Tensor:
            self.comm.wait(handle, self.name)
            with torch.inference_mode(out.is_inference()):
                finish()
            return used(out)

        return out, wait

    def _bind(self, prepared: Prepared) -> Ready:
        moves, buffers = prepared.operation, (prepared.send, prepared.recv)
        return bind(
            self.comm, moves, *buffers, self.choose_algorithm(moves.nbytes), self.comm.scratch
        )

    @property
    def requested_algorithm(self) -> str:
        """Return the algorithm that the call, or else the mesh, asks for; "auto" if neither does.

        A name that this collective does not have counts as "auto": it was meant for the collective
        whose transpose this is. "window" counts as "auto" if the communicator has no window.
        """
        for name in (self.algorithm, self.comm.algorithms[self.name]):
            there = name != "window" or self.comm.window is not None
            if name != "auto" and name in ALGORITHMS[self.name] and there:
                return name
        return "auto"

    def choose_algorithm(self, nbytes: int) -> str:
        """Return `requested_algorithm`, or in place of "auto" the quickest algorithm for this size.

        If the collective was not timed, or its tensors are on a device, the result for "auto" is
        "mpi"; or "window" if there is a window and MPI cannot read the tensors.

        Args:
            nbytes: bytes of the whole vector, the same on every rank.
        """
        comm, name = self.comm, self.requested_algorithm
        if name != "auto":
            return name
        if comm.tuning is None or comm.device.type != "cpu" or self.name not in comm.tuning.times:
            is_mpi = comm.window is None or isinstance(comm.transport, HostTransport)
            return "mpi" if is_mpi else "window"
        from sp_core.tuning import decide

        among = usable(comm.nodes, self.name, window=comm.window is not None)
        return decide(comm.tuning, self.name, comm.nodes, nbytes, among=among, planned=self.planned)

    def operation(self, x: Tensor, counts: tuple[int, ...], **more: Any) -> Operation:
        """Return this rank's `Operation`; the arguments are as in `programs.operation`."""
        return operation(
            self.name, self.comm.rank, self.comm.size, counts, itemsize=x.itemsize, **more
        )


@dataclass(frozen=True)
class _AlongDim(Map):
    """Hold a collective that joins or splits tensors along `dim`: `sizes[r]` for rank r."""

    dim: int
    sizes: tuple[int, ...]
    offset: int = field(default=0, kw_only=True)

    def prepare(self, x: Tensor) -> Prepared:
        rows = x.movedim(self.dim, 0)
        width = math.prod(rows.shape[1:])
        send, refresh = flattened(rows)
        moves = self.operation(x, tuple(size * width for size in self.sizes), root=self.offset)
        received = self.operation(x, self.sizes, root=self.offset).recv
        recv = x.new_empty((sum(received), *rows.shape[1:]))
        out = recv.movedim(0, self.dim).detach()  # no view, which autograd would protect
        return Prepared(moves, send, recv.view(-1), out, refresh)


@dataclass(frozen=True)
class AllGather(_AlongDim):
    """Turn shards, `(sizes[r], *)` on rank r, into `(sum(sizes), *)` on every rank.

    The first dimension in these shapes stands for `dim`, and `*` for the others.
    """

    name = "all_gather"


@dataclass(frozen=True)
class ReduceScatter(_AlongDim):
    """Map `(sum(sizes), *)` on every rank to rank r's rows of the sum, `(sizes[r], *)`."""

    name = "reduce_scatter"


@dataclass(frozen=True)
class Shift(_AlongDim):
    """Send rank r's tensor to rank `(r + offset) % size`.

    Rank r's tensor has length `sizes[r]` along `dim` before the shift.
    """

    name = "shift"

    @property
    def transpose(self) -> Map:
        size = self.comm.size
        moved = tuple(self.sizes[(rank - self.offset) % size] for rank in range(size))
        return replace(self, offset=-self.offset, sizes=moved)


@dataclass(frozen=True)
class AllReduce(Map):
    """Map the tensors of all ranks to their sum (or max, min) on every rank."""

    name = "all_reduce"
    op: str = "sum"

    @property
    def transpose(self) -> Map:
        return self

    def prepare(self, x: Tensor) -> Prepared:
        if self.op != "sum" and x.is_floating_point() and self.choose_algorithm(x.nbytes) == "mpi":
            return self._prepare_extremum(x)
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        send, refresh = flattened(x)
        return Prepared(
            self.operation(x, (x.numel(),), reduction=self.op), send, out.view(-1), out, refresh
        )

    def _prepare_extremum(self, x: Tensor) -> Prepared:
        """Return buffers with marks, not 0 for NaN: MPI libraries compare NaN in different ways."""
        x, (send, recv) = x.detach(), x.new_empty((2, 2, *x.shape))
        out, is_nan = x.new_empty(x.shape), x.new_empty(x.shape, dtype=torch.bool)
        moves = self.operation(x, (send.numel(),), reduction=self.op)

        def refresh() -> None:
            used(send)[0].copy_(x)
            torch.ne(x, x, out=send[1]).mul_(1 if self.op == "max" else -1)

        def finish() -> None:
            marked = torch.ne(recv[1], 0, out=used(is_nan))
            out.copy_(used(recv)[0]).masked_fill_(marked, torch.nan)

        refresh()
        return Prepared(moves, send.view(-1), recv.view(-1), out, refresh, finish)


@dataclass(frozen=True)
class InPlace(AllReduce):
    """Overwrite x with the sum of all ranks' tensors, by way of a new tensor where it must be."""

    def prepare(self, x: Tensor) -> Prepared:
        if x.is_contiguous() and not x.is_neg() and self.choose_algorithm(x.nbytes) != "mpi":
            flat = x.detach().view(-1)
            return Prepared(self.operation(x, (x.numel(),), reduction=self.op), flat, flat, x)
        prepared = super().prepare(x)
        return replace(prepared, out=x, finish=lambda: x.detach().copy_(prepared.result()))


@dataclass(frozen=True)
class AllToAll(Map):
    """Send part r of `split_dim` to rank r, and concatenate received parts along `concat_dim`.

    Before, rank r has `concat_sizes[r]` of `concat_dim` and all of `split_dim`; after,
    `split_sizes[r]` of `split_dim` and all of `concat_dim`. Pieces are sent with `concat_dim`
    first, so that the received data are the result without another copy.
    """

    name = "all_to_all"
    split_dim: int
    concat_dim: int
    split_sizes: tuple[int, ...]
    concat_sizes: tuple[int, ...]

    @property
    def transpose(self) -> Map:
        return AllToAll(
            self.comm,
            self.concat_dim,
            self.split_dim,
            self.concat_sizes,
            self.split_sizes,
            algorithm=self.algorithm,
        )

    def prepare(self, x: Tensor) -> Prepared:
        rank = self.comm.rank
        rows = x.movedim((self.concat_dim, self.split_dim), (0, 1))  # (concat, split, *)
        rest = math.prod(rows.shape[2:])
        mine, kept = self.concat_sizes[rank], self.split_sizes[rank]
        going = tuple(mine * part * rest for part in self.split_sizes)
        coming = tuple(part * kept * rest for part in self.concat_sizes)
        longest = max(self.split_sizes) * max(self.concat_sizes) * rest
        moves = Operation(
            "all_to_all", rank, self.comm.size, going, coming, longest, itemsize=x.itemsize
        )
        pieces = rows.detach().split(list(self.split_sizes), 1)
        # the pieces of a single row lie one after the other
        send, refresh = flattened(rows) if mine == 1 else packed(pieces)
        recv = x.new_empty((sum(self.concat_sizes), kept, *rows.shape[2:]))
        return Prepared(
            moves,
            send,
            recv.view(-1),
            recv.movedim((0, 1), (self.concat_dim, self.split_dim)).detach(),
            refresh,
        )


@dataclass(frozen=True)
class Broadcast(Map):
    """Map the root's tensor to every rank. Tensors of the other ranks are not read."""

    name = "broadcast"
    root: int

    def prepare(self, x: Tensor) -> Prepared:
        moves = self.operation(x, (x.numel(),), root=self.root)
        if self.comm.rank == self.root:
            (send, refresh), out = flattened(x), torch.empty_like(x)
            return Prepared(moves, send, None, out, refresh, lambda: out.copy_(used(x.detach())))
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        return Prepared(moves, None, out.view(-1), out)


@dataclass(frozen=True)
class Reduce(Map):
    """Map the tensors of all ranks to their sum on the root, and to zeros elsewhere."""

    name = "reduce"
    root: int

    def prepare(self, x: Tensor) -> Prepared:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        send, refresh = flattened(x)
        is_root = self.comm.rank == self.root
        recv, finish = (out.view(-1), nothing) if is_root else (None, out.zero_)
        moves = self.operation(x, (x.numel(),), root=self.root)
        return Prepared(moves, send, recv, out, refresh, finish)


_TRANSPOSED: dict[str, type[Map]] = {
    "all_gather": ReduceScatter,
    "reduce_scatter": AllGather,
    "broadcast": Reduce,
    "reduce": Broadcast,
}
"""Name of a collective -> class of its transpose, for transposes that have the same fields."""


def one_ahead(calls: Iterable[tuple[Map, Tensor]]) -> Iterator[Tensor]:
    """Yield the results of collectives in order. Begin the next collective before each result."""
    waits: deque[Callable[[], Tensor]] = deque()
    for mapping, x in calls:
        waits.append(mapping.start(x)[1])
        if len(waits) > 1:
            yield waits.popleft()()
    while waits:
        yield waits.popleft()()


def flattened(x: Tensor) -> tuple[Tensor, Work]:
    """Return (x as a flat vector, a call that copies x into it again).

    If x is contiguous, without negative bit, the vector is its memory; the call does nothing.
    """
    vector = x.detach().resolve_neg().contiguous().view(-1)
    shared = vector.data_ptr() == x.data_ptr()
    return vector, nothing if shared else lambda: used(vector).view(x.shape).copy_(x.detach())


def packed(parts: Sequence[Tensor]) -> tuple[Tensor, Work]:
    """Return (a new vector of all parts' elements, a call that copies the parts into it again)."""
    lengths = [part.numel() for part in parts]
    vector = parts[0].new_empty(sum(lengths))

    def refresh() -> None:
        for place, part in zip(used(vector).split(lengths), parts, strict=True):
            place.view(part.shape).copy_(part)

    refresh()
    return vector, refresh


def overlaps(x: Tensor) -> bool:
    """Return False if the strides of x show that no two of its elements share memory, else True."""
    reach = 0
    for stride, length in sorted(zip(x.stride(), x.shape, strict=True)) if x.numel() else ():
        if length > 1 and stride <= reach:
            return True
        reach += stride * (length - 1)
    return False
