"""Count what each operation of a communicator has sent."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass
class Count:
    """What one operation of this rank has sent.

    `bytes_sent` counts the bytes of this rank's buffers that other ranks need. Inside a collective
    of the MPI library that is the
    payload: which messages carry it is the library's business, and `messages` stays 0.
    Point-to-point messages are counted one by one. In the memory that the ranks of a node share
    nothing is sent: there `messages` are the regions that this rank has read from others' memory,
    and `bytes_sent` their bytes. `scratch` is the most bytes of scratch memory that one call has
    used, outside the MPI library.
    """

    calls: int = 0
    messages: int = 0
    bytes_sent: int = 0
    seconds: float = 0.0
    scratch: int = 0

    def add(self, *, messages: int = 0, bytes_sent: int = 0, scratch: int = 0) -> None:
        """Count one more call."""
        self.calls += 1
        self.messages += messages
        self.bytes_sent += bytes_sent
        self.scratch = max(self.scratch, scratch)

    def __add__(self, other: Count) -> Count:
        return Count(
            self.calls + other.calls,
            self.messages + other.messages,
            self.bytes_sent + other.bytes_sent,
            self.seconds + other.seconds,
            max(self.scratch, other.scratch),
        )


class Counters(dict[str, Count]):
    """What a communicator has sent, by operation.

    `control` counts the comparisons between ranks.
    """

    def __missing__(self, operation: str) -> Count:
        """Return the count of an operation that was not called: a new one, at zero."""
        count = self[operation] = Count()
        return count

    def snapshot(self) -> dict[str, dict[str, float]]:
        """Return all counts as plain numbers."""
        return {name: asdict(count) for name, count in self.items()}

    def reset(self) -> None:
        """Set all counts to zero."""
        self.clear()

    def total(self, *, control: bool = False) -> Count:
        """Return the sum over all operations, without `control` unless asked for."""
        chosen = [count for name, count in self.items() if control or name != "control"]
        return sum(chosen, Count())
