"""Test every call of mpi4py's communicators through the checked communicator.

Each call is known, and ranks whose calls differ get an error on all ranks.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from kit.failing import as_two, assert_told, failure_of
from mpi4py import MPI

from sp_core.testing import ThreadComm, carriers, given, spmd, tier
from sp_core.testing.checked import AGREED, LOCAL, CheckedComm
from sp_core.testing.messages import MESSAGES, PROBES
from sp_core.testing.requests import UNCHECKED
from sp_core.testing.signatures import COLLECTIVES

pytestmark = pytest.mark.ranks  # these laws hold for threads and for MPI

Call = Callable[[Any], object]


@pytest.fixture(autouse=True)
def ranks_that_speak_up_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make waiting ranks report soon, so that deadlocks are found sooner."""
    monkeypatch.setattr(carriers, "AFTER_SECONDS", 0.02)


TOPOLOGIES = ("Cartcomm", "Graphcomm", "Distgraphcomm")


def ways(name: str) -> set[str]:
    """Return the names of all categories of the checked communicator in which a call is."""
    stem = name.removesuffix("_init")
    found = {
        "collective": {stem, stem[1:].capitalize()} & COLLECTIVES.keys(),
        "agreed": name in AGREED,
        "message": name in MESSAGES | PROBES,
        "own": name in vars(CheckedComm)
        or any(name in vars(base) for base in CheckedComm.__mro__[1:-1]),
        "local": name.startswith(LOCAL),
        "unchecked": name in UNCHECKED,
    }
    return {way for way, so in found.items() if so}


OF_THE_CLASS = {
    "Create_errhandler",
    "Create_from_group",
    "Create_keyval",
    "Free_keyval",
    "Get_parent",
    "Join",
    "f2py",
    "fromhandle",
    "fromint",
}


@pytest.mark.parametrize("kind", ["Intracomm", *TOPOLOGIES])
def test_every_call_of_mpi4py_is_known(kind: str) -> None:
    names = {
        name for name in dir(getattr(MPI, kind)) if callable(getattr(getattr(MPI, kind), name))
    }
    treated = {name: ways(name) for name in names - OF_THE_CLASS if not name.startswith("_")}
    assert len(treated) > 150
    assert {name for name, found in treated.items() if not found} == set()
    assert {
        name
        for name, found in treated.items()
        if {"collective", "agreed", "message", "local"} >= found and len(found) > 1
    } == set()


@pytest.mark.parametrize("op", COLLECTIVES)
def test_the_parameters_of_a_collective_are_those_of_mpi4py(op: str) -> None:
    parameters = inspect.signature(getattr(MPI.Cartcomm, op)).parameters
    forms = {name: parameter.annotation for name, parameter in parameters.items() if name != "self"}
    assert list(COLLECTIVES[op]) == list(forms)
    for name, form in COLLECTIVES[op].items():
        assert (
            name not in ("buf", "sendbuf", "recvbuf")
            or f"BufSpec{form}" in forms[name].replace(" |", "").split()
        )
    assert {f"I{op.lower()}", f"{op}_init"} <= set(dir(MPI.Cartcomm))


def arguments(
    op: str, comm: Any, n: int = 2, dtype: str = "f8", root: int = 0, reduction: str = "SUM"
) -> dict[str, Any]:
    """Return valid arguments of a collective, which all ranks may pass."""
    blocks = 2 if op.startswith("Neighbor") else comm.size
    types = [{"f8": MPI.DOUBLE, "i8": MPI.INT64_T}[dtype]] * blocks
    made: dict[str, Any] = {}
    for name, form in COLLECTIVES[op].items():
        whole = np.zeros(n * blocks, dtype)
        buffer = {
            "": whole if (op, name) == ("Reduce_scatter", "sendbuf") else np.zeros(n, dtype),
            "B": whole,
            "V": [whole, [n] * blocks],
            "W": [whole, [n] * blocks, [8 * n * i for i in range(blocks)], types],
        }
        made[name] = {"root": root, "op": getattr(MPI, reduction), "recvcounts": [n] * blocks}.get(
            name, buffer[form]
        )
    return made


DIFFERENT: dict[str, dict[str, Any]] = {
    "count": {"n": 3},
    "datatype": {"dtype": "i8"},
    "root": {"root": 1},
    "reduction": {"reduction": "MAX"},
    "operation": {},
    "nothing": {},
}
"""Changes of one rank's arguments, each valid by itself. "operation" and "nothing" change the call.
"""


def concerns(difference: str, op: str) -> bool:
    """Return whether an operation has the argument that a difference changes."""
    needs = {
        "count": {"buf", "sendbuf"},
        "datatype": {"buf", "sendbuf"},
        "root": {"root"},
        "reduction": {"op"},
    }
    return difference not in needs or bool(needs[difference] & COLLECTIVES[op].keys())


def offered() -> list[str]:
    """Return the collectives that this tier's communicator has: threads or MPI."""
    return [op for op in COLLECTIVES if tier() == "mpi" or hasattr(ThreadComm, op)]


@pytest.mark.parametrize("difference", DIFFERENT)
def test_every_collective_in_which_a_rank_differs_is_reported_on_all(difference: str) -> None:
    for number, op in enumerate(op for op in offered() if concerns(difference, op)):
        forms = [op, f"I{op.lower()}", *([f"{op}_init"] if tier() == "mpi" else [])]
        form = forms[(number + len(difference)) % len(forms)]

        @spmd(2)
        def body(comm: Any, op: str = op, form: str = form) -> None:
            comm = comm.Create_cart([2], [True]) if op.startswith("Neighbor") else comm
            odd, other = comm.rank == 1, "Barrier" if op != "Barrier" else "Allreduce"
            if odd and difference == "operation":
                form, op = other, other
            if not (odd and difference == "nothing"):
                begun = getattr(comm, form)(
                    **arguments(op, comm, **(DIFFERENT[difference] if odd else {}))
                )
                waits = begun is None or begun.Wait()
                assert waits

        text = failure_of(body)
        assert text.startswith("RankFailure[CollectiveMismatch]"), (form, text)


@given(
    nprocs=st.integers(1, 4),
    n=st.integers(0, 3),
    form=st.sampled_from(["", "I", *(["_init"] if tier() == "mpi" else [])]),
    max_examples=12,
)
def test_every_collective_passes_where_all_ranks_do_the_same(comm: Any, n: int, form: str) -> None:
    for op in offered():
        on = comm.Create_cart([comm.size], [True]) if op.startswith("Neighbor") else comm
        name = op + form if form == "_init" else form + (op.lower() if form else op)
        request = getattr(on, name)(**arguments(op, on, n, reduction="MAX"))
        if form == "_init":
            request.Start()
        if form:
            request.Wait()
        if form == "_init":
            request.Free()
        if on is not comm:
            on.Free()


def sent(n: int = 2, dtype: str = "f8") -> np.ndarray[Any, Any]:
    """Return an array to send or to receive into."""
    return np.arange(n, dtype=dtype)


BOTH = ("rank 0: ", "rank 1: ", "test_kit_calls.py:")
STUCK = "every rank waits and none can go on"
TOO_LONG = "the ranks' sizes differ, or messages of one tag came in another order"
NOT_AS_SENT = "not every message sent has been received as it was sent"
INCOMPLETE = (
    "before these were found complete by Test or Wait, or freed: a message to or from nobody"
)
MESSAGES_THAT_DIFFER: dict[str, tuple[str, Call, Call]] = {
    "nobody sends": (STUCK, lambda c: c.Recv(sent(), 1), lambda c: None),
    "nobody receives": (STUCK, lambda c: c.Send(sent(), 1), lambda c: None),
    "both send first": (
        STUCK,
        lambda c: (c.Send(sent(), 1), c.Recv(sent(), 1)),
        lambda c: (c.Send(sent(), 0), c.Recv(sent(), 0)),
    ),
    "both receive first": (STUCK, lambda c: c.Recv(sent(), 1), lambda c: c.Recv(sent(), 0)),
    "another tag": (STUCK, lambda c: c.Send(sent(), 1, 3), lambda c: c.Recv(sent(), 0, 4)),
    "a collective": (STUCK, lambda c: c.Recv(sent(), 1), lambda c: c.Barrier()),
    "only one exchanges": (STUCK, lambda c: c.Sendrecv(sent(), 1, 0, sent(), 1, 0), lambda c: None),
    "another datatype": (
        NOT_AS_SENT,
        lambda c: c.Send(sent(), 1),
        lambda c: c.Recv(sent(2, "i8"), 0),
    ),
    "a message from nobody": (
        INCOMPLETE,
        lambda c: c.Irecv(sent(), MPI.PROC_NULL),
        lambda c: None,
    ),
    "a message to nobody": (INCOMPLETE, lambda c: c.Isend(sent(), MPI.PROC_NULL), lambda c: None),
    "too long": (TOO_LONG, lambda c: c.Send(sent(3), 1), lambda c: c.Recv(sent(2), 0)),
}
ON_PROCESSES: dict[str, tuple[str, Call, Call]] = {
    "no object": (STUCK, lambda c: c.recv(source=1), lambda c: None),
    "nobody sends to anyone": (STUCK, lambda c: c.Recv(sent()), lambda c: None),
    "no message to look at": (STUCK, lambda c: c.Probe(1), lambda c: None),
    "no message to take": (STUCK, lambda c: c.mprobe(), lambda c: None),
    "an object for numbers": (
        NOT_AS_SENT,
        lambda c: c.send(whole(), 1),
        lambda c: c.Recv(np.zeros(100)),
    ),
    "numbers with gaps": (
        NOT_AS_SENT,
        lambda c: c.Send([sent(4), 1, MPI.DOUBLE.Create_vector(2, 1, 2).Commit()], 1),
        lambda c: c.Recv(sent(2, "i8"), 0),
    ),
    "no numbers of another datatype": (
        NOT_AS_SENT,
        lambda c: c.Send([None, 0, MPI.DOUBLE], 1),
        lambda c: c.Recv(sent(2, "i8"), 0),
    ),
    "two of a tag and one of another": (
        STUCK,
        lambda c: crossed(c, 1),
        lambda c: crossed(c, 0),
    ),
    "an unsafe ring": (
        STUCK,
        lambda c: (c.send(0, 1), c.recv(source=1)),
        lambda c: (c.send(1, 0), c.recv(source=0)),
    ),
    "requests": (
        STUCK,
        lambda c: MPI.Request.Waitall([c.Irecv(sent(), 1), c.Isend(sent(), 1)]),
        lambda c: c.Recv(sent(), 0),
    ),
    "a persistent one": (STUCK, lambda c: started(c.Recv_init(sent(), 1)).Wait(), lambda c: None),
    "kept by MPI and lost": (NOT_AS_SENT, lambda c: buffered(c), lambda c: None),
}


def whole() -> bytes:
    """Return an object whose pickle has a multiple of 8 bytes.

    MPICH ends a process that receives a part of a number.
    """
    return next(text for text in map(bytes, range(8, 99)) if len(MPI.pickle.dumps(text)) % 8 == 0)


def crossed(comm: Any, peer: int) -> None:
    """Receive tags 0 and 1, but send tag 0 twice."""
    requests = [comm.Irecv(sent(), peer, 0), comm.Irecv(sent(), peer, 1)]
    comm.Send(sent(), peer, 0)
    comm.Send(sent(), peer, 0)
    MPI.Request.Waitall(requests)


def barriers(*comms: Any) -> None:
    """Wait on one communicator after the other."""
    for comm in comms:
        comm.Barrier()


def started(request: Any) -> Any:
    """Start a persistent request, and return it."""
    request.Start()
    return request


@functools.cache
def attached() -> None:
    """Attach a buffer to MPI for buffered sends, until the process ends."""
    MPI.Attach_buffer(bytearray(1000 + 10 * MPI.BSEND_OVERHEAD))


def buffered(comm: Any) -> None:
    """Send a message to rank 1 with a buffered send."""
    attached()
    comm.Bsend(sent(), 1)


CALLS_THAT_DIFFER: dict[str, tuple[tuple[str, ...] | str, Call, Call]] = {
    "counts": (
        (*BOTH, "recvbuf=[2, 2] x float64", "sendbuf=2 x float64, recvbuf=[3, 2] x float64"),
        lambda c: c.Allgatherv(sent(), [sent(4), [2, 2]]),
        lambda c: c.Allgatherv(sent(), [sent(5), [3, 2]]),
    ),
    "blocking or not": (
        BOTH,
        lambda c: c.Allreduce(sent(), sent()),
        lambda c: c.Iallreduce(sent(), sent()),
    ),
    "all to all": (
        (*BOTH, "rank 1 sends 16 bytes of float64 to rank 0, which does not expect them"),
        lambda c: c.Alltoallv([sent(), [1, 1]], [sent(), [1, 1]]),
        lambda c: c.Alltoallv([sent(3), [2, 1]], [sent(), [1, 1]]),
    ),
    "the order of communicators": (
        (STUCK, "rank 0: Barrier() on comm.0", "rank 1: Barrier() on comm.1"),
        lambda c: barriers(c.Dup(), c.Dup()),
        lambda c: barriers(*[c.Dup(), c.Dup()][::-1]),
    ),
    "an operation outside of MPI": (
        ("rank 0: announce_call(a fence)", "rank 1: announce_call(a copy)"),
        lambda c: c.announce_call("a fence"),
        lambda c: c.announce_call("a copy"),
    ),
    "announcement": (
        (
            "rank 1 sends 16 bytes to rank 0, which does not expect them",
            "rank 0 expects 8 bytes from rank 1, which does not send them",
        ),
        lambda c: c.announce_exchange(recvs=[(1, 8)]),
        lambda c: c.announce_exchange(sends=[(0, 16)]),
    ),
}
"""Texts of the error, the call of rank 0, and the call of rank 1."""
WRONG: dict[str, tuple[str, Call]] = {
    "own counts": (
        "sends itself 16 bytes of float64, but expects 24 of float64",
        lambda c: c.Allgatherv(sent(), [sent(5), [2, 3]]),
    ),
    "short buffer": (
        "the buffer has 24 bytes. Correct the counts (in all 4 elements)",
        lambda c: c.Allgatherv(sent(), [sent(3), [2, 2]]),
    ),
    "strides": ("is not contiguous", lambda c: c.Allreduce(sent(4)[::2], sent())),
    "read-only": (
        "a buffer to receive into is read-only",
        lambda c: c.Bcast(np.broadcast_to(0.0, 1)),
    ),
    "own datatypes": (
        "sends 2 x float64 but receives 2 x int64",
        lambda c: c.Allreduce(sent(), sent(2, "i8")),
    ),
    "aliasing": ("share memory", lambda c: c.Allreduce(*[sent()] * 2)),
    "nothing to gather": ("needs a datatype, got None alone", lambda c: c.Gather(None, sent(4))),
    "no such root": ("root 2 is not one of the 2 ranks", lambda c: c.Bcast(sent(), 2)),
    "no such rank": (
        "rank 5 is not one of the 2 ranks",
        lambda c: c.announce_exchange(sends=[(5, 8)]),
    ),
}
"""Texts of the error, and a call that is wrong by itself."""
if tier() == "mpi":
    WRONG["no displacements"] = (
        "pass counts and displacements, or neither",
        lambda c: c.Alltoallw([sent(), ([1, 1], None), [MPI.DOUBLE] * 2], None),
    )


DIFFERENCES = CALLS_THAT_DIFFER | MESSAGES_THAT_DIFFER | (ON_PROCESSES if tier() == "mpi" else {})


@pytest.mark.parametrize("case", DIFFERENCES)
def test_calls_in_which_ranks_differ_are_reported_on_all(case: str) -> None:
    said, zero, one = DIFFERENCES[case]
    text = as_two(zero, one)
    assert text.startswith("RankFailure[CollectiveMismatch")
    assert_told(text, *([said] if isinstance(said, str) else said))
    assert_clean()


@pytest.mark.parametrize("case", WRONG)
def test_a_rank_that_contradicts_itself_is_told_so_and_the_others_are_woken(case: str) -> None:
    said, wrong = WRONG[case]
    text = as_two(lambda c: c.Barrier(), wrong)
    assert text.startswith(tuple(f"RankFailure[{kind}Error" for kind in ("Value", "Type", "Root")))
    assert_told(text, said, "rank 0: stopped: PeerFailed")


@spmd(2)
def assert_clean(comm: Any) -> None:
    """Check that no message of a failed example arrives in the next one."""
    received = sent()
    comm.Sendrecv(sent() + comm.rank, 1 - comm.rank, 0, received, 1 - comm.rank, 0)
    assert received.tolist() == (sent() + 1 - comm.rank).tolist()
