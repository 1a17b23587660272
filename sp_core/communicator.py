"""Let a group of ranks communicate: device, transport, comparisons, counters."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Self, cast

import torch
from torch import Tensor

from sp_core import agreement, progress
from sp_core.counters import Counters
from sp_core.errors import DeviceError, RankError
from sp_core.observer import observer_of
from sp_core.schedules import Operation, defaults
from sp_core.scratch import Scratch
from sp_core.transport import Handle, HostWrapper, Messages, make_transport, make_window, wait
from sp_core.transport.host import MpiCounter

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

    from sp_core.tuning import Tuning

Check = Literal["agree", "off"]
MAX_TAG = 32767
"""The largest tag that the MPI standard guarantees."""
MADE_LATER = ("_comm", "_owned", "scratch", "transport", "window", "no_window")
"""Attributes that a `Reordered` gets in its first use."""


class NotCopied:
    """An object of the ranks of one run. Copies of a layer share it, and it cannot be pickled."""

    def __deepcopy__(self, memo: object) -> Self:
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"{self!r} cannot be pickled, since it ends with this run. Save state_dict() of a "
            f"layer, and make it again."
        )


class Communicator(NotCopied):
    """Ranks that communicate. A `Mesh` makes communicators and frees them.

    Args:
        comm: an mpi4py communicator that only this object sends on. It is freed by `free`.
        device: where the tensors live.
        transport: "auto", a name of `sp_core.transport.NAMES`, or a `HostWrapper`.
        check: "agree" lets every collective compare its arguments over the ranks first; "off"
            leaves that to schemes and layers.
        name: what error messages call it.
        algorithm: what each collective uses where a call says "auto"; as in
            `sp_core.schedules.defaults`.
        nodes: the node of each rank; all on one by default.
        tuning: constants by which "auto" decides where `algorithm` says so too, the same on every
            rank; None: the library decides.
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
        nodes: Sequence[int] = (),
        tuning: Tuning | None = None,
    ) -> None:
        self._describe(comm.rank, comm.size, name, nodes or (0,) * comm.size)
        self.device, self.check, self.tuning = torch.device(device), check, tuning
        self._asked, self.algorithms = transport, defaults(algorithm)
        # apart from transfers under way, whose calls have an order of their own
        self._control = comm.Dup()
        self._open(comm, (self._control, comm))

    def _describe(self, rank: int, size: int, name: str, nodes: Sequence[int]) -> None:
        """Set what is this rank's own and needs no other rank."""
        self.rank, self.size, self.name, self.nodes = rank, size, name, tuple(nodes)
        self.counters = Counters()
        self._pending: list[Handle] = []
        self._declined: list[agreement.Question] = []
        self._progress = progress.of_this_rank()
        self._tags = self._numbers = 0
        self._freed = False

    def _open(self, comm: Intracomm, owned: Sequence[Intracomm]) -> None:
        """Make the transport and the window over `comm`, which nobody else sends on.

        `free` frees the communicators in `owned`.
        """
        self._comm, self._owned, self.scratch = comm, owned, Scratch(self.device)
        try:
            self.transport = make_transport(self._asked, comm, self.device, self.poll)
        except DeviceError:  # on every rank
            for each in owned:
                each.Free()
            raise
        self.window, why_not = make_window(self.transport.name, comm, self.device)
        without = "" if self.window else f"it was made with transport={self._asked!r}"
        self.no_window = why_not or without

    @property
    def is_made(self) -> bool:
        """Whether the ranks have made it together.

        A product of axes in another order is made in its first use.
        """
        return "transport" in vars(self)

    def __repr__(self) -> str:
        state = "freed" if self._freed else self.transport.name if self.is_made else "not used yet"
        return f"<{self.name}: rank {self.rank} of {self.size}, {self.device}, {state}>"

    def prepare(
        self, operation: Operation, send: Tensor | None, recv: Tensor | None
    ) -> Callable[[], None]:
        """Prepare a collective over fixed buffers.

        Return a function that runs it, any number of times.
        """
        call, bytes_sent = self.transport.prepare(operation, send, recv), operation.bytes_sent

        def run() -> None:
            self.ensure_open()
            count = self.counters[operation.op]
            count.add(bytes_sent=bytes_sent)
            start = time.perf_counter()
            call()
            count.seconds += time.perf_counter() - start

        return run

    def start(self, operation: Operation, send: Tensor | None, recv: Tensor | None) -> Handle:
        """Start a collective. Finish it with `wait`."""
        self.ensure_open()
        self.counters[operation.op].add(bytes_sent=operation.bytes_sent)
        return self.track(self.transport.start(operation, send, recv))

    def exchange(
        self, sends: Messages, recvs: Messages, name: str = "exchange", *, longest: int = 0
    ) -> Handle:
        """Start point-to-point messages. Every rank calls this, with empty lists if it has none.

        A window carries them with `longest`: no rank sends two, nor more bytes. Ranks agree on it.
        """
        self.ensure_open()
        self.counters[name].add(messages=len(sends), bytes_sent=sum(x.nbytes for _, x in sends))
        if longest and self.window is not None:
            return self.track(self.window.exchange(sends, recvs, longest))
        return self.track(self.transport.exchange(sends, recvs))

    def counter(self) -> MpiCounter:
        """Make a counter that gives each number to one rank.

        Every rank calls this, and frees it in the end.
        """
        self.agree_on(lambda: f"counter() on {self.name}")
        return observer_of(self._comm).make_counter() or MpiCounter(self._comm)

    def track(self, handle: Handle) -> Handle:
        """Let every `poll` and `wait` of this rank test a handle until it is complete."""
        self._pending.append(handle)
        self._progress.add(self)
        return handle

    def next_tag(self) -> int:
        """Return the tag of the next collective.

        All ranks start collectives in one order, so their tags are equal.
        """
        self._tags = self._tags % (MAX_TAG - 1) + 1
        return self._tags

    def wait(self, handle: Handle, name: str) -> None:
        """Wait for a handle of the operation `name`.

        Everything else that this rank has started makes progress meanwhile.
        """
        start = time.perf_counter()
        if not handle.test():
            self.ensure_open()  # once it is closed nothing makes progress
            wait(handle, self.poll)
        self._pending = [other for other in self._pending if other is not handle]
        self.counters[name].seconds += time.perf_counter() - start

    def poll(self) -> None:
        """Let everything that this rank has started make progress, on any communicator.

        Cheap; call it between pieces of a long computation.
        """
        self._progress.poll()

    def advance(self) -> bool:
        """Let everything started on this communicator make progress.

        Return False once nothing is left.
        """
        self._pending = [handle for handle in self._pending if not handle.test()]
        return bool(self._pending)

    def fence(self) -> None:
        """Wait for all ranks.

        The ranks compare their calls, unless there is a window and `check="off"`.
        """
        self.agree_on(lambda: f"fence() on {self.name}", always=self.window is None)
        if self.window is not None:
            self.counters["control"].add()
            self.window.make(((), ()), "fence", self.poll)

    def _agree(self, call: str, value: int, error: Exception | None) -> tuple[int, ...]:
        start = time.perf_counter()
        told: tuple[int, ...] = ()
        try:
            told = agreement.agree(self._control, call, value, error, self._progress)
            return told
        finally:
            control = self.counters["control"]
            control.add(bytes_sent=agreement.bytes_sent(self.size, len(set(told)) == 1))
            control.seconds += time.perf_counter() - start

    def agree_on(
        self,
        call: Callable[[], str],
        check: Callable[[], int | None] | None = None,
        *,
        always: bool = True,
    ) -> tuple[int, ...]:
        """Run a local check on every rank and compare the calls.

        An error that one rank finds is raised on all ranks.

        Args:
            call: gives the operation and the arguments that must be the same on every rank. It may
                raise what is wrong, too.
            check: raises what is wrong, or returns this rank's number; None is 0.
            always: exchange records even if the communicator was made with `check="off"`.

        Returns:
            Every rank's number, or nothing where no records were exchanged.
        """
        self.ensure_open()  # nobody can be asked any more: every rank finds this out by itself
        error, value, text = None, 0, ""
        try:
            value = (check() if check else None) or 0
            text = call()
        except Exception as found:  # noqa: BLE001  # the other ranks must not wait for this one
            error = found
        if always or self.check == "agree":
            return self._agree(text, value, error)
        if error is not None:
            raise error
        return ()

    @contextmanager
    def agreed(self) -> Iterator[None]:
        """Leave out, in a `with` block, the comparisons that `check="off"` leaves out.

        The ranks have agreed on a call from which all calls of the block follow.
        """
        check, self.check = self.check, "off"
        try:
            yield
        finally:
            self.check = check

    def numbered(self) -> Callable[[str], object]:
        """Give a number to an object that the ranks make in one order and use later.

        Returns:
            A function to call with what is about to be done, such as "the backward of all_reduce".
            Unless the communicator was made with `check="off"`, the ranks compare this and the
            number.
        """
        self._numbers += 1
        number = self._numbers

        def compare(what: str) -> None:
            self.agree_on(lambda: f"{what}, number {number} on {self.name}", always=False)

        return compare

    def ensure_open(self) -> None:
        """Raise `RankError` if this communicator has been freed."""
        if self._freed:
            raise RankError(
                f"{self.name} (rank {self.rank} of {self.size}) has been freed. Use it inside its "
                f"`with` block."
            )

    def ask_to_free(self) -> list[agreement.Question]:
        """Start to compare whether every rank is about to free this communicator."""
        if self._freed or not self.is_made:
            return []
        self.counters["control"].add(bytes_sent=agreement.bytes_sent(self.size, equal=False))
        return [
            agreement.Question(self._control, f"free() of {self.name}", state=agreement.State.FREES)
        ]

    def free(self, *, is_agreed: bool = False) -> None:
        """Free the MPI communicator, on every rank. A second call does nothing.

        Args:
            is_agreed: whether the ranks have compared that all of them are about to do so.
        """
        if self._freed or not self.is_made:
            self._freed = True
            return
        try:
            if not is_agreed:
                wait(agreement.Questions(self.ask_to_free()), self.poll)
            for handle in (*self._pending, *self._declined):
                wait(handle, self.poll)
        except RankError:
            self.abandon()
            raise
        self._leave(together=True)
        for comm in self._owned:
            comm.Free()

    def abandon(self) -> None:
        """Stop using this communicator because of an error.

        Tell ranks that compare calls on it, and wait for none.
        """
        if self.is_made:
            self.decline(f"an error made it leave {self.name}")
            observer_of(self._comm).abandoned()
        self._leave(together=False)

    def decline(self, why: str) -> None:
        """Make the next comparison of the other ranks an error, without waiting for them."""
        if not self._freed:
            with suppress(Exception):  # the error that is the reason says more
                question = agreement.Question(self._control, why, state=agreement.State.FAILS)
                self._declined.append(question)
                self._progress.keep(self._declined[-1:])

    def _leave(self, *, together: bool) -> None:
        made, self._freed = self.is_made and not self._freed, True
        if not made:
            return
        self._pending.clear()
        self.scratch.clear()
        self.transport.close(together=together)
        if self.window is not None:
            self.window.close(together=together)


class Reordered(Communicator):
    """The ranks of another communicator, numbered in another order.

    It is made when it is first used, which all its ranks do in the same call. Its agreements go
    through the other communicator, so that ranks which use different orders are told so. Their
    errors number the ranks as that one does.

    Args:
        other: the communicator, which must be freed after this one.
        order: for each rank its number in `other`.
        name, nodes: as in `Communicator`.
    """

    def __init__(
        self, other: Communicator, order: Sequence[int], name: str, nodes: Sequence[int]
    ) -> None:
        shared = {key: value for key, value in vars(other).items() if key not in MADE_LATER}
        vars(self).update(shared)
        self._describe(order.index(other.rank), other.size, name, nodes)
        self._other, self._order = other, tuple(order)

    def __getattr__(self, name: str) -> Any:
        if name not in MADE_LATER:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        self._other._agree(f"first use of {self.name}", 0, None)
        comm = cast("Intracomm", self._other._comm.Split(0, self.rank))
        self._open(comm, (comm,))
        return vars(self)[name]

    def ensure_open(self) -> None:
        """Make the communicator in the first call.

        Do so before a check of the call can fail on some ranks.
        """
        super().ensure_open()
        if not self.is_made:
            self.__getattr__("transport")

    def _agree(self, call: str, value: int, error: Exception | None) -> tuple[int, ...]:
        told = super()._agree(call, value, error)
        return tuple(told[place] for place in self._order)
