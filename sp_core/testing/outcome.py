"""How a rank left an example, and what that says about the whole example."""

from __future__ import annotations

import enum
import functools
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType

from sp_core.errors import CollectiveMismatch, PeerFailed
from sp_core.launch.places import owner, short


class Kind(enum.IntEnum):
    """What a rank tells the others: it is about to call, it waits for a message, or it is done, and how."""

    CALL = 0
    WAIT = 1
    OK = 2
    REJECT = 3
    SKIP = 4
    FAIL = 5
    WOKEN = 6
    MISMATCH = 7


DONE = frozenset(Kind) - {Kind.CALL, Kind.WAIT}
QUIET = frozenset({Kind.OK, Kind.REJECT})
_WORDS = {
    Kind.OK: "finished",
    Kind.REJECT: "rejected the example",
    Kind.SKIP: "skipped",
    Kind.WOKEN: "stopped",
    Kind.FAIL: "failed",
}


class Woken(PeerFailed):
    """Raised by the kit in a rank whose peer left the example."""


class Mismatched(CollectiveMismatch):
    """Raised by the kit in every rank of a communicator whose ranks called different things."""


class RankFailure(AssertionError):
    """An example failed on some rank; the text says what every rank did. Subclasses tell one bug from another."""

    rank_failure = True


@dataclass(frozen=True)
class Outcome:
    """How one rank left one example."""

    kind: Kind
    type: str = ""
    message: str = ""
    file: str = ""
    line: int = 0
    traceback: str = ""

    @property
    def place(self) -> str:
        """File and line of the error."""
        return f"{short(self.file)}:{self.line}" if self.file else ""

    def __str__(self) -> str:
        word = _WORDS.get(self.kind, "stopped")
        return f"{word}: {self.type} at {self.place}: {first_line(self.message)}" if self.type else word


FINISHED = Outcome(Kind.OK)


class Catch:
    """A context that keeps whatever its block raises: what a rank raises is for all ranks to judge, not for this one to handle."""

    error: BaseException | None = None

    def __enter__(self) -> Catch:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> bool:
        self.error = error
        return True

    @property
    def outcome(self) -> Outcome:
        """What it raised, as an outcome."""
        return capture(self.error)


def first_line(text: str) -> str:
    """The first line of a text that says something."""
    return next((line.strip() for line in text.splitlines() if line.strip()), "")


def capture(error: BaseException | None) -> Outcome:
    """The outcome of a body that returned (None) or raised."""
    if error is None:
        return FINISHED
    root, kind = _root(error)
    file, line = _origin(root.__traceback__)
    text = _traceback(error)
    return Outcome(kind, _type_name(root), str(root), file, line, text)


def _traceback(error: BaseException) -> str:
    """The traceback without the kit's own frames."""
    shown = traceback.TracebackException.from_exception(error)
    link: traceback.TracebackException | None = shown
    while link is not None:
        link.stack[:] = [frame for frame in link.stack if owner(frame.filename) != "kit"] or link.stack
        link = link.__cause__ or link.__context__
    return "".join(shown.format())


def _root(error: BaseException) -> tuple[BaseException, Kind]:
    """The error to report: cleaning up after an error often raises a second one, which must not hide the first."""
    chain = [error]
    while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None and cause not in chain:
        chain.append(cause)
    ours = [i for i, link in enumerate(chain) if isinstance(link, Woken | Mismatched)]
    if ours and ours[-1] + 1 < len(chain):
        return chain[ours[-1] + 1], Kind.FAIL
    if ours:
        return chain[ours[-1]], Kind.WOKEN if isinstance(chain[ours[-1]], Woken) else Kind.MISMATCH
    return error, _kind(error)


def _kind(error: BaseException) -> Kind:
    name = type(error).__name__
    if name == "UnsatisfiedAssumption":
        return Kind.REJECT
    return Kind.SKIP if name == "Skipped" else Kind.FAIL


def _type_name(error: BaseException) -> str:
    public = next(kind for kind in type(error).__mro__ if kind not in (Woken, Mismatched))
    return public.__name__


def _origin(trace: TracebackType | None) -> tuple[str, int]:
    """File and line of the innermost frame that is not the kit's."""
    frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(trace)]
    outside = [place for place in frames if owner(place[0]) != "kit"]
    return (outside or frames or [("", 0)])[-1]


@functools.cache
def failure_class(type_name: str, file: str, line: int) -> type[RankFailure]:
    """One exception class per origin, because Hypothesis tells bugs apart by class and all are raised from one line here."""
    place = f" at {short(file)}:{line}" if file else ""
    return type(f"RankFailure[{type_name}{place}]", (RankFailure,), {"key": (type_name, file, line)})


def leading(outcomes: Sequence[Outcome]) -> int | None:
    """The rank whose outcome explains the example: the lowest one that failed by itself, else that saw a mismatch."""
    kinds = [outcome.kind for outcome in outcomes]
    return next((kinds.index(kind) for kind in (Kind.FAIL, Kind.MISMATCH, Kind.SKIP, Kind.WOKEN) if kind in kinds), None)


def table(outcomes: Sequence[Outcome]) -> str:
    """One line for each rank."""
    return "\n".join(f"  rank {rank}: {outcome}" for rank, outcome in enumerate(outcomes))


def failure(outcomes: Sequence[Outcome], ranks: Sequence[int] | None = None) -> RankFailure | None:
    """The failure that these outcomes amount to, or None where all finished, all skipped, or one rejected the example.

    Args:
        outcomes: one for each rank of the communicator.
        ranks: the ranks' numbers in the world, where those differ.
    """
    kinds = {outcome.kind for outcome in outcomes}
    lead = leading(outcomes)
    if lead is None or (kinds & {Kind.REJECT, Kind.SKIP} and not kinds & {Kind.FAIL, Kind.MISMATCH} and not _skips_differ(kinds)):
        return None
    worst = outcomes[lead]
    where = "" if ranks is None or list(ranks) == list(range(len(outcomes))) else f" (world ranks {tuple(ranks)})"
    if worst.kind is Kind.SKIP:
        return failure_class("SkipMismatch", "", 0)(f"the ranks disagree about skipping{where}:\n{table(outcomes)}")
    # one class for all mismatches: which of the ranks is at fault, nobody can say
    kind = failure_class(worst.type, "", 0) if worst.kind is Kind.MISMATCH else failure_class(worst.type, worst.file, worst.line)
    head = f"{worst.type} on rank {lead} of {len(outcomes)}{where}: {worst.message}"
    return kind(f"{head}\nwhat each rank did:\n{table(outcomes)}\ntraceback of rank {lead}:\n{worst.traceback.rstrip()}")


def _skips_differ(kinds: set[Kind]) -> bool:
    return Kind.SKIP in kinds and kinds != {Kind.SKIP} and Kind.REJECT not in kinds


def raise_for_peers(error: BaseException | None, outcomes: Sequence[Outcome]) -> None:
    """Raise `PeerFailed` on a rank without an error of its own, where another one has failed."""
    if error is None and any(outcome.kind in DONE - QUIET for outcome in outcomes):
        raise PeerFailed(f"another rank has failed:\n{table(outcomes)}")
