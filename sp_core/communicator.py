"""Define `Communicator`: ranks with a device, a transport, counters and checks of their calls."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import Tensor

from sp_core import agreement, observer, progress
from sp_core.compiling import eager
from sp_core.counters import Counters
from sp_core.errors import DeviceError, NotCopied, RankError, short_text
from sp_core.observer import LEFT_TAG, observer_of
from sp_core.programs import Operation, defaults
from sp_core.scratch import Scratch
from sp_core.transport import Handle, HostWrapper, Messages, make_transport, make_window, wait
from sp_core.transport.base import Intracomm, Transfer, ensure_flat
from sp_core.transport.host import MpiCounter

if TYPE_CHECKING:
    from sp_core.tuning import Tuning

Check = Literal["agree", "off"]
MAX_TAG = LEFT_TAG - 1
"""The largest tag of a collective."""
MADE_LATER = ("_comm", "_owned", "scratch", "transport", "window", "no_window")
"""Attributes that a `Reordered` gets at its first use."""


class Communicator(NotCopied):
    """Hold ranks that communicate with each other. A `Mesh` makes communicators and frees them.

    Args:
        comm: an mpi4py communicator that only this object sends on. `free` frees `comm`.
        device: where the tensors live.
        transport: "auto", a name in `sp_core.transport.NAMES`, or on a CPU a `HostWrapper`.
        check: "agree" or "off", as in `Mesh`.
        name: the communicator's name in error messages.
        algorithm: what calls with algorithm="auto" use: one name, or a name for each collective;
            see `sp_core.programs.defaults`.
        nodes: for each rank the number of its node (machine).
        tuning: measured constants by which "auto" chooses on a CPU if `algorithm` is "auto" too,
            the same on every rank; None for none.

    Attributes:
        counters: the calls of each operation, and the bytes they sent.
        window, no_window: the ranks' shared memory, or None; a text that says why it is None.
    """

    rank: int
    size: int

    def __init__(
        self,
        comm: Intracomm,
        *,
        device: torch.device | str = "cpu",
        transport: str | HostWrapper = "auto",
        check: Check = "agree",
        name: str = "communicator",
        algorithm: str | Mapping[str, str] = "auto",
        nodes: Sequence[int],
        tuning: Tuning | None = None,
    ) -> None:
        self._describe(comm.rank, comm.size, name, nodes)
        self.device, self.check, self.tuning = torch.device(device), check, tuning
        self._asked, self.algorithms = transport, defaults(algorithm)
        self._control = agreement.Control(comm.Dup())
        self._open(comm, (self._control.comm, comm))

    def _describe(self, rank: int, size: int, name: str, nodes: Sequence[int]) -> None:
        """Set the attributes of this rank that need no communication."""
        self.rank, self.size, self.name, self.nodes = rank, size, name, tuple(nodes)
        self.counters, self._pending, self._order = Counters(), list[Handle](), tuple(range(size))
        self._tags, self._numbers = itertools.count(), itertools.count()
        self._progress, self._freed, self._heard = progress.of_this_rank(), False, 0.0

    def _open(self, comm: Intracomm, owned: Sequence[Intracomm]) -> None:
        """Make the transport over `comm`, and the window: memory that the ranks share, or None.

        Nobody else sends on `comm`. `free` frees the communicators in `owned`.
        """
        self._comm, self._owned, self.scratch = comm, owned, Scratch(self.device)
        try:
            self.transport = make_transport(self._asked, comm, self.device, self.poll)
        except DeviceError:  # on every rank
            for each in owned:
                each.Free()
            raise
        self.window, why_not = make_window(self.transport, comm, self.device)
        without = "" if self.window else f"it was made with transport={self._asked!r}"
        self.no_window = why_not or without

    @property
    def is_made(self) -> bool:
        """Return whether there is a transport. A `Reordered` has none before its first use."""
        return "transport" in vars(self)

    def __repr__(self) -> str:
        state = "freed" if self._freed else self.transport.name if self.is_made else "not used yet"
        return f"<{self.name}: rank {self.rank} of {self.size}, {self.device}, {state}>"

    def run(self, operation: Operation, call: Callable[[], object]) -> None:
        """Run a collective by `call`, which `transport.prepare` has made. Count it and its time."""
        count = self.counters[operation.op]
        count.add(bytes_sent=operation.bytes_sent)
        start = time.perf_counter()
        call()
        count.seconds += time.perf_counter() - start

    def start(self, operation: Operation, send: Tensor | None, recv: Tensor | None) -> Handle:
        """Start a collective from `send` into `recv`. Return a handle to pass to `wait`."""
        self.ensure_open()
        with self.counters[operation.op].timed() as count:
            count.add(bytes_sent=operation.bytes_sent)
            return self.track(self.transport.start(operation, send, recv))

    def exchange(
        self, sends: Messages, recvs: Messages, name: str = "exchange", *, longest: int = 0
    ) -> Handle:
        """Start point-to-point messages; return a handle. Ranks without messages call this, too.

        A message is (other rank, flat contiguous tensor on `device`). `longest` > 0, the bytes of
        the longest message, lets messages go through shared memory: at most one from each rank.
        Another tensor, or in shared memory another message, raises ShapeError on this rank.
        """
        self.ensure_open()
        ensure_flat((*sends, *recvs))
        with self.counters[name].timed() as count:
            count.add(messages=len(sends), bytes_sent=sum(x.nbytes for _, x in sends))
            if longest and self.window is not None:
                return self.track(self.window.exchange(sends, recvs, longest))
            return self.track(self.transport.exchange(sends, recvs))

    def counter(self) -> MpiCounter:
        """Return a counter whose `take` gives 0, 1, 2, ..., each number to one rank only.

        Every rank calls this (one agreement), and the counter's `free` in the end. No rank may take
        a number after any rank has made the next counter.
        """
        self.agree_on(lambda: f"counter() on {self.name}")
        self.settle()
        return observer_of(self._comm).make_counter() or MpiCounter(self._comm)

    def settle(self) -> None:
        """Wait until this rank has made the MPI calls of all operations that it has begun."""
        wait(self.transport.in_order(lambda: None), self.poll, self.look)

    def track(self, handle: Handle) -> Handle:
        """Let `poll` test `handle` until it is complete. Return one that any thread may use."""
        # torch refuses to write tensors of inference mode elsewhere; a poll may come from anywhere
        test = handle.test
        if torch.is_inference_mode_enabled():
            test = torch.inference_mode()(test)
        with self._progress.lock:
            self._pending.append(tracked := progress.Locked(test, self._progress.lock))
            self._progress.add(self)
        return tracked

    def next_tag(self) -> int:
        """Return the next MPI tag: equal on ranks that begin collectives in the same order."""
        return 1 + next(self._tags) % MAX_TAG

    @eager
    def wait(self, handle: Handle, name: str) -> None:
        """Block until `handle` is complete. Add the time to the counts of the operation `name`.

        Meanwhile all other operations that this rank has started make progress.
        """
        with self.counters[name].timed():
            try:
                if not handle.test():
                    self.ensure_open()  # after `free` nothing makes progress
                    wait(handle, self.poll, self.look)
            except RankError:
                self.ensure_open()  # its error says why a rank was lost
                raise
        with self._progress.lock:
            self._pending = [other for other in self._pending if other is not handle]

    @eager
    def poll(self) -> None:
        """Advance operations of this rank on all meshes that the same thread made; do not block.

        Call `poll` between parts of a long computation, or in a signal handler; it is cheap.
        """
        self._progress.poll()

    def look(self) -> None:
        """Raise `PeerFailed`, in a long wait, if a rank told GRACE_SECONDS ago that it leaves."""
        if (rank := observer_of(self._comm).first_left()) is not None:
            self._heard = self._heard or time.monotonic()
            if time.monotonic() > self._heard + observer.GRACE_SECONDS:
                self._progress.keep(self._control.hear(self._order[rank], f"a wait on {self.name}"))
                self.ensure_open()

    def advance(self) -> bool:
        """Test all handles of this communicator. Return whether any is still incomplete."""
        self._pending = [handle for handle in self._pending if not handle.test()]
        return bool(self._pending)

    def fence(self) -> None:
        """Wait until all ranks call this. Then each sees what any wrote into shared memory before.

        The call includes an agreement, unless there is shared memory and `check="off"`.
        """
        self.agree_on(lambda: f"fence() on {self.name}", always=self.window is None)
        if self.window is not None:
            self.counters["control"].add()
            wait(self.window.start(((), ()), "fence"), self.poll, self.look)

    def _agree(self, call: str, value: int, error: Exception | None) -> tuple[int, ...]:
        control, told = self.counters["control"], tuple[int, ...]()
        try:
            with control.timed():
                told = agreement.agree(self._control, call, value, error, self._progress)
            return told
        finally:
            control.add(bytes_sent=agreement.bytes_sent(self.size, len(set(told)) == 1))

    @eager
    def agree_on(
        self,
        call: Callable[[], str],
        check: Callable[[], int | None] | None = None,
        *,
        always: bool = True,
    ) -> tuple[int, ...]:
        """Check arguments on every rank, and that all calls are equal. An error is raised on all.

        Args:
            call: returns the text of operation and arguments that must be the same on every rank,
                or raises an error about them.
            check: raises an error, or returns an int64 to send to all ranks; None counts as 0.
            always: communicate even if the communicator was made with `check="off"`. Without
                communication an error is raised on this rank only.

        Returns:
            Every rank's integer in rank order, or () without communication.

        Communication:
            None, or one `agreement.agree`.
        """
        self.ensure_open()  # a freed communicator sends nothing: each rank raises by itself
        error, value, text, asks = None, 0, "", always or self.check == "agree"
        try:
            value, text = (check() if check else None) or 0, call() if asks else ""
        except Exception as found:  # noqa: BLE001  # the other ranks must not wait for this one
            error = found
        if error is not None and not asks:
            raise error
        return self._agree(text, value, error) if asks else ()

    @contextmanager
    def agreed(self) -> Iterator[None]:
        """Skip in a `with` block the checks that ranks agree on arguments, as with check="off".

        Use it only after an agreement that determines the arguments of all calls in the block.
        """
        check, self.check = self.check, "off"
        try:
            yield
        finally:
            self.check = check

    def numbered(self) -> Callable[..., object]:
        """Give an object, such as a plan, a number. All ranks must make these in the same order.

        Return a function (name of a use, `check` of `agree_on`) to call before each use, such as
        "the backward of all_reduce". Unless check="off", it is an agreement on name and number.
        """
        number = next(self._numbers)

        def compare(what: str, check: Callable[[], None] | None = None) -> None:
            self.agree_on(lambda: f"{what}, number {number} on {self.name}", check, always=False)

        return compare

    def ensure_open(self) -> None:
        """Raise `RankError` if this communicator has been freed, or another rank has left it."""
        if self._freed:
            freed = f"{self.name} (rank {self.rank} of {self.size}) has been freed"
            raise RankError(f"{freed}. Use it inside its `with` block.")
        self._control.ensure_whole()

    def ask_to_free(self, how: str = "") -> list[agreement.Question]:
        """Begin to agree with all ranks that they free this communicator.

        Return a list of this agreement; it is empty if there is nothing to free. `how` adds words
        about the call to error messages; it must be the same on every rank.
        """
        if self._freed or not self.is_made:
            return []
        self.counters["control"].add(bytes_sent=agreement.bytes_sent(self.size, equal=False))
        return self._control.leave(f"free() of {self.name}{how}", agreement.State.FREES)

    def free(self, *, is_agreed: bool = False) -> None:
        """Free the MPI communicator when all transfers are complete. Every rank calls this.

        A second call does nothing. Unless `is_agreed`, first check that all ranks call `free`. If
        one does not, this abandons the communicator and raises a RankError.
        """
        if self._freed or not self.is_made:
            self._freed = True
            return
        try:
            if not is_agreed:
                wait(Transfer([one.is_answered for one in self.ask_to_free()]), self.poll)
            for handle in self._pending:
                wait(handle, self.poll, self.look)
        except RankError as error:
            self.abandon(error)
            raise
        self._leave(together=True)
        for comm in self._owned:
            comm.Free()

    def abandon(self, error: BaseException) -> None:
        """Stop using this communicator because of an error, without waiting for other ranks.

        The next agreement of the others raises `PeerFailed`, with the first 40 bytes of `error`.
        """
        if self.is_made and not self._freed:
            with suppress(Exception):  # do not hide the error
                self.decline(f"{type(error).__name__}: {short_text(error)}")
            with suppress(Exception):
                observer_of(self._comm).abandoned()
            self._progress.lose(self._pending)
        self._leave(together=False)

    def decline(self, why: str) -> None:
        """Let the next agreement of the others raise `PeerFailed`, with 40 bytes of `why`."""
        self._progress.keep(self._control.leave(why, agreement.State.FAILS))

    def _leave(self, *, together: bool) -> None:
        made, self._freed = self.is_made and not self._freed, True
        if not made:
            return
        self._pending.clear()
        self._progress.remove(self)
        self.scratch.clear()
        self.transport.close(together=together)
        if self.window is not None:
            self.window.close(together=together)


class Reordered(Communicator):
    """Number the ranks of a communicator in a different order, as mesh["b", "a"] does.

    The first use makes the MPI communicator, so it must be in the same call on all ranks. All
    agreements go over `other`, so it is an error if ranks use different orders. Error messages
    number the ranks as `other` does.

    Args:
        other: the given communicator. The mesh frees both only when all ranks have agreed on both.
        order: for each rank its number in `other`.
        name, nodes: as in `Communicator`.
    """

    def __init__(
        self, other: Communicator, order: Sequence[int], name: str, nodes: Sequence[int]
    ) -> None:
        vars(self).update({key: vars(other)[key] for key in vars(other).keys() - {*MADE_LATER}})
        self._describe(order.index(other.rank), other.size, name, nodes)
        self._control = agreement.Control(other._control.comm, other._control)
        self._progress = other._progress
        self._other, self._order = other, tuple(order)

    def __getattr__(self, name: str) -> Any:
        if name not in MADE_LATER:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        self._other.ensure_open()
        self._other._agree(f"first use of {self.name}", 0, None)
        self._other.settle()
        comm = cast("Intracomm", self._other._comm.Split(0, self.rank))
        self._open(comm, (comm,))
        return vars(self)[name]

    def ensure_open(self) -> None:
        """Raise `RankError` as `Communicator` does. On first use, make the MPI communicator.

        Calls do this before checks of arguments, which may fail on one rank while others come here.
        """
        super().ensure_open()
        self._other.ensure_open()
        if not self.is_made:
            self.__getattr__("transport")

    def ask_to_free(self, how: str = "") -> list[agreement.Question]:
        """Begin to agree as `Communicator` does, unless `other`, which carries it, was freed."""
        return [] if self._other._freed else super().ask_to_free(how)

    def _agree(self, call: str, value: int, error: Exception | None) -> tuple[int, ...]:
        told = super()._agree(call, value, error)
        return tuple(told[place] for place in self._order)
