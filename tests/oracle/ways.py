"""Name the algorithms and transports of tests, and those a long search must have taken."""

from __future__ import annotations

import os
from collections.abc import Mapping
from itertools import product
from typing import Any

from hypothesis import strategies as st

from oracle.collective_cases import DTYPES, SUMS
from sp_core.schedules import ALGORITHMS
from sp_core.testing import session
from sp_core.transport import MAY_BE_REFUSED, NAMES

Way = Mapping[str, Any]
"""Arguments of a mesh: `transport` and `algorithm`."""

CHOICES = sorted({name for names in ALGORITHMS.values() for name in names})
"""Every algorithm of any collective; a mesh uses one where a collective has it."""

MODELS = ("allgather_kv", "hybrid", "llama", "ring", "tp_sp", "ulysses")
"""What runs over many collectives."""

CARRIERS = ("host", "host in parts", "late sends", "link", "pipelined", "staged")
"""What carries the messages of a single collective."""

CALLS = [(op, name) for op, names in ALGORITHMS.items() for name in names if name != "auto"]
"""Every collective with each of its algorithms."""


def ways() -> st.SearchStrategy[Way]:
    """Any transport of the session's kind of device with any algorithm."""
    return st.deferred(lambda: st.sampled_from(every_way(offered(session.device().type))))


def offered(kind: str) -> tuple[str, ...]:
    """Return the transport that SP_TRANSPORT names, else all that a kind of device always has.

    A GPU that ranks share has no NCCL, and few MPI libraries read its memory.
    """
    named = os.environ.get("SP_TRANSPORT")
    if named in NAMES[kind]:
        return (named,)
    return tuple(name for name in NAMES[kind] if kind == "cpu" or name not in MAY_BE_REFUSED)


def every_way(transports: tuple[str, ...]) -> list[Way]:
    """Each of some transports with each algorithm."""
    return [
        {"transport": transport, "algorithm": algorithm}
        for transport, algorithm in product(transports, CHOICES)
    ]


def taken(what: str, way: Way) -> list[str]:
    """The feature of an example that runs something in some way."""
    return [f"{what} by {way['algorithm']} over {way['transport']}"]


def called(op: str, algorithm: str, carrier: str, size: int, dtype: str) -> list[str]:
    """The features of a single collective: what carries its messages, its ranks and its dtype."""
    call = f"{op} by {algorithm}"
    return [f"{call} over {carrier}", f"{call} on {size} ranks", f"{call} in {dtype}"]


def to_be_taken() -> list[str]:
    """Every way on a CPU."""
    return [
        name for what, way in product(MODELS, every_way(NAMES["cpu"])) for name in taken(what, way)
    ]


def refuses(call: str, carrier: str) -> bool:
    """Whether something carries messages only, and this is a collective of the MPI library."""
    return carrier == "link" and call.endswith("mpi")


def to_be_called() -> list[str]:
    """Return every collective by algorithm over every carrier, on 1 to 8 ranks, in any dtype."""
    found = [(f"{op} by {algorithm}", op) for op, algorithm in CALLS]
    carried = [
        f"{call} over {by}" for (call, _), by in product(found, CARRIERS) if not refuses(call, by)
    ]
    sizes = [f"{call} on {size} ranks" for (call, _), size in product(found, range(1, 9))]
    dtypes = [
        f"{call} in {name}"
        for (call, op), name in product(found, DTYPES)
        if name != "bool" or op not in SUMS
    ]
    return [*carried, *sizes, *dtypes]
