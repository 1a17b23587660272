"""Record how each rank left an example, and judge the whole example by that.

`capture` turns a rank's error into an `Outcome`, and `failure` turns the outcomes of all ranks into
one error.
"""

import enum
import functools
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

from sp_core.errors import CollectiveMismatch, PeerFailed
from sp_core.launch.watch import encoded, owner, short


class Kind(enum.Enum):
    """What a rank tells the other ranks: it is about to make a call, awaits a message, or is done.

    A rank is done in one of six ways. OK: its body returned. REJECT: Hypothesis' `assume` failed.
    SKIP: pytest's skip, xfail or exit. FAIL: an error of its own. WOKEN: it stopped because a peer
    had left. MISMATCH: the ranks made different calls.
    """

    CALL = "is about to make a call"
    WAIT = "waits for a message"
    OK = "finished"
    REJECT = "rejected the example"
    SKIP = "skipped"
    FAIL = "failed"
    WOKEN = "stopped"
    MISMATCH = "stopped by a mismatch"


DONE = frozenset(Kind) - {Kind.CALL, Kind.WAIT}
"""The kinds of ranks that have left the example."""
_KINDS = {
    "hypothesis.errors.UnsatisfiedAssumption": Kind.REJECT,
    "builtins.Skipped": Kind.SKIP,
    "unittest.case.SkipTest": Kind.SKIP,
    "_pytest.outcomes.XFailed": Kind.SKIP,
    "_pytest.outcomes.Exit": Kind.SKIP,
}
"""Kinds by module and name of an error's class; all other errors are failures."""


class Woken(PeerFailed):
    """Raised by sp_core.testing in a rank whose peer left the example by an error."""


class Mismatched(CollectiveMismatch):
    """Raised by sp_core.testing in every rank of a communicator whose calls differ."""


class RankFailure(AssertionError):
    """An example failed on some rank; the text says what every rank did.

    Each origin of an error (class, file and line) has a subclass of its own, so that Hypothesis
    reports different errors apart.
    """


@dataclass(frozen=True)
class Outcome:
    """How one rank left one example.

    Args:
        kind: how the rank left.
        type: class name of its error, "" without one.
        message: text of the error.
        file: path of the source that raised it.
        line: line number in that file.
        traceback: the error's traceback as text.
        replayable: whether the example may run again without checks. It may not if a check has
            raised an error, or a call on which all ranks agreed has.
        reusable: whether later examples may use the communicator.
        returncode: argument of pytest's exit.
    """

    kind: Kind
    type: str = ""
    message: str = ""
    file: str = ""
    line: int = 0
    traceback: str = ""
    replayable: bool = True
    reusable: bool = True
    returncode: int | None = None

    def __str__(self) -> str:
        place = f"{short(self.file)}:{self.line}" if self.file else ""
        error = f": {self.type} at {place}: {first_line(self.message)}" if self.type else ""
        return f"{self.kind.value}{error}"


FINISHED = Outcome(Kind.OK)


def first_line(text: str) -> str:
    """Return the first non-blank line of a text, without spaces around it; "" if there is none."""
    return next((line.strip() for line in text.splitlines() if line.strip()), "")


def capture(error: BaseException | None) -> Outcome:
    """Return the outcome of a body that raised `error`, or that returned (None)."""
    if error is None:
        return FINISHED
    root, kind = _root(error)
    frames = [
        (frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(root.__traceback__)
    ]
    own = [place for place in frames if owner(place[0]) in ("library", "test")]
    file, line = (own or frames or [("", 0)])[-1]
    name = next(kind for kind in type(root).__mro__ if kind not in (Woken, Mismatched)).__name__
    if isinstance(root, RankFailure):
        name, file, line = getattr(root, "key", (name, file, line))
    code = getattr(root, "returncode", None) if kind is Kind.SKIP else None
    return Outcome(kind, name, shown(root, str), file, line, _traceback(error), returncode=code)


def shown(value: object, how: Callable[[object], str] = repr) -> str:
    """Return `how(value)`, or a text that says that it raised an error."""
    try:
        return how(value)
    except Exception:  # noqa: BLE001  # code of the test's author must not end the session
        return f"<{how.__name__}() of {type(value).__name__} failed>"


def outcome_of(body: Callable[[], object]) -> Outcome:
    """Call `body`, and return its outcome. Catch every error: the ranks judge errors together."""
    try:
        body()
    except BaseException as error:  # noqa: BLE001  # the ranks judge it together
        return capture(error)
    return FINISHED


def _traceback(error: BaseException) -> str:
    """Return the traceback as text, without frames of sp_core.testing and sp_core.launch."""
    shown = traceback.TracebackException.from_exception(error)
    link: traceback.TracebackException | None = shown
    while link is not None:
        link.stack[:] = [
            frame for frame in link.stack if owner(frame.filename) != "kit"
        ] or link.stack
        link = link.__cause__ or link.__context__
    return "".join(shown.format())


def _behind(error: BaseException) -> BaseException | None:
    """Return the error behind an error: a `Woken` in a group of these, else cause or context."""
    woken, own = error.split(Woken) if isinstance(error, BaseExceptionGroup) else (None, error)
    return woken.exceptions[0] if woken and not own else error.__cause__ or error.__context__


def _root(error: BaseException) -> tuple[BaseException, Kind]:
    """Return the error to report, and its kind.

    Cleaning up after an error often raises a second error, which must not hide the first. If a
    peer's end stopped this rank, the kind is WOKEN even if the rank was handling its own error.
    So that error is hidden, too, if `finally` waits for a peer whose `assume` rejects the example.
    """
    chain = [error]
    while (behind := _behind(chain[-1])) is not None and behind not in chain:
        chain.append(behind)
    ours = [i for i, link in enumerate(chain) if isinstance(link, Woken | Mismatched)]
    if not ours:
        kind = type(error)
        return error, _KINDS.get(f"{kind.__module__}.{kind.__name__}", Kind.FAIL)
    stop, *own = chain[ours[-1] :]
    if isinstance(stop, Woken):
        return (own or [stop])[0], Kind.WOKEN
    return (own[0], Kind.FAIL) if own else (stop, Kind.MISMATCH)


@functools.cache
def failure_class(type_name: str, file: str, line: int) -> type[RankFailure]:
    """Return the subclass of `RankFailure` for one origin: type of the error, file and line.

    Hypothesis tells bugs apart by class, because all are raised from the same line of this package.
    """
    place = f" at {short(file)}:{line}" if file else ""
    name = encoded(f"RankFailure[{type_name}{place}]").decode()
    return type(name, (RankFailure,), {"key": (type_name, file, line)})


def table(outcomes: Sequence[Outcome]) -> str:
    """Return text with one line for each rank's outcome."""
    return "\n".join(f"  rank {rank}: {outcome}" for rank, outcome in enumerate(outcomes))


def failure(
    outcomes: Sequence[Outcome], ranks: Sequence[int] | None = None, begin: str = ""
) -> RankFailure | None:
    """Return the error with which an example fails, or None.

    None means that all ranks finished, or all skipped, or that a rank rejected the example and none
    failed.

    Args:
        outcomes: one for each rank of the communicator.
        ranks: world ranks of the communicator, for the text; default: 0, 1, 2, ...
        begin: first lines of the text.
    """
    kinds = [outcome.kind for outcome in outcomes]
    found = set(kinds)
    if not found & {Kind.FAIL, Kind.MISMATCH} and (
        Kind.REJECT in found or found in ({Kind.OK}, {Kind.SKIP})
    ):
        return None
    # the lowest rank that failed by itself explains the example, else one that saw a mismatch
    lead = next(
        kinds.index(kind)
        for kind in (Kind.FAIL, Kind.MISMATCH, Kind.SKIP, Kind.WOKEN)
        if kind in kinds
    )
    worst = outcomes[lead]
    where = (
        ""
        if ranks is None or list(ranks) == list(range(len(outcomes)))
        else f" (world ranks {tuple(ranks)})"
    )
    if worst.kind is Kind.SKIP:
        return failure_class("SkipMismatch", "", 0)(
            f"{begin}the ranks disagree about skipping{where}:\n{table(outcomes)}"
        )
    # one class for all mismatches, as no rank can be said to be at fault
    kind = failure_class(
        worst.type, *(("", 0) if worst.kind is Kind.MISMATCH else (worst.file, worst.line))
    )
    head = f"{begin}{worst.type} on rank {lead} of {len(outcomes)}{where}: {worst.message}"
    return kind(
        f"{head}\nwhat each rank did:\n{table(outcomes)}\ntraceback of rank "
        f"{lead}:\n{worst.traceback.rstrip()}"
    )


def leave(outcomes: Sequence[Outcome]) -> None:
    """Leave the test as all ranks did by pytest's skip or xfail, or one by exit if none failed."""
    import pytest  # `run_threads` works without

    __tracebackhide__ = True  # so that pytest names the caller's line
    skips = [outcome for outcome in outcomes if outcome.kind is Kind.SKIP]
    exits = [outcome for outcome in skips if outcome.type == "Exit"]
    failures = {one.type for one in outcomes if one.kind in (Kind.FAIL, Kind.MISMATCH)}
    if exits and failures <= {"PeerFailed"}:  # by which other ranks tell of the exit
        pytest.exit(exits[0].message, returncode=exits[0].returncode)
    if len(skips) == len(outcomes):
        way: Callable[..., NoReturn] = pytest.xfail if skips[0].type == "XFailed" else pytest.skip
        way(skips[0].message)


def raise_for_peers(error: BaseException | None, outcomes: Sequence[Outcome]) -> None:
    """Raise `PeerFailed` if this rank has no error and another failed, stopped or skipped.

    Args:
        error: this rank's error, or None.
        outcomes: the outcomes of all ranks.
    """
    if error is None and any(o.kind not in (Kind.OK, Kind.REJECT) for o in outcomes):
        raise PeerFailed(f"another rank has failed:\n{table(outcomes)}")
