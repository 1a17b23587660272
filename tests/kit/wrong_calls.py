"""Calls of two ranks that differ, and calls of one rank that are wrong by themselves."""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from mpi4py import MPI

from sp_core.testing import tier

Call = Callable[[Any], object]


def sent(n: int = 2, dtype: str = "f8") -> np.ndarray[Any, Any]:
    """Return an array to send or to receive into."""
    return np.arange(n, dtype=dtype)


class Copied:
    """An object that NumPy can copy into an array, but that gives no access to memory."""

    def __array__(self, *_: object, **__: object) -> np.ndarray[Any, Any]:
        return sent()


BOTH = ("rank 0: ", "rank 1: ", "wrong_calls.py:")
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
ON_PROCESSES: dict[str, tuple[tuple[str, ...] | str, Call, Call]] = {
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
    "two of a tag and one of another": (
        STUCK,
        lambda c: crossed(c, 1),
        lambda c: crossed(c, 0),
    ),
    "one of two objects": (
        STUCK,
        lambda c: MPI.Request.waitall([c.irecv(source=1, tag=tag) for tag in (3, 4)]),
        lambda c: c.send(0, 0, 3),
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
    "persistent ones in another order": (
        ("rank 0: Start(Bcast_init number ", "rank 1: Start(Bcast_init number "),
        lambda c: started([c.Bcast_init(sent()), c.Bcast_init(sent())][0]),
        lambda c: started([c.Bcast_init(sent()), c.Bcast_init(sent())][1]),
    ),
    "half of an exchange": (
        (STUCK, "rank 0: waits for rank 1 to receive a message"),
        lambda c: c.Isendrecv(sent(), 1, 0, sent(), 1, 0).Wait(),
        lambda c: c.Recv(sent(), 0),
    ),
    "a message and a collective": (
        (STUCK, "rank 0: waits for a message from rank 1 with tag 3 on comm\n"),
        lambda c: MPI.Request.Waitall([c.Ibarrier(), c.Irecv(sent(), 1, 3)]),
        lambda c: c.Ibarrier().Wait(),
    ),
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
    "roots": (
        ("rank 0: Bcast(buf=2 x float64, root=0)", "rank 1: Bcast(buf=2 x float64, root=1)"),
        lambda c: c.Bcast(sent()),
        lambda c: c.Bcast(sent(), 1),
    ),
    "roots of a reduction": (
        ("rank 0: Reduce(2 x float64, op=SUM, root=0)", "op=SUM, root=1)"),
        lambda c: c.Reduce(sent(), sent()),
        lambda c: c.Reduce(sent(), sent(), root=1),
    ),
    "roots of objects": (
        ("rank 0: bcast(root=0) on", "rank 1: bcast(root=1) on"),
        lambda c: c.bcast(0),
        lambda c: c.bcast(0, 1),
    ),
    "operations on objects": (
        ("rank 0: allreduce(op=", "rank 1: allreduce() on"),
        lambda c: c.allreduce(0, MPI.MAX),
        lambda c: c.allreduce(0),
    ),
    "communicators": (
        ("rank 0: Dup() on", "rank 1: Split() on"),
        lambda c: c.Dup(),
        lambda c: c.Split(),
    ),
    "a communicator that one rank frees": (
        ("rank 0: Free() on comm.0", "rank 1: Barrier() on comm.0"),
        lambda c: c.Dup().Free(),
        lambda c: c.Dup().Barrier(),
    ),
    "a counter": (
        ("rank 0: make_counter() on", "rank 1: allgather() on"),
        lambda c: c.make_counter(),
        lambda c: c.allgather(0),
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
    "a scalar": ("a buffer to receive into is read-only", lambda c: c.Bcast(np.float64(0.0))),
    "only a copy": ("a bytes-like object is required", lambda c: c.Bcast(Copied())),
    "byte order": ("no datatype of MPI is >f8", lambda c: c.Bcast(sent(2, ">f8"))),
    "words": ("no datatype of MPI is", lambda c: c.Bcast(np.zeros(2, "S3"))),
    "one of a pair": (
        "(2,) are not a count or counts, and displacements",
        lambda c: c.Bcast([sent(), (2,), MPI.DOUBLE]),
    ),
    "not committed": (
        "nvalid datatype",  # MPICH begins with a capital
        lambda c: c.Bcast([sent(), 1, MPI.DOUBLE.Create_contiguous(2)]),
    ),
    "own datatypes": (
        "sends 2 x float64 but receives 2 x int64",
        lambda c: c.Allreduce(sent(), sent(2, "i8")),
    ),
    "aliasing": ("share memory", lambda c: c.Allreduce(*[sent()] * 2)),
    "nothing to gather": ("needs a datatype, got None alone", lambda c: c.Gather(None, sent(4))),
    "no such root": ("root 2 is not one of the 2 ranks", lambda c: c.Bcast(sent(), 2)),
    "no such root of an object": ("root 9 is not one of the 2 ranks", lambda c: c.bcast(0, 9)),
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
