"""Define what a transport offers: it moves flat, contiguous tensors between ranks.

A transfer is a collective or a set of point-to-point messages that a rank has begun. A `Handle`
says when it is complete. `wait` waits for a handle.
"""

import os
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, runtime_checkable

import torch
from torch import Tensor

from sp_core.errors import RankError, ShapeError
from sp_core.programs import Operation

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm as Intracomm
else:  # annotations need no MPI
    Intracomm = Any

Messages = Sequence[tuple[int, Tensor]]
"""Point-to-point messages: for each (rank of the peer, flat contiguous tensor to send or fill)."""


def ensure_flat(messages: Messages) -> None:
    """Raise `ShapeError` if a tensor of a message is not flat and contiguous."""
    for _, x in messages:
        if x.dim() != 1 or not x.is_contiguous():
            raise ShapeError(
                f"a message of shape {tuple(x.shape)} and strides {x.stride()} was given; it must "
                "be flat and contiguous. Pass x.contiguous().view(-1)."
            )


Bound = Sequence[tuple[int, Any]]
"""Messages as (rank of the peer, buffer in the form that one transport sends).

`Transport.bind` makes them, and `Transport.post` sends them any number of times."""


class Handle(Protocol):
    """Test whether a transfer that this rank has begun is complete.

    The holder of a handle keeps the buffers of the transfer alive, and leaves them alone, until
    `test` has returned True.
    """

    def test(self) -> bool:
        """Make progress without waiting, and return whether the transfer is complete on this rank.

        After True the result may be read on the current stream.
        """
        ...


class Transport(Protocol):
    """Move the bytes of tensors between the ranks of one communicator.

    Buffers are flat contiguous tensors on the transport's device. `send` is None if this rank sends
    nothing in the operation, and `recv` is None if it receives nothing. A result may be read on the
    current stream when the prepared function has returned, or `test` of the handle has returned
    True.

    Attributes:
        name: the name of this kind of transport, such as "host".
    """

    name: str

    def prepare(
        self, operation: Operation, send: Tensor | None, recv: Tensor | None
    ) -> Callable[[], object]:
        """Return a function that runs a collective on these buffers each time it is called.

        `prepare` itself does not communicate. All ranks call the returned function in the same
        order as their other collectives. The function returns when this rank's part is complete.

        Args:
            operation: this rank's view of the collective.
            send: the input of this rank, read in each call.
            recv: receives the result in each call.
        """
        ...

    def start(self, operation: Operation, send: Tensor | None, recv: Tensor | None) -> Handle:
        """Begin a collective on these buffers and return its handle.

        All ranks start it in the same order as their other collectives. Most transports return
        without waiting for other ranks. A transport that lacks a non-blocking MPI call completes
        the collective first (see `HostTransport.start` and `DeviceTransport`).
        """
        ...

    def start_early(self, operation: Operation, send: Tensor | None, recv: Tensor | None) -> Handle:
        """Begin as `start`, though other ranks may first wait for messages of this rank."""
        return self.start(operation, send, recv)

    def exchange(self, sends: Messages, recvs: Messages) -> Handle:
        """Begin point-to-point messages and return one handle for all of them.

        The call does not wait for other ranks. All ranks call it at the same point of their
        programs, with empty lists if they have no messages. Messages between two ranks are matched
        in the order of the lists.
        """
        ...

    def in_order(self, call: Callable[[], object]) -> Handle:
        """Call a function, which may call MPI, after the MPI calls of all collectives begun before.

        All ranks do this at the same point of their programs. A transport that has not yet called
        MPI for some of these collectives calls the function later. The returned handle is complete
        once the function has been called.
        """
        return at_once(call)

    def announce(self, sends: Messages, recvs: Messages) -> Handle:
        """Tell the communicator's observer which messages this rank will `post`. Nothing is sent.

        Observers of tests compare these calls between ranks; `Notices` ignores them. All ranks call
        this at the same point of their programs, before they post the messages. The handle is
        complete once the observer has been told.

        Args:
            sends, recvs: the messages, for each peer in the order in which they will be posted.
                Only the sizes of the tensors count.
        """
        ...

    def bind(self, messages: Messages) -> Bound:
        """Convert messages to the form that `post` takes, once for many posts."""
        return messages

    def post(self, sends: Bound, recvs: Bound, tag: int) -> Handle:
        """Begin messages that were passed to `announce` before; return one handle for all of them.

        The call does not wait. Ranks may call it at different times and in different orders. A
        message is received by the peer's `post` with the same tag. Messages of one tag from one
        rank to another arrive in the order of the calls.

        Args:
            sends, recvs: what `bind` returned.
            tag: the tag of all these messages.
        """
        ...

    def close(self, *, together: bool) -> None:
        """Release the resources of the transport. The transport cannot be used afterwards.

        Args:
            together: True if all ranks call this at the same point and no transfer is unfinished;
                False if this rank leaves alone, after an error.
        """
        return


@runtime_checkable
class HostWrapper(Protocol):
    """Build a transport on top of the one for host tensors, such as one that models slow links.

    Pass an instance as `transport` to `Mesh`. Its `repr` must be the same on all ranks; `Mesh`
    checks this.
    """

    def over(self, host: Transport) -> Transport:
        """Return a transport that sends its messages through `host`, which sends host tensors."""
        ...


class Done:
    """Represent a transfer that was already complete when it began; a `Handle`."""

    def test(self) -> bool:
        """Return True."""
        return True


class Broken:
    """Represent a transfer whose result is lost, because an error has interrupted it; a `Handle`.

    A signal handler may raise an error in the middle of a sum. To make the sum again, or to leave
    it out, would give wrong results.
    """

    def test(self) -> NoReturn:
        """Raise `RankError`."""
        raise RankError(
            "an error has interrupted a sum or copy of a collective on this rank, whose result is "
            "lost. Let the error leave the block of the mesh, and make a new mesh on every rank."
        )


class Transfer:
    """Represent a transfer that is complete once each of some tests has returned True; a `Handle`.

    Args:
        tests: functions without arguments, each called until it has returned True once.
        keep: objects kept alive until all tests have returned True, such as buffers that MPI uses.
        after: called once, when all tests have returned True.
    """

    def __init__(
        self,
        tests: Sequence[Callable[[], object]],
        keep: object = None,
        after: Callable[[], object] | None = None,
    ) -> None:
        self._tests, self._keep, self._after = tests, keep, after

    def test(self) -> bool:
        """Call the tests that are still False. Return whether all have been True."""
        self._tests = [test for test in self._tests if not test()]
        if self._tests:
            return False
        after, self._after = self._after, None
        try:
            if after is not None:
                after()
        except BaseException:
            self._tests = [Broken().test]
            raise
        self._keep = None
        return True


class Ordered:
    """Order the streams of a device with a transfer that copies or sums in `test`; a `Handle`.

    The work of the transfer runs on the stream on which this object is made. Every stream on which
    `test` returns True waits for it, even if an earlier `test` on another stream completed it.

    Args:
        transfer: the handle of the transfer.
        device: where the tensors live; not a CPU.
    """

    def __init__(self, transfer: Handle, device: torch.device) -> None:
        self._transfer, self._stream = transfer, torch.accelerator.current_stream(device)
        self._end: torch.Event | None = None

    def test(self) -> bool:
        """Test the transfer on its stream. Once it is complete, let the current stream wait."""
        if self._end is None:
            with on_stream(self._stream):
                if not self._transfer.test():
                    return False
                self._end = self._stream.record_event()
        torch.accelerator.current_stream(self._stream.device).wait_event(self._end)
        return True


def ordered(transfer: Handle, device: torch.device) -> Handle:
    """Return the handle of a transfer as an `Ordered`, or as it is if its tensors are on a CPU."""
    return transfer if device.type == "cpu" else Ordered(transfer, device)


def on_stream(stream: torch.Stream) -> torch.Stream:
    """Return a context manager in which device work is launched on `stream`.

    The result is a new `torch.Stream` object for the same stream. Until torch 2.11 one object
    cannot be entered twice, nor by two threads.

    Source: pytorch issue 176560.
    """
    return torch.Stream(
        stream_id=stream.stream_id,
        device_index=stream.device_index,
        device_type=stream.device_type,
    )


SPIN_SECONDS = 2e-5
"""How long `wait` spins: about the time of one small message inside a node.

The rank that is waited for may need this core. Four ranks on two cores, over a link with a latency
of a millisecond, take a third longer if they spin ten times as long."""
YIELD_SECONDS = 2e-4
"""How long `wait` yields the core between tests, counted from its beginning."""
PAUSE_SECONDS = 5e-5
"""How long `wait` sleeps between two tests once it no longer yields."""


def at_once(call: Callable[[], object]) -> Handle:
    """Call a function, and return a handle that is complete."""
    call()
    return Done()


def wait(
    handle: Handle,
    poll: Callable[[], None] = lambda: None,
    look: Callable[[], None] = lambda: None,
) -> None:
    """Wait until `handle.test()` returns True, and call `poll` before each further test.

    Up to 20 us the rank spins. Up to 200 us it yields the core between tests, and after that it
    sleeps 50 us between tests.

    Args:
        handle: the handle of the transfer to wait for.
        poll: lets other transfers of this rank make progress.
        look: called before each sleep; raises an error if the transfer may never be complete.
    """
    if handle.test():
        return
    start = time.perf_counter()
    poll()
    while not handle.test():
        poll()
        waited = time.perf_counter() - start
        if waited > YIELD_SECONDS:
            look()
            time.sleep(PAUSE_SECONDS)
        elif waited > SPIN_SECONDS:
            os.sched_yield()
