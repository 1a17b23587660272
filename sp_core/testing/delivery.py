"""What each collective does, written over the contributions of all ranks in one process."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

from sp_core.testing.signatures import Flow, require
from sp_core.testing.specs import Array, Part

_UFUNCS: dict[str, np.ufunc] = {
    "SUM": np.add,
    "PROD": np.multiply,
    "MAX": np.fmax,  # an MPI library may lose a NaN, so this one does
    "MIN": np.fmin,
    "LAND": np.logical_and,
    "LOR": np.logical_or,
    "LXOR": np.logical_xor,
    "BAND": np.bitwise_and,
    "BOR": np.bitwise_or,
    "BXOR": np.bitwise_xor,
}


def contribution(flow: Flow) -> dict[int, Array]:
    """A copy of what a rank gives to each rank; in a reduction all of it to itself."""
    given: dict[int, list[Array]] = {}
    for peer, part in flow.gives:
        given.setdefault(peer, []).append(view(part))
    return {peer: np.concatenate(pieces) for peer, pieces in given.items()}


def deliver(op: str, rank: int, parts: Sequence[dict[int, Array]], flow: Flow) -> None:
    """Write what a rank gets into its buffers."""
    for source, part in flow.takes:
        place = view(part)
        if not flow.reduction:
            place[:] = parts[source][rank].view(place.dtype)
        elif op != "Exscan" or rank:
            result = _reduced(op, rank, parts, flow.reduction)
            counts = flow.equal[-1] or [len(place) if op.startswith("Reduce_scatter") else len(result)] * len(parts)
            require(not op.startswith("Reduce_scatter") or sum(counts) == len(result), f"{len(result)} elements are not {counts}")
            start = sum(counts[:rank]) if op.startswith("Reduce_scatter") else 0
            place[: counts[rank]] = result[start : start + counts[rank]]


def _reduced(op: str, rank: int, parts: Sequence[dict[int, Array]], reduction: str) -> Array:
    """The reduction in rank order, so that it is the same on every run."""
    require(reduction in _UFUNCS, f"ranks that are threads reduce with {', '.join(_UFUNCS)}, not {reduction}")
    members = parts[: {"Scan": rank + 1, "Exscan": rank}.get(op, len(parts))]
    first, *others = [part[index] for index, part in enumerate(members)]
    return functools.reduce(lambda total, each: _UFUNCS[reduction](total, each).astype(total.dtype), others, first)


def view(part: Part) -> Array:
    """The numbers of a part."""
    require(part.view is not None, "ranks that are threads take numbers that lie side by side")
    return np.asarray(part.view)
