"""Describe situations that may change a call's result: mesh, transport, ranks that are late."""

import math
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from kit.carriers import carriers
from oracle.ways import CHOICES, offered

import sp_core as sp
from domains.declared import Call, Parts, Subject, Values, spans, values
from sp_core.testing import device

LATE_SECONDS = 0.002
CARRIERS = carriers(part=3000)
CALLS = {"first": 1, "second": 2, "10th": 10, "100th": 100}

SHARING = ("window",) if device().type == "cpu" else ("ipc", "pinned")
"""The transports over memory that the ranks share."""

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
    """Return the domain of transport, algorithm, check, number of the call and lateness.

    `carried` adds CPU transports.
    """
    carriers = [f"carried {name}" for name in carried]
    on_cpu, others = ("window", "auto", "host", "distributed", *carriers), offered(device().type)
    return {
        "(transport)": values(*(on_cpu if device().type == "cpu" else ("auto", *others))),
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
    """Return the axes of the mesh and how many ranks each has."""
    size, axes = drawn["comm.ranks"], AXES[drawn["comm.axes"]]
    if "half" in axes:
        half = 2 if size % 2 == 0 else 1
        return {"half": half, "own": size // half}
    return {axis: size if axis == "own" else 2 if size < 5 else 1 for axis in axes}


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
        is_late = drawn["(lateness)"] == "a rank" and comm.rank == drawn["seed"] % comm.size
        time.sleep(LATE_SECONDS * is_late)
        yield mesh


def group_of(mesh: sp.Mesh, drawn: Values) -> sp.Communicator:
    """Return the communicator of the call; rank numbers vary fastest along its last axis."""
    axes = [axis for axis in AXES[drawn["comm.axes"]] if axis in ("half", "own")]
    axes = axes[::-1] if drawn["comm.axes"] == "product of two, reversed" else axes
    group, place = mesh[tuple(axes)], 0
    for axis in axes:
        place = place * mesh.axes[axis] + mesh[axis].rank
    assert (group.rank, group.size) == (place, math.prod(mesh.axes[axis] for axis in axes))
    return group


def on_mesh(
    name: str,
    factors: Mapping[str, Parts],
    axes: Callable[[Values], dict[str, int]],
    make: Callable[[sp.Mesh, Values], Call],
    *,
    in_folder: bool = False,
    **more: Any,
) -> Subject:
    """Return the subject of a call on a mesh.

    Args:
        name, factors, more: as in `Subject`.
        axes: returns the sizes of the mesh's axes by name, for drawn values.
        make: returns the call. Every rank calls `make`.
        in_folder: whether the drawn values have a new folder, which all ranks share, as "(folder)".
    """

    @contextmanager
    def prepare(comm: Any, drawn: Values) -> Iterator[Call]:
        place = folder_of(comm) if in_folder else nullcontext()
        with place as folder, opened(comm, drawn, axes(drawn)) as mesh:
            yield make(mesh, drawn | {"(folder)": folder})

    return Subject(name, factors, prepare, lambda drawn: math.prod(axes(drawn).values()), **more)


@contextmanager
def folder_of(comm: Any) -> Iterator[Path]:
    """Make a new folder, the same one for all ranks; delete it when all are done."""
    made: Path = comm.bcast(Path(tempfile.mkdtemp()) if comm.rank == 0 else None, root=0)
    try:
        yield made
    finally:
        comm.Barrier()
        if comm.rank == 0:
            shutil.rmtree(made)


def on_group(
    name: str,
    factors: Mapping[str, Parts],
    make: Callable[[sp.Communicator, Values], Call],
    around: Mapping[str, Parts] = SITUATIONS,
    **more: Any,
) -> Subject:
    """Return the subject of a call on a group; other groups of its mesh get different tensors."""

    def on_own(mesh: sp.Mesh, drawn: Values) -> Call:
        group = group_of(mesh, drawn)
        number = 0 if group.size == mesh.size else mesh["other"].rank
        return make(group, drawn | {"seed": drawn["seed"] + 30 * number})

    return on_mesh(name, COMMUNICATOR | dict(factors) | dict(around), lengths, on_own, **more)
