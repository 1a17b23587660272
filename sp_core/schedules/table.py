"""The algorithms of each collective, and the program of a rank by their names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from importlib import import_module
from typing import Any

from sp_core.schedules.operation import Operation
from sp_core.schedules.program import Program, Step, copy, inp, out, program
from sp_core.schedules.window import in_window


def _module(name: str) -> Any:
    """Import the algorithms of a file when one of them is used."""
    return import_module(f"sp_core.schedules.{name}")


_BUILDERS: dict[str, dict[str, Callable[[Operation], Program]]] = {
    "all_gather": {
        "ring": lambda t: _module("ring").all_gather(t.rank, t.recv),
        "bruck": lambda t: _module("bruck").all_gather(t.rank, t.recv),
        "recursive_doubling": lambda t: _module("recursive").all_gather(t.rank, t.recv),
    },
    "reduce_scatter": {
        "ring": lambda t: _module("ring").reduce_scatter(t.rank, t.send, None),
        "segmented_ring": lambda t: _module("ring").reduce_scatter(t.rank, t.send, t.segment),
        "pairwise": lambda t: _module("pairwise").reduce_scatter(t.rank, t.send, t.segment),
    },
    "all_reduce": {
        "ring": lambda t: _module("ring").all_reduce(t.rank, t.size, t.elements, None),
        "segmented_ring": lambda t: _module("ring").all_reduce(
            t.rank, t.size, t.elements, t.segment
        ),
        "recursive_doubling": lambda t: _module("recursive").all_reduce(t.rank, t.size, t.elements),
        "rabenseifner": lambda t: _module("recursive").rabenseifner(t.rank, t.size, t.elements),
        "pairwise": lambda t: _module("pairwise").all_reduce(t.rank, t.size, t.elements, t.segment),
        "hierarchical": lambda t: _module("hierarchical").all_reduce(
            t.rank, t.size, t.elements, t.nodes
        ),
    },
    "all_to_all": {"pairwise": lambda t: _module("pairwise").all_to_all(t.rank, t.send, t.recv)},
    "broadcast": {
        "binomial": lambda t: _module("binomial").broadcast(t.rank, t.size, t.elements, t.root)
    },
    "reduce": {
        "binomial": lambda t: _module("binomial").reduce(t.rank, t.size, t.elements, t.root)
    },
    "shift": {},
}

LIBRARY = ("auto", "mpi", "window")
"""What every collective offers beside its schedules: "mpi" is the MPI library's own choice, "window" the memory that the ranks
share, where they do; "auto" takes what constants say is best, without them the window of a
communicator that has one, else the library."""

SCHEDULED = {op: tuple(builders) for op, builders in _BUILDERS.items()}
"""The algorithms that have a schedule, by collective."""

ALGORITHMS = {op: (*LIBRARY, *names) for op, names in SCHEDULED.items()}
"""The values that `algorithm=` takes, by collective."""

SEGMENTS = 16
"""The number of segments of a piece. Only the first one, a sixteenth of the time, overlaps with nothing."""

SEGMENT_BYTES = (1 << 18, 1 << 21)
"""Bytes of the shortest segment (each costs a message) and of the longest (two of them are scratch)."""

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
    return _BUILDERS[operation.op][algorithm](operation)


@lru_cache(maxsize=256)
def usable(nodes: tuple[int, ...], op: str, *, window: bool) -> tuple[str, ...]:
    """Return what "auto" may take: a hierarchy only if there are several nodes, one of them with several ranks.

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
    """Return the elements per segment of a vector of `count` elements that `size` ranks share out."""
    shortest, longest = limits
    return max(min(max(count * itemsize // size // SEGMENTS, shortest), longest) // itemsize, 1)


def check_algorithm(op: str, algorithm: str) -> None:
    """Raise `ValueError` if a collective does not have that algorithm."""
    if algorithm not in ALGORITHMS[op]:
        raise ValueError(
            f"algorithm={algorithm!r} was given for {op}; there are {ALGORITHMS[op]}. Pass one of them."
        )


def defaults(choice: str | Mapping[str, str]) -> dict[str, str]:
    """Return the algorithm of each collective for calls that name none.

    Args:
        choice: a name, for every collective that has it (the others stay with "auto"); or names by
            collective, as a mapping or as text, `"all_reduce=ring,all_gather=bruck"`.

    Raises:
        ValueError: an unknown collective or algorithm; TypeError: neither a name nor names.
    """
    if not isinstance(choice, str | Mapping):
        raise TypeError(f"algorithm={choice!r} was given; pass a name, or names by collective.")
    if isinstance(choice, str) and "=" not in choice:
        if not any(choice in names for names in ALGORITHMS.values()):
            known = sorted({name for names in ALGORITHMS.values() for name in names})
            raise ValueError(
                f"algorithm={choice!r} was given; there are {known}. Pass one of them, or names by collective."
            )
        return {op: choice if choice in names else "auto" for op, names in ALGORITHMS.items()}
    if isinstance(choice, str):
        choice = dict(_pair(part) for part in choice.split(","))
    for op, algorithm in choice.items():
        if op not in ALGORITHMS:
            raise ValueError(
                f"an algorithm was given for {op!r}; there are {tuple(ALGORITHMS)}. Name one of them."
            )
        check_algorithm(op, algorithm)
    return dict.fromkeys(ALGORITHMS, "auto") | dict(choice)


def _pair(text: str) -> tuple[str, str]:
    op, _, algorithm = text.partition("=")
    return op.strip(), algorithm.strip()
