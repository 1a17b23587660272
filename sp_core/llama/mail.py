"""What neighbouring stages of a pipeline send each other: hidden states one way, their gradients the other.

All messages of a step are announced when it begins; each stage posts its own whenever it is ready, so no stage waits for one that
does not have what it needs. The next message to come is always posted for before the stage computes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sp_core.communicator import Communicator
from sp_core.transport import Handle

NAME = "pipeline"
Shape = tuple[int, ...]


class Mail:
    """The messages of one step of this stage.

    Args:
        stages: the stages; every one makes this at the same point, with the shapes of the same micro-batches.
        dtype: of all messages.
        forward: shapes of the hidden states, in the order in which they are sent.
        backward: shapes of the gradients, likewise.
    """

    def __init__(self, stages: Communicator, dtype: torch.dtype, forward: Sequence[Shape], backward: Sequence[Shape] = ()) -> None:
        stages.ensure_open()
        self._comm, self._tag = stages, stages.next_tag()
        self._sent: list[Handle] = []
        before, after = stages.rank - 1, stages.rank + 1
        ways = [(after, before, forward), (before, after, backward)]
        blank = torch.empty(1, dtype=dtype, device=stages.device)

        def listed(peer: int, shapes: Sequence[Shape]) -> list[tuple[int, Tensor]]:
            sizes = (torch.Size(shape).numel() for shape in shapes)
            return [(peer, blank.expand(size)) for size in sizes] if 0 <= peer < stages.size else []

        stages.transport.announce(
            [message for dest, _, shapes in ways for message in listed(dest, shapes)],
            [message for _, source, shapes in ways for message in listed(source, shapes)],
        )
        stages.counters[NAME].add()
        self._boxes = [self._Box(self, source, dtype, shapes) for _, source, shapes in ways]

    class _Box:
        """The messages that come from one side, the next one always under way."""

        def __init__(self, mail: Mail, source: int, dtype: torch.dtype, shapes: Sequence[Shape]) -> None:
            self._mail, self._source, self._dtype = mail, source, dtype
            self._left = list(shapes) if 0 <= source < mail._comm.size else []
            self._coming: tuple[Handle, Tensor] | None = None
            self._post()

        def take(self) -> Tensor:
            """Wait for the next message."""
            assert self._coming is not None
            (handle, x), self._coming = self._coming, None
            self._mail._comm.wait(handle, NAME)
            self._post()
            return x

        def _post(self) -> None:
            if self._left:
                comm = self._mail._comm
                x = torch.empty(self._left.pop(0), dtype=self._dtype, device=comm.device)
                bound = comm.transport.bind([(self._source, x.view(-1))])
                self._coming = comm.track(comm.transport.post([], bound, self._mail._tag)), x

    def receive(self, *, backward: bool = False) -> Tensor:
        """The next hidden state from the stage before this one, or gradient from the one after it."""
        return self._boxes[backward].take()

    def send(self, x: Tensor, *, backward: bool = False) -> None:
        """Send a hidden state to the stage after this one, or a gradient to the one before it; go on at once."""
        comm, flat = self._comm, x.detach().contiguous().view(-1)
        count = comm.counters[NAME]
        count.messages, count.bytes_sent = count.messages + 1, count.bytes_sent + flat.nbytes
        bound = comm.transport.bind([(comm.rank + (-1 if backward else 1), flat)])
        self._sent.append(comm.track(comm.transport.post(bound, [], self._tag)))

    def finish(self) -> None:
        """Wait until everything has left."""
        for handle in self._sent:
            self._comm.wait(handle, NAME)
        self._sent.clear()
