"""Describe what is no parameter but may change a result: mesh, transport, lateness."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from kit.carriers import carriers
from oracle.ways import CHOICES

import sp_core as sp
from domains.declared import Call, Parts, Subject, Values, spans, values
from sp_core.testing import device

LATE_SECONDS = 0.002
CARRIERS = carriers(part=3000)
CALLS = {"first": 1, "second": 2, "10th": 10, "100th": 100}

AXES = {
    "one": ("own",),
    "slower of two": ("own", "other"),
    "faster of two": ("other", "own"),
    "middle of three": ("other", "own", "third"),
    "product of two": ("half", "own"),
    "product of two, reversed": ("half", "own"),
}
"""The axes of the mesh by part; the call uses "own", or the product of "half" and "own"."""


def situations(*carried: str) -> dict[str, Parts]:
    """Return the domain of what surrounds a call; `carried` names further transports."""
    return {
        "(transport)": values(
            "window", "auto", "host", "distributed", *(f"carried {name}" for name in carried)
        ),
        "(algorithm)": values(*sorted(CHOICES, key=lambda name: name != "auto")),
        "(check)": values("agree", "off"),
        "(call)": values("first", "second", "100th"),
        "(lateness)": values("no rank", "a rank"),
    }


SITUATIONS = situations("host in parts", "staged", "pipelined")
COMMUNICATOR: dict[str, Parts] = {
    "comm.ranks": spans((2, 2), (1, 1), (3, 3), (4, 4), (5, 8), (9, 17)),
    "comm.axes": values(*AXES),
}


def lengths(drawn: Values) -> dict[str, int]:
    """The axes of the mesh and how many ranks each has."""
    size, axes = drawn["comm.ranks"], AXES[drawn["comm.axes"]]
    if "half" in axes:
        half = 2 if size % 2 == 0 else 1
        return {"half": half, "own": size // half}
    return {axis: size if axis == "own" else 2 if size < 5 else 1 for axis in axes}


def ranks(drawn: Values) -> int:
    """How many ranks the whole mesh has."""
    return math.prod(lengths(drawn).values())


@contextmanager
def opened(comm: Any, drawn: Values, axes: dict[str, Any]) -> Iterator[sp.Mesh]:
    """Open a mesh in the situation that was drawn; one rank may come late to the call."""
    named, _, carried = drawn["(transport)"].partition("carried ")
    way: dict[str, Any] = {
        "transport": named or "auto",
        "algorithm": drawn["(algorithm)"],
        "check": drawn["(check)"],
    }
    with sp.Mesh(comm, device=device(), **way, **axes) as mesh:
        if carried:
            for group in mesh._made.values():
                group.transport = CARRIERS[carried](group)
        time.sleep(
            LATE_SECONDS
            if drawn["(lateness)"] == "a rank" and comm.rank == drawn["seed"] % comm.size
            else 0
        )
        yield mesh


def group_of(mesh: sp.Mesh, drawn: Values) -> sp.Communicator:
    """Return the communicator of the call; its last axis numbers ranks fastest."""
    axes = [axis for axis in AXES[drawn["comm.axes"]] if axis in ("half", "own")]
    axes = axes[::-1] if drawn["comm.axes"] == "product of two, reversed" else axes
    group, place = mesh[tuple(axes)], 0
    for axis in axes:
        place = place * mesh.axes[axis] + mesh[axis].rank
    assert (group.rank, group.size) == (place, math.prod(mesh.axes[axis] for axis in axes))
    return group


def on_group(
    name: str,
    factors: Mapping[str, Parts],
    make: Callable[[sp.Communicator, Values], Call],
    around: Mapping[str, Parts] = SITUATIONS,
    **more: Any,
) -> Subject:
    """Return the subject of a call on a group; other groups of its mesh have other numbers."""

    @contextmanager
    def prepare(comm: Any, drawn: Values) -> Iterator[Call]:
        with opened(comm, drawn, lengths(drawn)) as mesh:
            group = group_of(mesh, drawn)
            number = 0 if group.size == mesh.size else mesh["other"].rank
            yield make(group, drawn | {"seed": drawn["seed"] + 30 * number})

    return Subject(name, COMMUNICATOR | dict(factors) | dict(around), prepare, ranks, **more)
