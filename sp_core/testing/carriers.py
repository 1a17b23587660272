"""Exchange values between ranks without blocking inside MPI, and wait by polling.

An exchange is an all-gather of one value per rank: every rank of a communicator begins it, and it
is complete when all ranks have. Steps are a generator that yields while it waits for other ranks.
`MpiCarrier` makes exchanges between processes, `ThreadCarrier` between threads of one process. The
threads find a deadlock at once, when every rank waits or has ended.
"""

import pickle
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any, TypeVar

import numpy as np

from sp_core.testing.outcome import Mismatched

T = TypeVar("T")
Steps = Generator[None, None, T]
"""A generator that does a job in steps and returns the result.

It yields whenever it has to wait for other ranks. Each `next` polls again.
"""
Ticket = Callable[[], T | None]
"""A function that polls an exchange under way.

It returns None until all ranks have begun the exchange, and then the result of the exchange.
"""

HEAD_BYTES = 1024
"""Pickles of at most this many bytes are exchanged in one all-gather, longer ones in two."""
AFTER_SECONDS = 0.5
"""After this many seconds a wait counts as long, and looks for a deadlock at each poll."""
PAUSE_SHARE, LONGEST_PAUSE = 0.125, 5e-3
"""Between polls a wait sleeps for PAUSE_SHARE of its time so far, at most LONGEST_PAUSE seconds.

So a rank that waits long leaves its core to other ranks. The sleeps make a wait longer by at most
this share, or by the shortest sleep of the system. With 4 ranks on 2 cores, tests take a tenth
longer if short waits yield instead: Linux gives their core back late.
"""


class Carrier(ABC):
    """Exchange values between the ranks of one communicator.

    Attributes:
        rank: the caller's rank in this communicator.
        size: number of ranks.
    """

    rank: int
    size: int

    @abstractmethod
    def share(self, value: object, make: Callable[[list[Any]], T]) -> Ticket[T]:
        """Begin an all-gather of one value per rank, and return a function that polls for it.

        Every rank calls `share`; none waits in it.

        Args:
            value: this rank's value; its size may differ over ranks.
            make: the same function on all ranks, without side effects. It gets the values of all
                ranks in rank order. If ranks are threads, it is called once for all of them.

        Returns:
            A function (a ticket) that returns None until all ranks have begun the exchange, and
            then the result of `make`.
        """

    @abstractmethod
    def drive(self, steps: Steps[T], what: str, *, ending: bool = False) -> T:
        """Run a generator to its end and return its result. Sleep while it waits for other ranks.

        Args:
            steps: yields whenever it has to wait for other ranks.
            what: describes the wait, for the report of a deadlock.
            ending: whether this rank waits only for other ranks to end. If those are in a deadlock,
                they raise the error.
        """

    def gather(self, value: object) -> list[Any]:
        """Return the values of all ranks, in rank order. Every rank calls this and waits."""
        return self.drive(until(self.share(value, list)), "an exchange of values")


def until(ticket: Ticket[T]) -> Steps[T]:
    """Return a generator that calls `ticket` and yields until the ticket's exchange is complete.

    Its return value is the result of the exchange, such as that of `make` in `Carrier.share`.
    """
    while (got := ticket()) is None:
        yield
    return got


def begun(steps: Steps[T]) -> Callable[[], tuple[T, ...]]:
    """Run a generator to its first `yield`, and return a function that continues the generator.

    Each call of that function runs the generator to its next `yield`. A call returns () until the
    generator has ended, and then the generator's result in a 1-tuple.
    """
    result: tuple[T, ...] = ()

    def ask() -> tuple[T, ...]:
        nonlocal result
        try:
            next(steps)
        except StopIteration as end:
            result = result or (end.value,)
        return result

    ask()
    return ask


def patiently(ready: Callable[[], T | None], stuck: Callable[[], object] = lambda: None) -> T:
    """Call `ready` until it returns a true value, and return that value.

    Let other processes run between the calls. In a long wait sleep, longer each time.

    Args:
        ready: polls for the result.
        stuck: called at each poll once the wait has lasted AFTER_SECONDS; it may raise.
    """
    begin = time.perf_counter()
    while not (got := ready()):
        waited = time.perf_counter() - begin
        if waited > AFTER_SECONDS:
            stuck()
        time.sleep(min(waited * PAUSE_SHARE, LONGEST_PAUSE))
    return got


class MpiCarrier(Carrier):
    """Exchange values between processes, by non-blocking all-gathers of MPI.

    Args:
        comm: an mpi4py communicator that is used for nothing else.
        stuck: called with `what` and `ending` of `drive` at each poll of a long wait; it may raise.
    """

    def __init__(
        self, comm: Any, stuck: Callable[[str, bool], None] = lambda what, ending: None
    ) -> None:
        self.comm = comm
        self.rank, self.size = comm.rank, comm.size
        self._stuck = stuck

    def share(self, value: object, make: Callable[[list[Any]], T]) -> Ticket[T]:
        """Begin an all-gather of picklable values, and return a function that polls for it.

        Arguments and result are those of `Carrier.share`.
        """
        ask = begun(self._share(pickle.dumps(value), make))
        return lambda: next(iter(ask()), None)

    def _share(self, mine: bytes, make: Callable[[list[Any]], T]) -> Steps[T]:
        head = len(mine).to_bytes(8, "little") + mine[:HEAD_BYTES].ljust(HEAD_BYTES, b"\0")
        heads = yield from until(self._begin(head))
        longest = max(int.from_bytes(part[:8], "little") for part in heads)
        parts = [part[8:] for part in heads]
        if longest > HEAD_BYTES:
            parts = yield from until(self._begin(mine.ljust(longest, b"\0")))
        return make([pickle.loads(part) for part in parts])

    def _begin(self, mine: bytes) -> Ticket[list[bytes]]:
        """Begin an all-gather of bytes, and return a function that polls for the result.

        Every rank gives equally many bytes. The function returns None until the all-gather is
        complete, and then the bytes of each rank, in rank order.
        """
        received = np.empty((self.size, len(mine)), np.uint8)
        request = self.comm.Iallgather(np.frombuffer(mine, np.uint8), received.reshape(-1))
        return lambda: [part.tobytes() for part in received] if request.Test() else None

    def drive(self, steps: Steps[T], what: str, *, ending: bool = False) -> T:
        """Run a generator to its end and return its result. Sleep whenever the generator yields."""
        return patiently(begun(steps), lambda: self._stuck(what, ending))[0]


class Stopped(BaseException):
    """Raised in the ranks to end them all when one has hung; it is no error of the body."""


class World:
    """Hold the state that ranks share while they run one body; these ranks are threads.

    Args:
        size: number of ranks.

    Attributes:
        lock: guards the state.
        versions: for each rank, how often `touch` has counted a change that may end its wait.
        kept: the objects that `shared` has stored, by key.
        waiting: for each waiting rank, a description of its wait, and whether it waits only for
            other ranks to end.
        ended: for each rank an event, set when its function has come to its end.
        stopped: whether all ranks must end.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.lock = threading.RLock()
        self._changed = [threading.Condition(self.lock) for _ in range(size)]
        self.versions = [0] * size
        self.waiting: dict[int, tuple[str, bool]] = {}
        self._doomed: dict[int, str] = {}
        self.ended = [threading.Event() for _ in range(size)]
        self.kept: dict[Any, Any] = {}
        self.stopped = False

    def stop(self) -> None:
        """Raise `Stopped` in all ranks that wait, now or later."""
        self.stopped = True
        self.touch(range(self.size))

    def touch(self, ranks: Iterable[int]) -> None:
        """Count a change of the state for these ranks, and wake those of them that wait."""
        with self.lock:
            for rank in ranks:
                self.versions[rank] += 1
                self.waiting.pop(rank, None)
                self._changed[rank].notify()

    def shared(self, key: Any, new: Any) -> Any:
        """Return the object that all ranks, which are threads, share under `key`.

        The first rank that asks stores its `new`.
        """
        with self.lock:
            return self.kept.setdefault(key, new)

    def leave(self, rank: int) -> None:
        """Note that a rank has ended. Ranks that wait for it may then be in a deadlock."""
        with self.lock:
            self.ended[rank].set()
            self.touch(range(self.size))

    def sleep(self, rank: int, seen: int, what: str, ending: bool) -> None:
        """Wait until something has changed for this rank since its version `seen`.

        Args:
            rank: the caller's rank in the world.
            seen: the version of the caller's own state that it has seen.
            what: describes the wait, for the report of a deadlock.
            ending: this rank waits only for other ranks to end. A deadlock is reported to such
                ranks only if every waiting rank is one.

        Raises:
            Mismatched: every rank waits or has ended, and none can go on.
            Stopped: `stop` was called.
        """
        with self.lock:
            while self.versions[rank] == seen and not self.stopped:
                self.waiting[rank] = (what, ending)
                self._find_deadlock()
                if self.versions[rank] == seen:
                    self._changed[rank].wait()
            if self.stopped:
                raise Stopped
            if rank in self._doomed:
                raise Mismatched(self._doomed.pop(rank))

    def _find_deadlock(self) -> None:
        ended = sum(event.is_set() for event in self.ended)
        if len(self.waiting) + ended < self.size or self._doomed:
            return
        table = "".join(
            f"\n  rank {rank}: {what}" for rank, (what, _) in sorted(self.waiting.items())
        )
        stuck = [rank for rank, (_, ending) in self.waiting.items() if not ending]
        # If every rank only waits for other ranks to end, all of them raise.
        told = "every rank waits and none can go on:" + table
        self._doomed = dict.fromkeys(stuck or self.waiting, told)
        self.touch(range(self.size))


class ThreadCarrier(Carrier):
    """Exchange values between the ranks of one communicator, which are threads.

    Args:
        world: state shared by the threads.
        name: the communicator's name: the same on all its ranks, and used by no other communicator.
        rank: this thread's rank in the communicator.
        members: for each rank of the communicator, its rank in the world.
    """

    def __init__(self, world: World, name: str, rank: int, members: Sequence[int]) -> None:
        self.world, self.name, self.rank, self.members = world, name, rank, members
        self.size, self.world_rank = len(members), members[rank]
        self._rounds = 0

    def wake(self, ranks: Iterable[int]) -> None:
        """Count a change for this rank and these ranks of the communicator, and wake them.

        This rank polls again before it sleeps, because it may now have something to send.
        """
        self.world.touch(self.members[rank] for rank in {self.rank, *ranks})

    def share(self, value: object, make: Callable[[list[Any]], T]) -> Ticket[T]:
        """Begin an all-gather of one value per rank, and return a function that polls for it.

        Arguments and result are those of `Carrier.share`. Neither values nor result are copied.
        """
        self._rounds += 1
        key = self.name, "round", self._rounds
        with self.world.lock:
            values, made = self.world.shared(key, (dict[int, object](), list[T]()))
            values[self.rank] = value
            if len(values) == self.size:
                del self.world.kept[key]
                made.append(make([values[rank] for rank in range(self.size)]))
                self.wake(values)
        return lambda: made[0] if made else None

    def drive(self, steps: Steps[T], what: str, *, ending: bool = False) -> T:
        """Run a generator to its end and return its result. Sleep whenever the generator yields.

        Raises:
            Mismatched, Stopped: as in `World.sleep`.
        """
        ask, versions = begun(steps), self.world.versions
        seen = versions[self.world_rank]
        while not (done := ask()):
            self.world.sleep(self.world_rank, seen, what, ending)
            seen = versions[self.world_rank]
        return done[0]
