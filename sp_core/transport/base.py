"""What a transport is: it moves flat, contiguous vectors between ranks.

Only transports touch an MPI buffer or copy to a host.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from sp_core.schedules import Operation

Messages = Sequence[tuple[int, Tensor]]
"""Point-to-point messages: (rank of the other side, flat contiguous tensor)."""

Bound = Sequence[tuple[int, Any]]
"""Messages in a transport's own form, made once for memory that is sent or received into many
times."""


class Handle(Protocol):
    """A transfer under way.

    Whoever holds it keeps the buffers alive until `test` has answered True.
    """

    def test(self) -> bool:
        """Make progress. Return whether the transfer is complete.

        Then the result may be read on the current stream.
        """
        ...


class Transport(Protocol):
    """How the bytes of one tensor reach another rank.

    Buffers are flat contiguous tensors on the transport's device. `send` and `recv` may be None
    where the transfer says that this rank sends or receives nothing. Results are safe to read on
    the current stream when a prepared collective returns or `test` is True.
    """

    name: str

    def prepare(
        self, operation: Operation, send: Tensor | None, recv: Tensor | None
    ) -> Callable[[], object]:
        """Prepare a collective on fixed memory.

        Each call of the returned function runs it; all ranks call it.
        """
        ...

    def start(self, operation: Operation, send: Tensor | None, recv: Tensor | None) -> Handle:
        """Begin a collective and return without waiting for the other ranks."""
        ...

    def exchange(self, sends: Messages, recvs: Messages) -> Handle:
        """Begin point-to-point messages.

        All ranks call this, with empty lists where they have none.
        """
        ...

    def announce(self, sends: Messages, recvs: Messages) -> None:
        """Say which messages this rank will post, in this order for each peer.

        All ranks call this, before any of them posts.
        """
        ...

    def bind(self, messages: Messages) -> Bound:
        """Bring messages into the form that `post` takes."""
        return messages

    def post(self, sends: Bound, recvs: Bound, tag: int) -> Handle:
        """Begin messages that `announce` has named. Ranks may call this at different times.

        A message sent with a tag is received by the peer's `post` with the same tag.
        """
        ...

    def close(self, *, together: bool) -> None:
        """Give back what it holds; `together` where all ranks do so, with nothing under way."""
        return


@runtime_checkable
class HostWrapper(Protocol):
    """Make a transport out of the one of host tensors, such as a model of slow links.

    A mesh takes it as `transport`.

    Its `repr` is the same on all ranks, which agree on it.
    """

    def over(self, host: Any) -> Transport:
        """Return a transport whose messages are carried by `host`, a `HostTransport`."""
        ...


class Done:
    """The handle of a transfer that was complete when it was started."""

    def test(self) -> bool:
        """Return True."""
        return True


class Transfer:
    """The handle of something that is complete once each of some tests has answered True.

    Args:
        tests: are asked until they answer True.
        keep: objects that must live until then, such as buffers of which MPI has the address.
        after: called once, when all is complete.
    """

    def __init__(
        self,
        tests: Sequence[Callable[[], object]],
        keep: object = None,
        after: Callable[[], object] | None = None,
    ) -> None:
        self._tests, self._keep, self._after = tests, keep, after

    def test(self) -> bool:
        """Return whether all tests have answered True."""
        self._tests = [test for test in self._tests if not test()]
        if self._tests:
            return False
        after, self._after, self._keep = self._after, None, None
        if after is not None:
            after()
        return True


def on_stream(stream: torch.Stream) -> torch.Stream:
    """Return a context in which work is launched on a stream.

    Until torch 2.11 a stream cannot be entered twice, nor by two threads, so this is another one.

    Source: pytorch issue 176560.
    """
    return torch.Stream(
        stream_id=stream.stream_id,
        device_index=stream.device_index,
        device_type=stream.device_type,
    )


SPIN_SECONDS = 2e-5
"""About the time of one small message inside a node.

A longer wait must not keep a core from the rank waited for: four ranks on two
cores take a third longer over a link of a millisecond where they spin ten times as long."""
YIELD_SECONDS = 2e-4
PAUSE_SECONDS = 5e-5


def wait(handle: Handle, poll: Callable[[], None] = lambda: None) -> None:
    """Wait for a handle: spin, then yield, then sleep, with a call of `poll` in between."""
    if handle.test():
        return
    start = time.perf_counter()
    poll()
    while not handle.test():
        poll()
        waited = time.perf_counter() - start
        if waited > YIELD_SECONDS:
            time.sleep(PAUSE_SECONDS)
        elif waited > SPIN_SECONDS:
            os.sched_yield()
