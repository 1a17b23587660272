"""Check that all ranks make the same call: a mistake on one rank becomes an error on all ranks.

Such a check is called an agreement. A call is a text: the name of a function and its arguments.
`agree` runs an agreement and waits for it; `Question` does so without blocking. Collectives reach
them through `Communicator.agree_on`. `make_alike` and `agreeing_in_turn` build on that method.

A rank's record has 64 bytes: the `State`, a hash of the call, the rank's value (such as the length
of a shard), and the first 40 bytes of the call or error. The rank's digest is a hash of state,
value and call: four numbers below 2**32.

First the ranks all-reduce the sum of their digests. A rank takes all digests to be equal if its own
is their mean. This is wrong as rarely as hashes collide. If the digests differ, the ranks gather
the records, and then, if calls differ or arguments are refused, the full texts. A rank with a state
other than CALLS starts to gather at once, since its digest differs from those of CALLS.
"""

import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum
from functools import partial
from hashlib import blake2b
from typing import Any, TypeVar

import numpy as np

from sp_core import errors, progress
from sp_core.errors import AGREED, CollectiveMismatch, PeerFailed, RankError, differences, joined
from sp_core.observer import observer_of
from sp_core.transport.base import Intracomm, wait

T = TypeVar("T")
_RECORD = struct.Struct("q8sq40s")
RECORD_BYTES = _RECORD.size
DIGEST_BYTES = 32
"""Bytes of a digest in the all-reduce: four numbers, each in an int64, so that sums do not
overflow."""
ERRORS: tuple[type[Exception], ...] = (
    errors.ShapeError,
    errors.DtypeError,
    errors.DeviceError,
    errors.CheckpointError,
    ValueError,  # after its subclasses above
    TypeError,
    errors.CollectiveMismatch,
    errors.RankError,
)
"""Classes of the errors that checks of arguments raise. Ranks send each other the index of a class
in this tuple."""


def bytes_sent(size: int, equal: bool) -> int:
    """Return the bytes that a rank sends in one `agree`, without the texts of errors.

    Args:
        size: number of ranks.
        equal: whether all ranks have the same state, value and call. If not, each rank also sends
            its record of 64 bytes to all others.
    """
    return DIGEST_BYTES * (size > 1) + (0 if equal else RECORD_BYTES * (size - 1))


class State(IntEnum):
    """Name what a rank says in an agreement.

    Attributes:
        CALLS: the rank makes the call.
        REFUSES: the rank's arguments are wrong, or it has heard that another rank has left.
        FREES: the rank frees the communicator.
        FAILS: the rank has an error: it leaves the communicator, or has refused a call that other
            ranks may make here.
    """

    CALLS = 0
    REFUSES = 1
    FREES = 2
    FAILS = 3


def agree(
    comm: "Intracomm | Control",
    call: str,
    value: int = 0,
    error: Exception | None = None,
    under_way: progress.Progress | None = None,
) -> tuple[int, ...]:
    """Check that all ranks pass the same `call`, and give each rank the values of all ranks.

    Every rank of the communicator calls this and waits for the others.

    Args:
        comm: an mpi4py communicator, or the `Control` of one.
        call: the text of the operation and its arguments, which must be the same on every rank.
        value: an integer that int64 can hold. It may differ between ranks.
        error: the error that a check of this rank's arguments has raised, or None.
        under_way: operations to poll during the wait. None takes `progress.of_this_rank()`.

    Returns:
        The `value` of every rank, in rank order.

    Communication:
        Always one all-reduce of 32 bytes. If values or calls differ, or a rank has an error, also
        one all-gather of 64 bytes per rank. If calls differ or a rank has an error, and no rank has
        left, two more collectives exchange the texts.

    Raises:
        Exception: on every rank, the error of the lowest rank that has one, with that rank in its
            text. An error of a class that is not in ERRORS becomes a RankError.
        CollectiveMismatch: the calls differ, or some ranks free the communicator while others use
            it.
        PeerFailed: a rank has left the communicator because of an error.
    """
    try:
        struct.pack("q", value)
    except (struct.error, TypeError):  # the other ranks must not wait for this one
        needed = "pass an integer from -2**63 to 2**63 - 1."
        error, value = error or ValueError(f"the value {value!r} was given; {needed}"), 0
    control = comm if isinstance(comm, Control) else Control(comm)
    under_way = under_way or progress.of_this_rank()
    for question in (*control.open, *control.last):  # other ranks answer these first, too
        wait(progress.Locked(question.test, under_way.lock), under_way.poll)
        control.open.clear()
        question.answer()
    control.last = []
    control.open[:] = [question := Question(control, call, value, error)]
    try:
        if under_way.idle and question.requests:  # then nothing needs `poll` during a wait of MPI
            question.wait()
        else:
            wait(question, under_way.poll)
    except BaseException:
        if control is not comm:  # the control ends here, and MPI still uses the question's memory
            under_way.keep([question])
        raise
    control.open.clear()
    return question.answer()


class Control:
    """Hold a communicator for agreements, until this rank frees it or ranks leave it.

    To free or leave, a rank starts one last agreement, unless an earlier one has failed because
    other ranks leave. So no agreement waits for a rank that has left.

    Args:
        comm: an mpi4py communicator, used only for agreements.
        other: another `Control` of `comm`, whose `open` and `behind` this one shares; or None.

    Attributes:
        open: a list of the agreement that waits, or that an error has interrupted; else [].
        behind: the last agreements of `comm` that were made while another one was open.
        last: a list of the last agreement, in which this rank frees or leaves; [] before.
        lost: makes again the error by which this rank learned that others leave; None before.
    """

    def __init__(self, comm: Intracomm, other: "Control | None" = None) -> None:
        self.comm, self.last = comm, list[Question]()
        self.open: list[Question] = other.open if other else []
        self.behind: list[Question] = other.behind if other else []
        self.lost: Callable[[], RankError] | None = None

    def ensure_whole(self) -> None:
        """Raise the error by which this rank learned that others leave, if there was one."""
        if self.lost:
            raise errors.of_all(self.lost(), self.comm.rank)

    def leave(self, why: str, state: State) -> "list[Question]":
        """Start the last agreement of this rank, unless it was started before. Return `last`.

        `why` and `state` are the rank's `call` and `state` in it, as in `Question`.
        """
        self.ensure_whole()
        self.last = self.last or [Question(self, why, state=state)]
        return self.last

    def hear(self, rank: int, where: str) -> "list[Question]":
        """Let `ensure_whole` say that `rank` has left; return this rank's last agreement."""
        last = self.leave(where, State.REFUSES)
        self.lost = partial(PeerFailed, f"{where} cannot end: {errors.LEFT.format(rank)}")
        return last


class Question:
    """Represent a non-blocking agreement (see `agree`) of the ranks of a communicator.

    Making the object sends a hash of the rank's state, value and call. If an error has interrupted
    an agreement of `control`, `test` sends it after that one. Call `test` until it returns True, or
    `wait` once; then call `answer`.

    Args:
        control: holds the communicator.
        call, value, error: as in `agree`.
        state: not CALLS if this rank makes no call; then `call` says why. With an `error` the state
            is REFUSES.

    Attributes:
        requests: the MPI requests of the agreement, one or two; none before it has begun.
    """

    def __init__(
        self,
        control: Control,
        call: str,
        value: int = 0,
        error: Exception | None = None,
        state: State = State.CALLS,
    ) -> None:
        self._control, self._comm = control, control.comm
        self._call, self._error, self._value = call, error, value
        state = state if error is None else State.REFUSES
        texts = call, _text(error) if error else call
        named, beginning = (text.encode(errors="backslashreplace") for text in texts)
        head = struct.pack("qq", state, value)
        words = np.frombuffer(blake2b(head + named, digest_size=16).digest(), "<u4")
        digest = blake2b(named).digest()  # packed are its first 8 bytes
        # MPI knows only the addresses of these arrays: keep them alive
        self._mine, self._sum = words.astype(np.int64), np.empty(words.size, np.int64)
        self._record = np.frombuffer(_RECORD.pack(state, digest, value, beginning), np.int64)
        self._records: np.ndarray[Any, np.dtype[np.int64]] | None = None
        self.requests, self._state = list[Any](), state
        self._before = [*control.open, *control.behind]
        if self._before and state != State.CALLS:  # later last agreements then begin after this one
            control.behind.append(self)
        self._begun()

    def _begun(self) -> bool:
        if not self.requests and all(question.test() for question in self._before):
            observer_of(self._comm).announce_early()
            self.requests.append(self._comm.Iallreduce(self._mine, self._sum))
            if self._state != State.CALLS:
                self._gather()
        return bool(self.requests)

    def _gather(self) -> None:
        self._records = np.empty((self._comm.size, self._record.size), np.int64)
        self.requests.append(self._comm.Iallgather(self._record, self._records.ravel()))

    def _compared(self) -> bool:
        """Start to gather all ranks' records if the hashes differ, unless that was done before.

        Return False if this call has started the gather, so that the agreement is not complete.
        """
        if self._records is not None:  # a freed communicator must not be used any more
            return True
        is_equal = bool((self._sum == self._comm.size * self._mine).all())
        if not is_equal:
            self._gather()
        return is_equal

    def test(self) -> bool:
        """Make progress without blocking. Return whether the agreement is complete."""
        return self._begun() and all(r.Test() for r in self.requests) and self._compared()

    def wait(self) -> None:
        """Block until the agreement is complete, without polling other operations of this rank."""
        self.requests[0].Wait()
        self._compared()
        self.requests[-1].Wait()

    def is_answered(self) -> bool:
        """Make progress without blocking. Return whether the agreement is complete.

        Raises:
            As `agree`, once it is complete.
        """
        return self.test() and self.answer() is not None

    def answer(self) -> tuple[int, ...]:
        """Return every rank's value, or raise as `agree`. The agreement must be complete.

        The result is () if all ranks leave. If calls differ or a rank has refused, and none leaves,
        this gathers the texts of all ranks, and so waits for them.
        """
        records = self._records
        if records is None:
            return (self._value,) * self._comm.size
        states, is_one_call = records[:, 0], bool((records[:, 1] == records[0, 1]).all())
        if (states == State.FAILS).all():
            return ()
        if (states >= State.FREES).any() and not (is_one_call and (states == State.FREES).all()):
            found = _parted(records)
            self._control.lost = partial(type(found), str(found))
            raise errors.of_all(found, self._comm.rank) from self._error
        if (states == State.REFUSES).any() or not is_one_call:
            _raise(self._comm, self._call, self._error, (states == State.REFUSES).tolist())
        return tuple(int(v) for v in records[:, 2])


def _raise(comm: Intracomm, call: str, error: Exception | None, failed: Sequence[bool]) -> None:
    is_told = AGREED in vars(error or Exception())  # its text names a rank of another axis
    # the index in ERRORS of the error's class; for any other class -1, the last: RankError
    kind = next((place for place, kind in enumerate(ERRORS) if isinstance(error, kind)), -1)
    mine = (kind, call if error is None else _text(error), is_told)
    kinds, texts, are_told = zip(*comm.allgather(mine), strict=True)
    if not any(failed):
        raise errors.of_all(CollectiveMismatch(differences(texts)), comm.rank)
    first = failed.index(True)
    told = [
        (f"rank {rank}: " * (not are_told[rank]), text)
        for rank, text in enumerate(texts)
        if rank == first or (failed[rank] and text != texts[first])
    ]
    raise errors.of_all(ERRORS[kinds[first]](joined(told)), comm.rank) from error


def _parted(records: np.ndarray[Any, np.dtype[np.int64]]) -> RankError:
    """Return the error for the case that only some ranks free or leave the communicator.

    Args:
        records: the records of all ranks, int64 (ranks, 8). The columns are the state, the hash of
            the call, the value, and 40 bytes of text in five columns. All ranks have the same
            records, and so get the same error.
    """
    texts = [record[3:].tobytes().decode(errors="ignore") for record in records]
    lines = joined(
        [
            (f"  rank {rank}: ", text.rstrip("\0") + "..." * (text[-1:] != "\0"))
            for rank, text in enumerate(texts)
        ]
    )
    if (failed := np.flatnonzero(records[:, 0] >= State.FAILS)).size:
        return PeerFailed(f"{errors.LEFT.format(failed[0])} Nothing was sent.\n{lines}")
    return CollectiveMismatch(
        f"some ranks leave and others do not; nothing was sent. Make these calls equal:\n{lines}"
    )


def _text(error: Exception) -> str:
    return str(error) if isinstance(error, ERRORS) else f"{type(error).__name__}: {error}"


def make_alike(comm: Any, make: Callable[[], tuple[T, str]]) -> T:
    """Call `make` on every rank, and raise an error of one rank on all ranks.

    Args:
        comm: a `Communicator`; every rank calls this.
        make: returns (result, text). The text must be the same on every rank, the result need not.

    Returns:
        The result of this rank.

    Communication:
        One `agree` on the texts, after `make`.

    Raises:
        Exception: on every rank, the error that `make` raised on the lowest rank where it failed.
        CollectiveMismatch: the texts differ.
    """
    made: list[T] = []

    def call() -> str:
        one, text = make()
        made.append(one)
        return text

    comm.agree_on(call)
    return made.pop()


@contextmanager
def agreeing_in_turn() -> Iterator[Callable[..., tuple[int, ...]]]:
    """Give a `with` block a function for agreements along several axes of a grid, one by one.

    The error of one rank is raised on all ranks of the grid. It reaches the ranks along the first
    axis, and through each of them the ranks along the next axis.

    Yields:
        A function (comm, call, check=None) to use in place of `comm.agree_on(call, check)`. It
        returns every rank's integer, or () after an error on `comm` or on an earlier communicator.

    Raises:
        At the end of the block, the error that was found last.
    """
    found: Exception | None = None

    def agree_on(
        comm: Any, call: Callable[[], str], check: Callable[[], int | None] | None = None
    ) -> tuple[int, ...]:
        nonlocal found

        def checked() -> int | None:
            if found is not None:
                raise found
            return check() if check else None

        try:
            return tuple(comm.agree_on(call, checked))
        except ERRORS as error:
            found = error
        return ()

    yield agree_on
    if found is not None:
        raise found
