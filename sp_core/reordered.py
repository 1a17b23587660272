"""A communicator over the ranks of another one in another order. It is made in its first use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from sp_core.agreement import Question
from sp_core.communicator import Communicator

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

MADE_LATER = ("_comm", "_owned", "transport", "window", "no_window")


class Reordered(Communicator):
    """The ranks of another communicator, numbered in another order.

    It is made when it is first used, which all its ranks do in the same call. Its agreements go through the other
    communicator, so that ranks which use different orders are told so. Their errors number the ranks as that one does.

    Args:
        other: the communicator, which must be freed after this one.
        order: for each rank its number in `other`.
        name, nodes: as in `Communicator`.
    """

    def __init__(self, other: Communicator, order: Sequence[int], name: str, nodes: Sequence[int]) -> None:
        self._describe(order.index(other.rank), other.size, name, nodes, other.options)
        self._control, self._other, self._order = other._control, other, tuple(order)

    def __getattr__(self, name: str) -> Any:
        if name not in MADE_LATER:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        self._other._agree(f"first use of {self.name}", 0, None)
        comm = cast("Intracomm", self._other._comm.Split(0, self.rank))
        self._open(comm, (comm,))
        return vars(self)[name]

    def ensure_open(self) -> None:
        """Make the communicator in the first call. Do so before a check of the call can fail on some ranks."""
        super().ensure_open()
        if not self.is_made:
            self.__getattr__("transport")

    def _agree(self, call: str, value: int, error: Exception | None) -> tuple[int, ...]:
        told = super()._agree(call, value, error)
        return tuple(told[place] for place in self._order)

    def ask_to_free(self) -> list[Question]:
        """As in the base class. Nothing is sent if it was never used."""
        return super().ask_to_free() if self.is_made else []

    def free(self, *, is_agreed: bool = False) -> None:
        """As in the base class. Nothing is sent if it was never used."""
        if self.is_made:
            super().free(is_agreed=is_agreed)
        self._freed = True
