"""`CheckedComm`: an mpi4py communicator whose ranks check that all make the same calls.

`messages` sends and receives, `requests` has the requests, and `lockstep` makes the check.
"""

import functools
import inspect
import itertools
import sys
from abc import ABCMeta
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import numpy as np

from sp_core.errors import RankError
from sp_core.testing.carriers import MpiCarrier, patiently
from sp_core.testing.comm import forwarded
from sp_core.testing.lockstep import Beginning, Call, Lockstep
from sp_core.testing.messages import MESSAGES, PROBES, Messages
from sp_core.testing.outcome import Kind, Mismatched, capture, raise_for_peers
from sp_core.testing.requests import Transfer, begun, install
from sp_core.testing.signatures import Flow, op_of
from sp_core.testing.specs import own_comm
from sp_core.testing.stuck import Family
from sp_core.testing.unchecked import UNCHECKED, say

AGREED = {
    **dict.fromkeys(
        (
            "Dup",
            "Dup_with_info",
            "Clone",
            "Idup",
            "Idup_with_info",
            "Split",
            "Split_type",
            "Create",
        ),
        "",
    ),
    **dict.fromkeys(("Set_info", "neighbor_allgather", "neighbor_alltoall"), ""),
    "Create_cart": "dims periods reorder",
    "Create_graph": "index edges reorder",
    **dict.fromkeys(("Create_dist_graph", "Create_dist_graph_adjacent"), "reorder"),
    "Sub": "remain_dims",
    "Cart_map": "dims periods",
    "Graph_map": "index edges",
}
"""Collectives that are not on buffers, and which of their arguments must be equal on all ranks."""

LOCAL = (
    *(
        "Get_",
        "Is_",
        "is_",
        "Set_attr",
        "Set_name",
        "Set_errhandler",
        "Call_errhandler",
        "Delete_attr",
        "Compare",
        "Abort",
    ),
    *(
        "free",
        "Shift",
        "Attach_buffer",
        "Detach_buffer",
        "Flush_buffer",
        "Iflush_buffer",
        "py2f",
        "toint",
    ),
)
"""Prefixes of the names of calls that a rank may make alone."""


_kept: "list[CheckedComm]" = []
"""Communicators in which messages may still arrive. They are never freed: MPI reuses what is."""


class CheckedComm(Messages):
    """An mpi4py communicator whose ranks check before each collective that all make the same call.

    If the calls differ, every rank raises `CollectiveMismatch` instead of blocking. If a rank has
    failed, the other ranks raise `PeerFailed`. A rank that leaves the `with` block, also by an
    error, tells the other ranks. `sp_core.testing.unchecked.UNCHECKED` lists the calls that are not
    checked; the communicator prints the name of such a call.

    Args:
        raw: the mpi4py intracommunicator that carries the calls; freed by `Free`.
        family: this rank's communicators that end together, which this one joins. Default: a new
            family, with a search for deadlocks.
        name: the communicator's name in error messages.

    Communication:
        Every rank of `raw` constructs it; the constructor splits `raw` once or twice. Before each
        collective one all-gather of about 1 KB per rank. At the end of the block the ranks check
        that all messages sent were received. A wait for a message polls.

    Raises:
        RankError: `raw` is an intercommunicator.
    """

    def __new__(cls, raw: Any = None, family: Family | None = None, name: str = "comm") -> Self:
        install()
        if raw.Is_inter():
            raise RankError(
                "CheckedComm takes no intercommunicator. Pass that of inter.Merge(), or test it "
                "unchecked."
            )
        base: Any = next(kind for kind in type(raw).__mro__ if kind.__module__ == "mpi4py.MPI")
        made: Self = base.__new__(_kind(base), raw)
        made._raw, made._mpi = base(raw), sys.modules[base.__module__]
        made._pickle = made._mpi.pickle
        return made

    def __init__(self, raw: Any, family: Family | None = None, name: str = "comm") -> None:
        self._shadows = [
            self._raw.Split(0, self._raw.rank) for _ in range(2 if family is None else 1)
        ]
        self._carrier = MpiCarrier(
            self._shadows[0], lambda what, ending: self.family.look(self, what, ending=ending)
        )
        self._groups, self._persistent = itertools.count(), itertools.count()
        self._collectives = set[Transfer]()
        super().__init__(
            Lockstep(self._carrier, name), family or Family(MpiCarrier(self._shadows[-1]))
        )

    def __enter__(self) -> Any:  # Any: its methods are those of mpi4py
        self.family.held = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        outcomes = self.family.finish(capture(error))
        self._give_back()
        if error is None and outcomes[self.rank].kind in (Kind.FAIL, Kind.MISMATCH):
            raise Mismatched(outcomes[self.rank].message)
        raise_for_peers(error, outcomes)

    def _make(self, form: str, flow: Flow, args: Sequence[Any], given: Mapping[str, Any]) -> Any:
        made = getattr(self._raw, form)(*args, **given)
        if made is None:
            return None
        number = f"{form} number {next(self._persistent)}" if form.endswith("_init") else ""
        request = begun(made, Transfer(self, number or f"a started {form}"))
        request.memory = args, given  # mpi4py does not keep the buffers of reductions alive
        return request

    def _root_error(self, text: str) -> Exception:
        """Return mpi4py's error for a wrong root, with `text`, as MPI says only "invalid root"."""
        kind = type("RootError", (self._mpi.Exception, ValueError), {"__str__": lambda _: text})
        error: Exception = kind(self._mpi.ERR_ROOT)
        return error

    def _later(self, beginning: Beginning) -> Any:
        request = self._mpi.Request()
        request.beginning = beginning
        return request

    def _agreed(self, name: str, args: Sequence[Any], given: Mapping[str, Any]) -> Any:
        """Make a collective that is not on buffers, after a check that the ranks agree on it.

        The arguments that `AGREED` names must be equal on all ranks.
        """
        call = self._bound(name, args, given)
        if "sendobj" in call:  # raise now for an object that cannot be pickled
            objects = call["sendobj"]
            if name == "neighbor_alltoall":
                objects = self._one_each(name, objects, self._raw.outdegree)
            self._pickle.dumps(objects)
        if name.startswith("Split"):  # raise now for what mpi4py does not take as numbers
            with self._named(name):
                alone = getattr(own_comm(), name)(*args, **given)
            if alone:
                alone.Free()
        if "group" in call:
            if not isinstance(group := call["group"], self._mpi.Group):
                raise TypeError(f"{type(group).__name__} was given as the group; pass an MPI.Group")
            group.Get_size()  # raises for a null group
        values = ((key, call[key]) for key in AGREED[name].split())
        text = ", ".join(
            f"{key}={value if value is None else np.asarray(value).tolist()}"
            for key, value in values
        )
        made = self._enter(
            Call(name, (text,), text=text), lambda: getattr(self._raw, name)(*args, **given)
        )
        # the communicator may be used only when the request is complete
        if name.startswith("Idup"):
            made[1].Wait()
            return self._adopted(made[0], self.children), made[1]
        return self._adopted(made, self.children)

    def _adopted(self, made: Any, counter: Iterator[int]) -> Any:
        """Return the result `made` of a call; replace an intracommunicator by a checked one.

        The kit looks for deadlocks in `self` and the checked communicator together. Its name has
        the next number of `counter`.
        """
        name = f"{self.lockstep.name}.{'' if counter is self.children else 'g'}{next(counter)}"
        if not isinstance(made, self._mpi.Intracomm) or not made:
            return made
        together = counter is self.children and made.size == self.size
        return CheckedComm(
            made, self.family, name if together else made.bcast(f"{name}[{self.rank}]")
        )

    def _unchecked(self, name: str, args: Sequence[Any], given: Mapping[str, Any]) -> Any:
        """Make a call that the ranks do not check, and print its name once."""
        self._allow(Call(name))
        say(name)
        return self._adopted(getattr(self._raw, name)(*args, **given), self._groups)

    def alone(self) -> "CheckedComm":
        """Return a communicator of this rank alone, which needs no other rank."""
        name = f"{self.lockstep.name}.alone[{self.rank}]"
        return CheckedComm(own_comm().Dup(), self.family, name)

    def make_counter(self) -> Any:
        """Return an object whose `take` gives 0, 1, 2, ... to whichever rank asks next.

        Every rank calls this.
        """
        # this imports torch, which other projects may lack
        from sp_core.transport.host import MpiCounter

        self._enter(Call("make_counter"))
        return MpiCounter(self._raw)

    def started(self, transfer: Transfer) -> None:
        """Note that a message or collective has begun; a collective until MPI has completed it."""
        self._requests.append(transfer)
        if not transfer.is_message:
            self._collectives = {x for x in self._collectives if x.request} | {transfer}

    def _free(self) -> None:
        if not self.lockstep.uneven:
            for transfer in self._collectives:  # else Open MPI may crash
                if transfer.request:
                    patiently(transfer.request.Test)
            type(self._raw).Free(self)
        self._give_back()

    def _give_back(self) -> None:
        """Mark this communicator as freed, and free the communicators that its checks use.

        If messages may still arrive, keep it with its buffers (`_kept`).
        """
        self._freed = True
        if self.lockstep.uneven:
            _kept.append(self)
        for shadow in self._shadows:
            shadow.Free()


@functools.cache
def _kind(base: Any) -> Any:
    """Return the class of checked communicators for a class of mpi4py, such as `Cartcomm`.

    It is a subclass of that class and of `CheckedComm`. Each call is made by the method that
    `method_for` names.
    """
    own = {name for name in dir(CheckedComm) if not name.startswith("_")} - AGREED.keys()
    names = {
        name for name, _ in inspect.getmembers(base, callable) if not name.startswith("_")
    } - own
    calls = {name: forwarded(method, name) for name in names if (method := method_for(name))}
    name = "CheckedComm" if base.__name__ == "Intracomm" else f"Checked{base.__name__}"
    return ABCMeta(name, (CheckedComm, base), {"__module__": __name__, **calls})


def method_for(name: str) -> str:
    """Return the name of the method of `CheckedComm` that makes the call `name` of mpi4py.

    Return "" if no other rank need make the call, so that mpi4py's own method is used.
    """
    ways = {
        "_collective": op_of(name),
        "_message": name in MESSAGES,
        "_probe": name in PROBES,
        "_agreed": name in AGREED,
    }
    unchecked = "_unchecked" if name in UNCHECKED or not name.startswith(LOCAL) else ""
    return next((method for method, applies in ways.items() if applies), unchecked)
