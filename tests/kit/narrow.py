"""A communicator that refuses buffers above some number of elements, as MPI refuses 2^31."""

from collections.abc import Callable
from typing import Any, cast

import numpy as np

from sp_core.observer import observer_of
from sp_core.transport.host import HostTransport


class Narrow:
    """Passes calls on to another communicator, if no buffer has more than `most` elements."""

    def __init__(self, comm: Any, most: int) -> None:
        self._comm = comm
        self._most = most

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._comm, name)
        return self._checked(found) if callable(found) else found

    def _checked(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            for argument in arguments:
                buffer = (
                    argument[0] if isinstance(argument, list | tuple) and argument else argument
                )
                if isinstance(buffer, np.ndarray) and buffer.size > self._most:
                    raise OverflowError(
                        f"{buffer.size} elements were given to {method.__name__}; {self._most} can "
                        "be counted"
                    )
            return method(*arguments, **named)

        return call


observer_of.register(Narrow, lambda narrow: observer_of(narrow._comm))


def narrow_transport(raw: Any, most: int) -> HostTransport:
    """Return a transport that cuts messages into parts of at most `most` elements.

    Its communicator refuses longer buffers, but takes at least one element for each rank.
    """
    return HostTransport(cast("Any", Narrow(raw, max(most, raw.size))), max_count=most)
