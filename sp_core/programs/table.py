"""List the algorithms of each collective, and look up programs, costs and defaults by name.

`program_of` returns the program of a rank. `check_algorithm`, `usable` and `defaults` handle the
names that callers pass as `algorithm=`.
"""

from collections.abc import Mapping
from functools import lru_cache
from pkgutil import resolve_name

import torch

from sp_core.programs.program import (
    Operation,
    Program,
    Step,
    copy,
    inp,
    out,
    program,
    wide_length,
)
from sp_core.programs.window import in_window

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
"""For each collective and algorithm, "module:function" that makes a rank's program."""

COMMON_ALGORITHMS = ("auto", "mpi", "window")
"""Names that every collective accepts, whether or not it has programs here.

"mpi" is the MPI library's own collective. "window" is shared memory, if the ranks have any. On a
CPU "auto" takes the algorithm that is fastest by the times of the mesh's tuning. Without times, and
on a device, it takes "window" if the communicator has shared memory and MPI cannot read the
tensors (gloo, or a device). Else it takes "mpi": shared memory needs one more copy of a tensor."""

SCHEDULED = {op: tuple(builders) for op, builders in _BUILDERS.items()}
"""For each collective, the algorithms for which this package makes programs of messages."""

ALGORITHMS = {op: (*COMMON_ALGORITHMS, *names) for op, names in SCHEDULED.items()}
"""For each collective, the values that `algorithm=` takes."""

SEGMENTS = 16
"""How many segments a piece (one rank's part of a vector) is cut into.

The messages of a segment overlap with the sums of the segment before. Only the first segment, a
sixteenth of the time, overlaps with nothing.
"""

SEGMENT_BYTES = (1 << 18, 1 << 21)
"""(fewest, most) bytes of a segment. Each segment costs a message; scratch holds a few segments."""

IN_RANK_ORDER = ("pairwise", "window")
"""Algorithms that add in rank order: their sums are bitwise equal to a loop over the ranks."""


def program_of(operation: Operation, algorithm: str) -> Program:
    """Return this rank's program (list of steps) of a collective, without communication.

    The result is cached.

    Args:
        operation: this rank's view of the collective.
        algorithm: "window" for shared memory, or a name in `SCHEDULED[operation.op]`.
    """
    return in_window(operation) if algorithm == "window" else _of_messages(operation, algorithm)


@lru_cache(maxsize=64)
def _of_messages(operation: Operation, algorithm: str) -> Program:
    """Return the program of an algorithm that sends messages.

    On a single rank a collective that reduces (sum, max or min) is a copy of the input.
    """
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
    """Return the algorithms among which "auto" may choose, from `ALGORITHMS[op]`.

    "hierarchical" is among them only if there are several nodes, and one of them has several ranks.

    Args:
        nodes: for each rank the number of its node.
        op: the collective.
        window: whether the ranks share memory.
    """
    possible = {"hierarchical": 1 < len(set(nodes)) < len(nodes), "window": window, "auto": False}
    return tuple(name for name in ALGORITHMS[op] if possible.get(name, True))


def segment_length(count: int, size: int, itemsize: int) -> int:
    """Return how many elements a segment has: the part of a piece that one message carries.

    A vector of `count` elements has one piece per rank. Each piece is cut into `SEGMENTS` segments,
    but a segment has at least `SEGMENT_BYTES[0]` and at most `SEGMENT_BYTES[1]` bytes.

    Args:
        count: elements of the whole vector.
        size: the number of ranks.
        itemsize: bytes per element, at most `SEGMENT_BYTES[0]`.

    Returns:
        Elements, at least 1.
    """
    shortest, longest = SEGMENT_BYTES
    return min(max(count * itemsize // size // SEGMENTS, shortest), longest) // itemsize


def check_algorithm(op: str, algorithm: str) -> None:
    """Raise `ValueError` if the collective `op`, such as "all_gather", has no such algorithm."""
    if algorithm not in ALGORITHMS[op]:
        raise ValueError(
            f"algorithm={algorithm!r} was given for {op}; there are {ALGORITHMS[op]}. "
            "Pass one of them."
        )


def defaults(choice: str | Mapping[str, str]) -> dict[str, str]:
    """Return the algorithm of each collective for calls that pass "auto".

    Args:
        choice: the name of an algorithm, for every collective that has it; the other collectives
            stay with "auto". Or names by collective, as a mapping or as text:
            `"all_reduce=ring,all_gather=bruck"`.

    Returns:
        Name of every collective -> name of an algorithm or "auto".

    Raises:
        ValueError: an unknown collective or algorithm.
        TypeError: `choice` is neither a text nor a mapping.
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


def cost(program: Program, dtype: torch.dtype) -> dict[str, int]:
    """Return what a run sends and holds, as arguments of `sp_core.counters.Count.add`.

    In shared memory, messages are the regions that the rank reads from others. The elements have
    type `dtype`. Scratch memory includes the float32 buffers for sums of half types.
    """
    messages, sent, _ = program.figures
    wide = 2 * torch.float32.itemsize * wide_length(program, dtype)
    scratch = program.scratch * dtype.itemsize + wide
    return {"messages": messages, "bytes_sent": sent * dtype.itemsize, "scratch": scratch}
