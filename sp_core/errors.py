"""Define the exceptions: each is a subclass of the builtin that a caller would catch."""

from collections.abc import Sequence
from os.path import commonprefix
from typing import NoReturn, Self

AGREED = "rank_of_agreement"
"""Name of an attribute of errors that all ranks raise. It is true on a rank if another rank prints
the error in full."""
LEFT = "rank {} has left because of an error; read the error that it printed."
"""Text for a rank that waits for another one, which has left."""
MOST_CHARACTERS, MOST_LINES = 1800, 5
"""The most characters of an error text. A longer text is cut to MOST_LINES lines, each
shortened."""


class ShapeError(ValueError):
    """Report sizes that do not fit together: of a tensor, a sharding, a mask or a mesh."""


class DtypeError(TypeError):
    """Report a dtype that the operation cannot take, or two dtypes that must agree and do not."""


class DeviceError(ValueError):
    """Report a tensor that is not on its communicator's device, or a device that is not there."""


class CheckpointError(ValueError):
    """Report a model folder with something missing, broken, or not supported."""


class RankError(RuntimeError):
    """Report a communicator that cannot be used, or an error on another rank."""


class CollectiveMismatch(RankError):
    """Report ranks that called different operations, or one operation with different arguments."""


class PeerFailed(RankError):
    """Report that another rank left the operation with an error, so this rank cannot finish it."""


def short_text(error: BaseException) -> str:
    """Return the first line of an error's text, or the name of its class if it has no text."""
    return str(error).partition("\n")[0] or type(error).__name__


def differences(calls: Sequence[str]) -> str:
    """Return the text of an error that says which ranks make which calls."""
    by_call: dict[str, list[int]] = {}
    for rank, call in enumerate(calls):
        by_call.setdefault(call, []).append(rank)
    lines = joined(
        [(f"  rank {', '.join(map(str, ranks))}: ", call) for call, ranks in by_call.items()]
    )
    head = "the ranks disagree about what to do; nothing was sent. Make these calls equal:"
    return f"{head}\n{lines}"


def joined(told: Sequence[tuple[str, str]]) -> str:
    """Return a text with one line for each (head, text) pair, such as ("rank 3: ", "shape ...").

    If the result would exceed MOST_CHARACTERS, keep MOST_LINES lines. Of a long text, keep the
    beginning and the place where the texts differ, or the end if they do not.
    """
    whole = "\n".join(map("".join, told))
    if len(whole) <= MOST_CHARACTERS:
        return whole
    start = max(len(commonprefix([text for _, text in told])) - 40, 80)  # noqa: RUF071
    lines = [
        (head if len(head) < 40 else f"{head[:34]} ...: ")
        + (text if len(text) < 300 else f"{text[:80]} ... {text[start : start + 180]} ...")
        for head, text in told[:MOST_LINES]
    ]
    more = f"\n  and {len(told) - MOST_LINES} more" * (len(told) > MOST_LINES)
    return "\n".join(lines) + more


def of_all(error: Exception, rank: int) -> Exception:
    """Mark an error that every rank raises, and return it. One rank prints it in full.

    The attribute AGREED is true on the ranks that print one line only: all but rank 0, and for a
    `PeerFailed` all ranks, because the rank that has left prints its own error.
    """
    vars(error)[AGREED] = rank or isinstance(error, PeerFailed)
    return error


class NotCopied:
    """Let copies of a layer share this object: `deepcopy` returns it, `pickle` refuses it."""

    def __deepcopy__(self, memo: object) -> Self:
        return self

    def __reduce__(self) -> NoReturn:
        how = "Save state_dict() of a layer, and make the layer again."
        raise TypeError(f"{self!r} belongs to this run and cannot be pickled. {how}")
