"""`CheckedGroup`: a group of torch.distributed whose ranks check that all make the same calls.

The check precedes each call; it is in `lockstep`.
"""

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self

import torch.distributed as dist
from torch import Tensor

from sp_core.testing.carriers import MpiCarrier
from sp_core.testing.lockstep import Beginning, Call, Lockstep, Message
from sp_core.testing.outcome import capture, raise_for_peers
from sp_core.transport.groups import communicator_of

# torch 2.13 warns of the older names
_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


class CheckedGroup:
    """A process group whose ranks check, before each call, that all make the same call.

    It offers some calls of torch.distributed by their names and arguments, without `group` and
    `async_op`. It is a context manager: a rank that leaves the block, also by an error, tells the
    other ranks.

    Args:
        group: a process group of torch.distributed; default: the whole world.
        name: the group's name in error messages.

    Communication:
        Every rank of the group constructs it. Before each call one all-gather of 1 KB per rank,
        over gloo connections made for this.

    Raises:
        ValueError: torch.distributed is not initialized; from calls: tensors do not fit each other.
        CollectiveMismatch: from calls, on every rank: the ranks' calls differ.
        PeerFailed: from calls and the end of the block: another rank has failed.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, name: str = "group") -> None:
        comm = communicator_of(group)
        if comm is None:
            raise ValueError(
                "there is no process group yet. Call torch.distributed.init_process_group first."
            )
        self._group: Any = dist.group.WORLD if group is None else group
        self._comm, self.rank, self.size = comm, comm.rank, comm.size
        self.lockstep = Lockstep(MpiCarrier(comm), name)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        finish = self.lockstep.finish(capture(error))
        outcomes = self.lockstep.carrier.drive(finish, "has ended", ending=True)
        self._comm.Free()
        raise_for_peers(error, outcomes)

    def progress(self) -> None:
        """Do nothing: torch itself makes progress on operations that were started."""

    def all_reduce(self, tensor: Tensor, op: Any = dist.ReduceOp.SUM) -> None:
        """Call torch's `all_reduce`, which changes `tensor`. Every rank calls this."""
        self._agree(
            lambda: dist.all_reduce(tensor, op, self._group),
            "all_reduce",
            _size(tensor),
            f"op={getattr(op, 'name', op)}",
        )

    def all_gather_into_tensor(self, output_tensor: Tensor, input_tensor: Tensor) -> None:
        """Call torch's `all_gather_into_tensor`. Every rank calls this."""
        _require(
            output_tensor.numel() == input_tensor.numel() * self.size,
            "all_gather_into_tensor",
            output_tensor,
            input_tensor,
        )
        self._agree(
            lambda: _gather(output_tensor, input_tensor, self._group),
            "all_gather_into_tensor",
            _size(input_tensor),
        )

    def reduce_scatter_tensor(
        self, output: Tensor, input: Tensor, op: Any = dist.ReduceOp.SUM
    ) -> None:
        """Call torch's `reduce_scatter_tensor`. Every rank calls this."""
        _require(
            output.numel() * self.size == input.numel(), "reduce_scatter_tensor", output, input
        )
        self._agree(
            lambda: _reduce_scatter(output, input, op, self._group),
            "reduce_scatter_tensor",
            _size(input),
            f"op={getattr(op, 'name', op)}",
        )

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
    ) -> None:
        """Call torch's `all_to_all_single`. Every rank calls this.

        The ranks first check that each part has the size that its receiver expects.
        """
        _require(True, "all_to_all_single", output, input)
        went, sent = self._split(input, input_split_sizes)
        came, received = self._split(output, output_split_sizes)
        self._agree(
            lambda: dist.all_to_all_single(output, input, came, went, self._group),
            "all_to_all_single",
            str(input.dtype),
            text=f"{sent} bytes to the ranks, {received} from them, {input.dtype}",
            sends=[Message(self.rank, peer, 0, nbytes) for peer, nbytes in enumerate(sent)],
            receives=[Message(peer, self.rank, 0, nbytes) for peer, nbytes in enumerate(received)],
        )

    def broadcast(self, tensor: Tensor, src: int) -> None:
        """Call torch's `broadcast` from `src`, a rank of the whole world. Every rank calls this."""
        self._agree(
            lambda: dist.broadcast(tensor, src, self._group),
            "broadcast",
            _size(tensor),
            f"src={src}",
        )

    def send(self, tensor: Tensor, dst: int) -> None:
        """Call torch's `send`; `dst` is a rank of the whole world.

        At the same time rank `dst` must call `recv`, and all other ranks `stand_by`.
        """
        to, kind = dist.get_group_rank(self._group, dst), str(tensor.dtype)
        message = Message(self.rank, to, 0, tensor.nbytes, kind)
        self._agree(
            lambda: dist.send(tensor, dst, self._group),
            "send or recv",
            text=f"to {dst}, {_size(tensor)}",
            sends=[message],
        )

    def recv(self, tensor: Tensor, src: int) -> None:
        """Call torch's `recv` from `src`, a rank of the whole world.

        At the same time rank `src` must call `send`, and all other ranks `stand_by`.
        """
        source, kind = dist.get_group_rank(self._group, src), str(tensor.dtype)
        message = Message(source, self.rank, 0, tensor.nbytes, kind)
        self._agree(
            lambda: dist.recv(tensor, src, self._group),
            "send or recv",
            text=f"from {src}, {_size(tensor)}",
            receives=[message],
        )

    def stand_by(self) -> None:
        """Take part in the check of a message between other ranks, which call `send` and `recv`.

        Every rank that neither sends nor receives the message must call this.
        """
        self._agree(lambda: None, "send or recv", text="neither")

    def barrier(self) -> None:
        """Call torch's `barrier`. Every rank calls this."""
        self._agree(lambda: dist.barrier(self._group), "barrier")

    def _agree(
        self,
        then: Callable[[], Any],
        op: str,
        *equal: str,
        text: str = "",
        sends: Sequence[Message] = (),
        receives: Sequence[Message] = (),
    ) -> None:
        """Wait for all ranks, check that they agree on a call, then call `then`.

        `op` and `equal` must be equal on all ranks. Messages sent must be those received. `text`
        shows the arguments in errors; default: `equal`.
        """
        call = Call(op, equal, sends, receives, text or ", ".join(equal))
        Beginning(self, call, then).settle()

    def _split(self, tensor: Tensor, sizes: Sequence[int] | None) -> tuple[list[int], list[int]]:
        """Return how many rows and how many bytes of a tensor go to each rank, or come from it.

        `sizes`: number of rows for each rank; None splits the rows evenly.
        """
        _size(tensor)  # raises if it is not contiguous
        if not tensor.ndim:
            raise ValueError("all_to_all_single: a tensor without dims has no rows. Reshape it.")
        rows = len(tensor)
        if sizes is None and rows % self.size:
            raise ValueError(
                f"all_to_all_single: {rows} rows cannot be split evenly over {self.size} ranks. "
                "Give split sizes."
            )
        given = [rows // self.size] * self.size if sizes is None else list(sizes)
        if len(given) != self.size or sum(given) != rows:
            raise ValueError(
                f"all_to_all_single: split sizes {given} are not {self.size} sizes that add up to "
                f"{rows} rows."
            )
        row = tensor.nbytes // rows if rows else 0
        return given, [count * row for count in given]


def _size(tensor: Tensor) -> str:
    """Return a tensor's size, dtype and device as text. Raise ValueError if not contiguous."""
    if not tensor.is_contiguous():
        raise ValueError(
            f"a tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()} is not "
            "contiguous. Pass a copy."
        )
    return f"{tensor.numel()} x {str(tensor.dtype).removeprefix('torch.')} on {tensor.device.type}"


def _require(condition: bool, op: str, output: Tensor, given: Tensor) -> None:
    """Raise ValueError unless `condition` (the sizes fit) holds and the dtypes are equal."""
    if not condition or output.dtype != given.dtype:
        raise ValueError(
            f"{op}: the output has {_size(output)}, the input {_size(given)}; these sizes do not "
            "fit the group."
        )
