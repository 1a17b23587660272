"""Count the calls, messages and bytes of this rank in each operation of a communicator."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass


@dataclass
class Count:
    """Count the calls of one operation on this rank, and the messages and bytes that it sends.

    Inside a collective of the MPI library `messages` stays 0, since the library decides about them.
    If ranks of a node read each other's memory, nothing is sent. Then `messages` counts the regions
    that this rank has read from other ranks, and `bytes_sent` their bytes.

    Attributes:
        calls: number of calls.
        messages: number of point-to-point messages sent.
        bytes_sent: bytes of the messages that this rank sent, forwarded ones too, or that it read
            in shared memory. If the MPI library runs the collective, the bytes of this rank's input
            that other ranks need (payload); do not compare a payload with bytes of messages.
        seconds: time that this rank has spent inside the calls and in waiting for them.
        scratch: the most bytes of scratch memory that one call has used, outside the MPI library.
    """

    calls: int = 0
    messages: int = 0
    bytes_sent: int = 0
    seconds: float = 0.0
    scratch: int = 0

    def add(self, *, messages: int = 0, bytes_sent: int = 0, scratch: int = 0) -> None:
        """Count one more call, with these messages, bytes and bytes of scratch memory."""
        self.calls += 1
        self.messages += messages
        self.bytes_sent += bytes_sent
        self.scratch = max(self.scratch, scratch)

    @contextmanager
    def timed(self) -> "Iterator[Count]":
        """Add the seconds that a `with` block takes. The block gets this object."""
        begun = time.perf_counter()
        try:
            yield self
        finally:
            self.seconds += time.perf_counter() - begun

    def __add__(self, other: "Count") -> "Count":
        return Count(
            self.calls + other.calls,
            self.messages + other.messages,
            self.bytes_sent + other.bytes_sent,
            self.seconds + other.seconds,
            max(self.scratch, other.scratch),
        )


class Counters(dict[str, Count]):
    """Map the names of operations, such as "all_reduce", to their `Count` on one communicator.

    The name "control" stands for agreements: checks that all ranks pass the same arguments.
    """

    def __missing__(self, operation: str) -> Count:
        """Return the count of an operation that was not called: a new one, at zero."""
        count = self[operation] = Count()
        return count

    def snapshot(self) -> dict[str, dict[str, float]]:
        """Return all counts as plain numbers: operation name -> field of `Count` -> number."""
        return {name: asdict(count) for name, count in self.items()}

    def reset(self) -> None:
        """Forget all operations, so that their counts are zero."""
        self.clear()

    def total(self, *, control: bool = False) -> Count:
        """Return the sum over all operations. `control` says whether to include agreements."""
        chosen = [count for name, count in self.items() if control or name != "control"]
        return sum(chosen, Count())
