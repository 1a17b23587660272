"""Compare the calls of all ranks: a mistake on one rank is an error on all ranks.

A rank's record has 64 bytes: its state, a hash of what it is about to call, one number of its own
(such as the length of its shard), and the beginning of the call. The ranks add up a digest of their
records, four numbers below 2**32. A rank whose digest is the mean of all has the digest of all: the
mean of different ones is among them as rarely as two calls have one hash. Only if the digests
differ are the records gathered, and only after an error the texts. A rank that refuses or leaves
sends its record at once, since the others will gather; a rank that leaves sends no text.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from sp_core import errors, progress
from sp_core.errors import AGREED, CollectiveMismatch, PeerFailed, RankError
from sp_core.observer import observer_of
from sp_core.progress import Progress
from sp_core.transport.base import wait

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

T = TypeVar("T")
_RECORD = struct.Struct("q8sq40s")
RECORD_BYTES = _RECORD.size
MOST_CHARACTERS, MOST_LINES = 1800, 5
"""A message of more characters is cut: to so many lines, each for ranks that gave the same text."""
DIGEST = np.dtype("<u4")
DIGEST_BYTES = 32
"""Four words of a digest, each as an int64, so that no sum is too large."""
ERRORS: tuple[type[Exception], ...] = (
    errors.ShapeError,
    errors.DtypeError,
    errors.DeviceError,
    errors.CheckpointError,
    ValueError,  # after those above that are kinds of it
    TypeError,
    errors.CollectiveMismatch,
    errors.RankError,
)
"""The errors of checks. They travel to other ranks by their index in this tuple."""


def bytes_sent(size: int, equal: bool) -> int:
    """Return the bytes that a rank sends to agree: the digest, and its record unless all are equal.

    The texts of errors are not counted.
    """
    return DIGEST_BYTES * (size > 1) + (0 if equal else RECORD_BYTES * (size - 1))


class State(IntEnum):
    """Say what a rank is about to do.

    It calls, refuses the call, frees the communicator, or leaves it because of an error.
    """

    CALLS = 0
    REFUSES = 1
    FREES = 2
    FAILS = 3


def agree(
    comm: Intracomm,
    call: str,
    value: int = 0,
    error: Exception | None = None,
    under_way: Progress | None = None,
) -> tuple[int, ...]:
    """Compare `call` over the ranks of a communicator.

    Args:
        comm: an mpi4py communicator.
        call: operation and arguments that must be the same on every rank.
        value: a number that may differ.
        error: what this rank found wrong with its own arguments.
        under_way: makes progress while this rank waits; what the rank of this thread has under way
            if not given.

    Returns:
        The `value` of every rank.

    Communication:
        One all-reduce of 32 bytes. If the values differ, or after an error, one all-gather of 64
        bytes per rank; after an error two more, of the texts.

    Raises:
        The error of the lowest rank that has one, on every rank, with the rank in its text;
        `CollectiveMismatch` where the calls differ; `PeerFailed` where a rank has left the
        communicator because of an error.
    """
    question = Question(comm, call, value, error)
    under_way = under_way or progress.of_this_rank()
    if under_way.idle:  # else nothing of ours could make progress inside a wait of MPI
        question.wait()
    else:
        wait(question, under_way.poll)
    return question.answer()


class Question:
    """A comparison over the ranks that has been started; arguments as in `agree`.

    A rank that leaves says so in its state.
    """

    def __init__(
        self,
        comm: Intracomm,
        call: str,
        value: int = 0,
        error: Exception | None = None,
        state: State = State.CALLS,
    ) -> None:
        self._comm, self._call, self._error, self._value = comm, call, error, value
        state = state if error is None else State.REFUSES
        named, beginning = call.encode(), (_text(error) if error else call).encode()
        head = struct.pack("qq", state, value)
        words = np.frombuffer(blake2b(head + named, digest_size=16).digest(), DIGEST)
        digest = blake2b(named, digest_size=8).digest()
        # MPI holds only the addresses of these
        self._mine, self._sum = words.astype(np.int64), np.empty(words.size, np.int64)
        packed = _RECORD.pack(state, digest, value, beginning)
        self._record = np.frombuffer(packed, np.int64)
        self._records: np.ndarray[Any, np.dtype[np.int64]] | None = None
        observer_of(comm).announce_early()
        self.requests = [comm.Iallreduce(self._mine, self._sum)]
        if state != State.CALLS:
            self._gather()

    def _gather(self) -> None:
        self._records = np.empty((self._comm.size, self._record.size), np.int64)
        self.requests.append(self._comm.Iallgather(self._record, self._records.reshape(-1)))

    def _compared(self) -> bool:
        """Gather the records if the digests differ and nobody has begun to.

        Return whether nothing was begun now.
        """
        if self._records is not None:  # the communicator may have been freed since
            return True
        is_equal = bool((self._sum == self._comm.size * self._mine).all())
        if not is_equal:
            self._gather()
        return is_equal

    def test(self) -> bool:
        """Return whether this rank knows what all ranks do."""
        return all(request.Test() for request in self.requests) and self._compared()

    def wait(self) -> None:
        """Wait until this rank knows what all ranks do."""
        self.requests[0].Wait()
        self._compared()
        self.requests[-1].Wait()

    def answer(self) -> tuple[int, ...]:
        """Return and raise as `agree`, once `test` has returned True."""
        records = self._records
        if records is None:
            return (self._value,) * self._comm.size
        states, is_one_call = records[:, 0], bool((records[:, 1] == records[0, 1]).all())
        if (states >= State.FREES).any() and not (is_one_call and (states == State.FREES).all()):
            raise _of_all(_parted(records), self._comm) from self._error
        if (states == State.REFUSES).any() or not is_one_call:
            _raise(self._comm, self._call, self._error, (states == State.REFUSES).tolist())
        return tuple(int(v) for v in records[:, 2])


class Questions:
    """Comparisons on several communicators at once.

    Waiting on one of them does not hide the others.

    Raises:
        As `agree`, in `test`.
    """

    def __init__(self, questions: Sequence[Question]) -> None:
        self._open = list(questions)

    def test(self) -> bool:
        """Return whether all are answered, or raise for one that differs."""
        for question in [question for question in self._open if question.test()]:
            self._open.remove(question)
            try:
                question.answer()
            except RankError:
                progress.of_this_rank().keep(self._open)
                raise
        return not self._open


def _raise(comm: Intracomm, call: str, error: Exception | None, failed: Sequence[bool]) -> None:
    kinds, texts = zip(
        *comm.allgather((_kind(error), call if error is None else _text(error))), strict=True
    )
    if not any(failed):
        raise _of_all(CollectiveMismatch(_differences(texts)), comm)
    first = failed.index(True)
    told = [
        (f"rank {rank}: ", text)
        for rank, text in enumerate(texts)
        if rank == first or (failed[rank] and text != texts[first])
    ]
    raise _of_all(ERRORS[kinds[first]](_lines(told)), comm) from error


def _of_all(error: Exception, comm: Intracomm) -> Exception:
    """Mark an error that every rank raises, so that one prints it for all, or the lost rank."""
    vars(error)[AGREED] = comm.rank or isinstance(error, PeerFailed)
    return error


def _parted(records: np.ndarray[Any, np.dtype[np.int64]]) -> RankError:
    """Make the error if some ranks leave while others call.

    It is made from records alone, so it is the same on every rank.
    """
    beginnings = [record[3:].tobytes().decode(errors="ignore") for record in records]
    texts = [text.rstrip("\0") + "..." * (text[-1:] != "\0") for text in beginnings]
    lines = _lines([(f"  rank {rank}: ", text) for rank, text in enumerate(texts)])
    if (failed := np.flatnonzero(records[:, 0] == State.FAILS)).size:
        return PeerFailed(
            f"rank {failed[0]} has left because of an error; see what it says. Nothing was "
            f"sent.\n{lines}"
        )
    return CollectiveMismatch(
        f"some ranks leave and others do not; nothing was sent. Make these calls equal:\n{lines}"
    )


def _kind(error: Exception | None) -> int:
    """Return the index of an error in ERRORS.

    An unforeseen one becomes the last kind, a RankError, on other ranks.
    """
    return next(
        (place for place, kind in enumerate(ERRORS) if isinstance(error, kind)), len(ERRORS) - 1
    )


def _text(error: Exception) -> str:
    return str(error) if isinstance(error, ERRORS) else f"{type(error).__name__}: {error}"


def _differences(calls: Sequence[str]) -> str:
    by_call: dict[str, list[int]] = {}
    for rank, call in enumerate(calls):
        by_call.setdefault(call, []).append(rank)
    lines = _lines(
        [(f"  rank {', '.join(map(str, ranks))}: ", call) for call, ranks in by_call.items()]
    )
    head = "the ranks disagree about what to do; nothing was sent. Make these calls equal:"
    return f"{head}\n{lines}"


def _lines(told: Sequence[tuple[str, str]]) -> str:
    """Write a line for each head and text.

    Long ones are cut: a text to its beginning and to the place where it differs from the others.
    """
    whole = "\n".join(map("".join, told))
    if len(whole) <= MOST_CHARACTERS:
        return whole
    letters = enumerate(zip(*(text for _, text in told), strict=False))
    start = max(next((place for place, each in letters if len({*each}) > 1), 0) - 40, 80)
    lines = [
        (head if len(head) < 40 else f"{head[:34]} ...: ")
        + (text if len(text) < 300 else f"{text[:80]} ... {text[start : start + 180]} ...")
        for head, text in told[:MOST_LINES]
    ]
    more = [f"  and {len(told) - MOST_LINES} more"] * (len(told) > MOST_LINES)
    return "\n".join([*lines, *more])


def make_alike(comm: Any, make: Callable[[], tuple[T, str]]) -> T:
    """Make something on every rank of a communicator, or raise the error of one rank on all.

    Args:
        comm: of these ranks.
        make: returns what is made, and a text about it that must be the same on every rank.
    """
    made: list[T] = []

    def call() -> str:
        one, text = make()
        made.append(one)
        return text

    comm.agree_on(call)
    return made.pop()


AgreeOn = Callable[..., tuple[int, ...]]


@contextmanager
def agreeing_in_turn() -> Iterator[AgreeOn]:
    """Agree on communicators that are axes of one grid, one after the other.

    What one rank finds wrong reaches its ranks along the first axis, and with each of them all
    ranks along the next.

    Yields:
        A function to call in place of `Communicator.agree_on`: with a communicator, the call and a
        check or none. It returns nothing after an error.

    Raises:
        In the end, what was found last.
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
            told: tuple[int, ...] = comm.agree_on(call, checked)
            return told
        except ERRORS as error:
            found = error
        return ()

    yield agree_on
    if found is not None:
        raise found
