"""The algorithms of each collective, and the program of a rank by their names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pkgutil import resolve_name

import torch

from sp_core.schedules.program import (
    Operation,
    Program,
    Step,
    copy,
    inp,
    out,
    program,
    wide_length,
)
from sp_core.schedules.window import in_window

_BUILDERS: dict[str, dict[str, str]] = {
    "all_gather": {
        "ring": "ring:all_gather",
        "bruck": "doubling:bruck",
        "recursive_doubling": "doubling:all_gather",
    },
    "reduce_scatter": {
        "ring": "ring:reduce_scatter",
        "segmented_ring": "ring:reduce_scatter",
        "pairwise": "ring:pairwise_reduce_scatter",
    },
    "all_reduce": {
        "ring": "ring:all_reduce",
        "segmented_ring": "ring:all_reduce",
        "recursive_doubling": "doubling:all_reduce",
        "rabenseifner": "doubling:rabenseifner",
        "pairwise": "ring:pairwise_all_reduce",
        "hierarchical": "hierarchical:all_reduce",
    },
    "all_to_all": {"pairwise": "ring:pairwise_all_to_all"},
    "broadcast": {"binomial": "doubling:broadcast"},
    "reduce": {"binomial": "doubling:reduce"},
    "shift": {},
}
"""By collective and algorithm, the module and the function that makes a rank's program."""

LIBRARY = ("auto", "mpi", "window")
"""What every collective offers beside its schedules.

"mpi" is the MPI library's own choice, "window" the memory that the ranks share, where they do;
"auto" takes what constants say is best, without them the window of a communicator that has one,
else the library."""

SCHEDULED = {op: tuple(builders) for op, builders in _BUILDERS.items()}
"""The algorithms that have a schedule, by collective."""

ALGORITHMS = {op: (*LIBRARY, *names) for op, names in SCHEDULED.items()}
"""The values that `algorithm=` takes, by collective."""

SEGMENTS = 16
"""The number of segments of a piece.

Only the first one, a sixteenth of the time, overlaps with nothing.
"""

SEGMENT_BYTES = (1 << 18, 1 << 21)
"""Bytes of the shortest segment and of the longest. Each costs a message; two are scratch."""

IN_RANK_ORDER = ("pairwise", "window")
"""Algorithms whose sums are bitwise those of a loop over the ranks."""


def program_of(operation: Operation, algorithm: str) -> Program:
    """Return what a rank does. A program depends on its operation alone, so it is computed once."""
    return in_window(operation) if algorithm == "window" else _of_messages(operation, algorithm)


@lru_cache(maxsize=64)
def _of_messages(operation: Operation, algorithm: str) -> Program:
    if operation.size == 1 and operation.reduces:
        return program(
            [Step(then=(copy(inp(range(sum(operation.send))), out(range(sum(operation.recv)))),))]
        )
    if algorithm == "ring":
        operation = operation._replace(segment=None)
    made: Program = resolve_name(f"{__package__}.{_BUILDERS[operation.op][algorithm]}")(operation)
    return made


@lru_cache(maxsize=256)
def usable(nodes: tuple[int, ...], op: str, *, window: bool) -> tuple[str, ...]:
    """Return what "auto" may take.

    A hierarchy is there only if there are several nodes, one of them with several ranks.

    Args:
        nodes: by rank, the node that it is on.
        op: the collective.
        window: whether the ranks share memory.
    """
    possible = {"hierarchical": 1 < len(set(nodes)) < len(nodes), "window": window, "auto": False}
    return tuple(name for name in ALGORITHMS[op] if possible.get(name, True))


def segment_length(
    count: int, size: int, itemsize: int, limits: tuple[int, int] = SEGMENT_BYTES
) -> int:
    """Return the elements per segment of a vector of `count` elements on `size` ranks."""
    shortest, longest = limits
    return max(min(max(count * itemsize // size // SEGMENTS, shortest), longest) // itemsize, 1)


def check_algorithm(op: str, algorithm: str) -> None:
    """Raise `ValueError` if a collective does not have that algorithm."""
    if algorithm not in ALGORITHMS[op]:
        raise ValueError(
            f"algorithm={algorithm!r} was given for {op}; there are {ALGORITHMS[op]}. "
            "Pass one of them."
        )


def defaults(choice: str | Mapping[str, str]) -> dict[str, str]:
    """Return the algorithm of each collective for calls that name none.

    Args:
        choice: a name, for every collective that has it (the others stay with "auto"); or names by
            collective, as a mapping or as text, `"all_reduce=ring,all_gather=bruck"`.

    Raises:
        ValueError: an unknown collective or algorithm; TypeError: neither a name nor names.
    """
    if isinstance(choice, str) and "=" in choice:
        pairs = (part.partition("=") for part in choice.split(","))
        choice = {op.strip(): algorithm.strip() for op, _, algorithm in pairs}
    if isinstance(choice, str):
        if not any(choice in names for names in ALGORITHMS.values()):
            known = sorted({name for names in ALGORITHMS.values() for name in names})
            raise ValueError(
                f"algorithm={choice!r} was given; there are {known}. "
                "Pass one of them, or names by collective."
            )
        return {op: choice if choice in names else "auto" for op, names in ALGORITHMS.items()}
    if not isinstance(choice, Mapping):
        raise TypeError(f"algorithm={choice!r} was given; pass a name, or names by collective.")
    for op, algorithm in choice.items():
        if op not in ALGORITHMS:
            raise ValueError(
                f"an algorithm was given for {op!r}; there are {tuple(ALGORITHMS)}. "
                "Name one of them."
            )
        check_algorithm(op, algorithm)
    return dict.fromkeys(ALGORITHMS, "auto") | dict(choice)


@dataclass(frozen=True)
class Cost:
    """The cost of a program for one rank.

    Attributes:
        messages: that it sends; in shared memory, regions that it reads from other ranks.
        bytes_sent: in these.
        largest: bytes of the longest message that it sends or receives.
        steps: in which it sends or receives.
        scratch: bytes of scratch memory, room for sums in float32 included.
    """

    messages: int
    bytes_sent: int
    largest: int
    steps: int
    scratch: int


def cost(program: Program, dtype: torch.dtype) -> Cost:
    """Return what a program costs with elements of `dtype`."""
    messages, sent, largest, steps, _ = program.figures
    scratch = program.scratch * dtype.itemsize + 2 * torch.float32.itemsize * wide_length(
        program, dtype
    )
    return Cost(messages, sent * dtype.itemsize, largest * dtype.itemsize, steps, scratch)
