"""Draw the algorithms and transports of tests."""

import os
from collections.abc import Mapping
from typing import Any

from hypothesis import strategies as st

from sp_core.programs import ALGORITHMS
from sp_core.testing import session
from sp_core.transport import MAY_BE_REFUSED, NAMES

Way = Mapping[str, Any]
"""Arguments of a mesh: `transport` and `algorithm`."""

CHOICES = sorted({name for names in ALGORITHMS.values() for name in names})
"""Every algorithm of any collective; a mesh uses it for the collectives that have it."""


def ways() -> st.SearchStrategy[Way]:
    """Draw any transport of the session's kind of device with any algorithm."""
    transports = st.deferred(lambda: st.sampled_from(offered(session.device().type)))
    return st.fixed_dictionaries({"transport": transports, "algorithm": st.sampled_from(CHOICES)})


def offered(kind: str) -> tuple[str, ...]:
    """Return the transport that SP_TRANSPORT names, else all that a kind of device always has.

    On a GPU that ranks share NCCL refuses to work, and few MPI libraries read GPU memory.
    """
    named = os.environ.get("SP_TRANSPORT")
    if named in NAMES[kind]:
        return (named,)
    return tuple(name for name in NAMES[kind] if kind == "cpu" or name not in MAY_BE_REFUSED)
