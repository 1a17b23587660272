"""What the checked communicator hands on to mpi4py without checking it between ranks, and how it says so."""

from __future__ import annotations

import functools
import sys
from typing import Any

from sp_core.launch.places import here
from sp_core.testing import remarks
from sp_core.testing.comm import LockstepComm

_ENDS = "what it gives connects two groups, and its calls are mpi4py's own"
_FAULTS = "it is there for ranks that die, with which no other rank can agree"
_PARTS = "its partitions are handed over one by one, by no call of a communicator"
_ONE_SIDED = "the target of a one-sided call makes none itself"
UNCHECKED = {
    "Create_group": "only the members of the group call it; what it gives is checked",
    **dict.fromkeys(("Create_intercomm", "Accept", "Connect", "Spawn", "Spawn_multiple"), _ENDS),
    **dict.fromkeys(("Revoke", "Agree", "Iagree", "Shrink", "Ishrink", "Get_failed", "Ack_failed", "Is_revoked"), _FAULTS),
    **dict.fromkeys(("Psend_init", "Precv_init"), _PARTS),
    **dict.fromkeys(("Win.Create", "Win.Allocate", "Win.Allocate_shared", "Win.Create_dynamic"), _ONE_SIDED),
    **dict.fromkeys(
        ("Isendrecv", "Isendrecv_replace"), "MPICH does not say what they have received; the messages of others neither, then"
    ),
    "a message in memory of a kind that only mpi4py knows": "its length is not known, nor what became of the others then",
    "File.Open": "calls on a file do not go through its communicator",
}
"""Names of `MPI.Comm` and its subclasses, and functions that take a communicator, with the reason."""

_said: set[str] = set()


def say(name: str) -> None:
    """Say that a call is not checked between ranks: at once, and at the end of a session; each name once."""
    if name in _said:
        return
    _said.add(name)
    text = f"not checked between ranks: {name}, because {UNCHECKED.get(name, 'this version of the kit does not know it')}"
    remarks.session.notes[text] = None
    print(f"sp_core.testing: {text} (first at {here()})", file=sys.stderr)


class _Replaced(type):
    """The metaclass of a stand-in for a class of mpi4py: objects of the class itself count as objects of the stand-in."""

    def __instancecheck__(cls, instance: object) -> bool:
        base = vars(cls).get("replaced")
        return super().__instancecheck__(instance) if base is None else isinstance(instance, base)


def replacement(base: Any, methods: dict[str, Any], *others: type) -> type:
    """Make a class that stands in for one of mpi4py's, with other methods."""
    for name in ("fromhandle", "fromint", "f2py"):
        methods[name] = classmethod(lambda cls, number, name=name: cls(getattr(base, name)(number)))
    return _Replaced(base.__name__, (base, *others), {**methods, "replaced": base, "__module__": base.__module__})


@functools.cache
def install() -> None:
    """Replace, once in a process, the classes of mpi4py that wait where nothing can wake a rank, or take a communicator."""
    from mpi4py import MPI

    from sp_core.testing.requests import request_classes

    replaced = dict(zip(("Request", "Prequest"), request_classes(MPI.Request, MPI.Prequest), strict=True))
    for base in (MPI.Win, MPI.File):
        names = [name for name in UNCHECKED if name.startswith(f"{base.__name__}.")]
        replaced[base.__name__] = replacement(base, {name.split(".")[1]: _named(base, name) for name in names})
    probes = {"Probe": "Mprobe", "Iprobe": "Improbe", "probe": "mprobe", "iprobe": "improbe"}
    replaced["Message"] = replacement(MPI.Message, {name: _probe(MPI.Message, name, own) for name, own in probes.items()})
    vars(MPI).update(replaced)


def _named(base: Any, name: str) -> Any:
    """Make a class method that says it is not checked where it is given a checked communicator."""

    def call(cls: type, *args: Any, **given: Any) -> Any:
        if any(isinstance(each, LockstepComm) for each in (*args, *given.values())):
            say(name)
        return vars(base)[name.split(".")[1]].__get__(None, cls)(*args, **given)

    return classmethod(call)


def _probe(base: Any, name: str, of_comm: str) -> Any:
    """Make a class method of messages that asks the communicator itself where that is checked."""

    def probe(cls: type, comm: Any, *args: Any, **given: Any) -> Any:
        checked = isinstance(comm, LockstepComm)
        return getattr(comm, of_comm)(*args, **given) if checked else vars(base)[name].__get__(None, cls)(comm, *args, **given)

    return classmethod(probe)
