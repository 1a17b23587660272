"""Test messages on the checked communicator: they give what they give in mpi4py, or an error."""

import inspect
import itertools
import time
from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any

import numpy as np
import pytest
from kit.failing import as_two, assert_fails, failure_of
from kit.wrong_calls import STUCK, TOO_LONG, attached
from mpi4py import MPI

from sp_core.testing import messages, requests, spmd
from sp_core.testing.comm import LockstepComm
from sp_core.testing.messages import MESSAGES, PROBES

# ranks that are threads do not have these calls
pytestmark = [pytest.mark.mpi, pytest.mark.usefixtures("soon_stuck")]


SENDS = sorted(
    {*("send", "bsend", "ssend", "isend", "ibsend", "issend"), "Send_init", "Bsend_init"}
    | {*("Send", "Bsend", "Ssend", "Isend", "Ibsend", "Issend", "Ssend_init")}
)
OF_MESSAGE = [f"Message.{name}" for name in ("Probe", "Iprobe", "probe", "iprobe")]
RECEIVES = sorted({"recv", "irecv", "Recv", "Irecv", "Recv_init"} | PROBES)
KINDS, WAYS = ("Wait", "Test", "wait", "test"), ("", "any", "all", "some")


def numbers(comm: Any, n: int = 8) -> np.ndarray[Any, Any]:
    """Return numbers that differ by rank and place."""
    return np.arange(n) + 10.0 * (1 + int(comm.rank))


def ended(made: Any, status: Any) -> object:
    """Complete the request that a call has returned, if it is one. Return the call's result."""
    if isinstance(made, MPI.Prequest):
        made.Start()
    result = made.wait(status) if isinstance(made, MPI.Request) else made
    if isinstance(made, MPI.Prequest):
        made.Free()
    return result


def told(status: Any) -> tuple[int, int, int]:
    """Return source, tag and length that a status names."""
    return status.source, status.tag, status.Get_count(MPI.BYTE)


def received(comm: Any, name: str, source: int, tag: int) -> object:
    """Receive by mpi4py's method `name`. If it is a probe, receive what it finds."""
    into, probed, status = np.zeros(4), MPI.Status(), MPI.Status()
    message: Any = None
    method = name.rpartition(".")[2]
    while method in PROBES and not message:
        ends = {"source": source, "tag": tag, "status": probed}
        if name == method:
            message = getattr(comm, name)(*ends.values())
        elif method.islower():
            message = getattr(MPI.Message, method)(comm, *ends.values())
        else:
            message = getattr(MPI.Message, method)(comm=comm, **ends)
    if isinstance(message, MPI.Message):
        call = message.recv if method.islower() else partial(message.Recv, into)
        result = call(status)
    elif message:
        call = comm.recv if name.islower() else comm.Recv
        result = call(None if name.islower() else into, *told(probed)[:2], status)
    else:
        given = {"status": status} if name in ("recv", "Recv") else {}
        place = [None if name.islower() else into, source, tag]
        result = ended(getattr(comm, name)(*place, **given), status)
    return result, into.tolist(), told(probed), told(status)


def every_form(comm: Any) -> object:
    """Send by every method, and receive by every method: from one or any rank and tag."""
    attached()
    found, peer = {}, 1 - comm.rank
    pairs = [
        (send, receive)
        for send, receive in itertools.product(SENDS, RECEIVES + OF_MESSAGE)
        if send.islower() == receive.rpartition(".")[2].islower()
    ]
    for turn, (send, receive) in enumerate(pairs):
        source, tag = (peer, MPI.ANY_SOURCE)[turn % 2], (turn, MPI.ANY_TAG)[turn // 2 % 2]
        for giver in range(2):
            if comm.rank == giver:
                x = [comm.rank] * turn if send.islower() else numbers(comm, 1 + turn % 3)
                ended(getattr(comm, send)(x, peer, turn), None)
            else:
                found[send, receive] = received(comm, receive, source, tag)
    return found


def both_ways(comm: Any) -> object:
    """Send and receive by one call: both ranks, one or none, or to and from nobody."""
    found, peer, status = [], 1 - comm.rank, MPI.Status()
    for givers, any_source, n in itertools.product([(), (0,), (1,), (0, 1)], [0, 1], [0, 3]):
        dest = peer if comm.rank in givers else MPI.PROC_NULL
        source = (peer, MPI.ANY_SOURCE)[any_source] if peer in givers else MPI.PROC_NULL
        ends, x, into = (
            (source, (5, MPI.ANY_TAG)[any_source], status),
            numbers(comm, n),
            np.zeros(4),
        )
        comm.Sendrecv(x, dest, 5, into, *ends)
        found.append((into.tolist(), told(status)))
        comm.Sendrecv_replace(x, dest, 5, *ends)
        found.append((x.tolist(), told(status)))
        found.append((comm.sendrecv([comm.rank] * n, dest, 5, None, *ends), told(status)))
    return found


def to_nobody(comm: Any) -> object:
    """Send to and receive from nobody by every method, with named arguments and no buffer."""
    found = []
    for name in sorted(MESSAGES | PROBES):
        status = MPI.Status()
        values: dict[str, Any] = dict.fromkeys(("buf", "sendbuf", "recvbuf", "obj", "sendobj"))
        values |= {"dest": MPI.PROC_NULL, "source": MPI.PROC_NULL, "status": status}
        parameters = inspect.signature(getattr(MPI.Intracomm, name)).parameters
        given = {key: value for key, value in values.items() if key in parameters}
        result = ended(getattr(comm, name)(**given), status)
        result = result == MPI.MESSAGE_NO_PROC if isinstance(result, MPI.Message) else result
        found.append((name, result, told(status)))
    return found


def ask(name: str, requests: list[Any], tag: int) -> tuple[bool, Any]:
    """Ask for requests, or for that with a tag. Return whether one is complete, and what is told.

    `name`: mpi4py's method, such as "Waitany". The first request has no tag, the others 0, 1 and 2.
    """
    lists, several = name.endswith(("all", "some")), len(name) > 4
    statuses = [MPI.Status() for _ in range(tag if lists else 1)]
    call = getattr(MPI.Request if several else requests[1 + tag], name)
    given = {"statuses": statuses} if lists else {"status": statuses[0]}
    got = call(*([requests] if several else []), **given)
    flag = got[name.endswith("any")] if isinstance(got, tuple) else got
    done = name[0] in "Ww" or flag not in (False, [])
    assert not (done and several and name.endswith("all")) or len(statuses) == len(requests)
    return done, (got, [*map(told, statuses)])


def asked(comm: Any) -> object:
    """Ask for several requests, of which one is null, while their messages come one by one."""
    found: list[object] = []
    for kind, way, order in itertools.product(KINDS, WAYS, [(1, 2, 0), (2, 0, 1)]):
        into, peer, of_objects = np.zeros((3, 4)), 1 - comm.rank, kind.islower()
        requests = [MPI.REQUEST_NULL] + [
            comm.irecv(None, peer, tag) if of_objects else comm.Irecv(into[tag], peer, tag)
            for tag in range(3)
        ]
        found.append(ask(f"{'test' if of_objects else 'Test'}{way}", requests, 0))  # nothing yet
        for turn, tag in enumerate((*order, 0)):
            comm.Barrier()
            send = comm.isend if of_objects else comm.Isend
            sent = send(numbers(comm, 1 + tag), peer, tag) if turn < 3 else MPI.REQUEST_NULL
            done, what = way == "all" and turn < 2, None
            while not done:
                done, what = ask(f"{kind}{way}", requests, tag)
            found += [(what, into.tolist())] if what else []
            sent.wait()
    return str(found)


def refused(comm: Any) -> object:
    """Make calls that mpi4py refuses; then no message is under way."""
    found, peer, x, into = [], 1 - comm.rank, numbers(comm, 2), np.zeros(2)
    calls: list[Callable[[], object]] = [
        *(partial(getattr(comm, name), x, 99) for name in SENDS),
        *(
            partial(getattr(comm, name), *([] if name in PROBES else [into]), 99)
            for name in RECEIVES
        ),
        *(partial(comm.Send, wrong, peer) for wrong in (None, "text", [x, "zz"], x[::-1])),
        *(partial(comm.Isend, x, peer, tag) for tag in (-5, MPI.ANY_TAG, "tag")),
        *(partial(comm.Irecv, wrong, peer) for wrong in (None, b"only to read", [into, "zz"])),
        *(
            partial(comm.Sendrecv, *ends)
            for ends in ((x, 99, 0, into, peer), (x, peer, 0, into, 99))
        ),
        *(partial(comm.Sendrecv_replace, x, *ends) for ends in ((99, 0, peer), (peer, 0, 99))),
        *(
            partial(comm.Isendrecv, *ends)
            for ends in ((x, 99, 0, into, peer), (x, peer, 0, into, 99))
        ),
        *(partial(call, lambda: None, peer) for call in (comm.send, comm.isend, comm.sendrecv)),
        *(partial(call, wrong=1) for call in (comm.Send, comm.recv, comm.Mprobe, comm.Isendrecv)),
    ]
    for call in calls:
        try:
            call()
        except Exception as error:  # noqa: BLE001  # any, as mpi4py raises
            number = error.Get_error_class() if isinstance(error, MPI.Exception) else 0
            found.append((type(error).__name__, number))
        else:
            found.append(("none", 0))
    comm.Barrier()
    return found, comm.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG)


BODIES = [every_form, both_ways, to_nobody, asked, refused]


@pytest.mark.parametrize("call", BODIES)
@spmd(2)
def test_a_message_is_what_it_is_in_mpi4py(
    comm: Any, monkeypatch: pytest.MonkeyPatch, call: Callable[[Any], object]
) -> None:
    said: list[str] = []
    for module in (messages, requests):
        monkeypatch.setattr(module, "say", said.append)
    assert call(comm) == call(getattr(comm, "_raw", comm))
    unchecked = call is to_nobody and isinstance(comm, LockstepComm)
    assert said == (["Isendrecv", "Isendrecv_replace"] if unchecked else [])


def odd() -> None:
    """Raise an error of the type that errors of MPI have."""
    raise RuntimeError("odd")


class Odd:
    """An object whose receiver raises an error."""

    def __reduce__(self) -> Any:
        return odd, ()


@pytest.mark.parametrize("way", WAYS)
@spmd(2)
def test_an_error_in_an_object_is_its_own(comm: Any, way: str) -> None:
    peer = 1 - comm.rank
    sends, receive = [comm.isend(Odd(), peer)], comm.irecv(None, peer)
    with pytest.raises(RuntimeError, match="odd"):
        getattr(MPI.Request if way else receive, f"wait{way}")(*([[receive]] if way else []))
    MPI.Request.Waitall(sends)


def wait(comm: Any, name: str) -> None:
    """Wait for rank 1 by a method of mpi4py, for ever."""
    x = None if name.islower() else numbers(comm, 2)
    if name in SENDS:
        ended(getattr(comm, name)(x, 1, 3), None)
    elif name in RECEIVES:
        while name not in PROBES or not getattr(comm, name)(1, 3):
            name in PROBES or ended(getattr(comm, name)(x, 1, 3), None)
    else:
        requests = [comm.Irecv(numbers(comm, 2), 1, tag) for tag in (3, 4)]
        one = len(name) == 4
        while True:
            getattr(requests[0] if one else MPI.Request, name)(*([] if one else [requests]))


SEVERAL = [f"{kind}{way}" for kind, way in itertools.product(KINDS, WAYS)]
POLLS = {name for name in (*SEVERAL, *PROBES) if name[0] in "Ii" or name[:4] in ("Test", "test")}
WAITS = [name for name in (*SENDS, *RECEIVES, *SEVERAL) if "bs" not in name.lower()]


def lost(_: Any) -> None:
    raise LookupError("the cause")


@pytest.mark.parametrize("name", WAITS)
def test_a_wait_for_a_message_ends_with_the_rank_that_should_send_it(name: str) -> None:
    test = as_two(lambda comm: wait(comm, name), lost)
    assert_fails(test, "LookupError", "rank 0: stopped: PeerFailed")


@pytest.mark.parametrize("name", [name for name in WAITS if name not in POLLS])
def test_a_wait_for_a_message_that_never_comes_is_told(name: str) -> None:
    test = as_two(lambda comm: wait(comm, name), lambda comm: None)
    waits = "for rank 1 to receive a message" if name in SENDS else "for a message from rank 1"
    others = f" and waits {waits} with tag 4 on comm" if name in SEVERAL and len(name) > 4 else ""
    told = f"rank 0: waits {waits} with tag 3 on comm{others}\n"
    assert_fails(test, "CollectiveMismatch", STUCK, told)


@pytest.mark.parametrize("name", SEVERAL)
def test_a_message_that_is_too_long_is_told_by_whatever_waits_for_it(name: str) -> None:
    def give(comm: Any) -> None:
        MPI.Request.Waitall([comm.Isend(numbers(comm, 3), 0, tag) for tag in (3, 4)])

    test = as_two(lambda comm: wait(comm, name), give)
    waits = "this rank waits for a message from rank 1 with tag 3"
    assert_fails(test, "CollectiveMismatch", TOO_LONG, waits)


@pytest.mark.parametrize("seed", range(8))
def test_a_failed_example_leaves_no_message_and_no_receive(seed: int) -> None:
    draw = Random(seed)
    drawn = [
        [draw.randrange(n) for n in (3, 3, 2, 3, 4, 2, 2)] for _ in range(draw.randrange(1, 9))
    ]

    @spmd(3)
    def wrong(comm: Any) -> None:
        for source, dest, tag, sides, n, any_source, any_tag in drawn:
            if comm.rank == source and sides > 0:
                comm.Isend(numbers(comm, n), dest, tag)
            if comm.rank == dest and sides < 2:
                ends = MPI.ANY_SOURCE if any_source else source, MPI.ANY_TAG if any_tag else tag
                comm.Irecv(numbers(comm, 2), *ends)
        raise LookupError

    @spmd(3)
    def right(comm: Any) -> None:
        comm.Barrier()
        is_clean = not comm.Iprobe()
        comm.Barrier()
        assert is_clean
        into, places = np.zeros(2), [(comm.rank + step) % 3 for step in (1, -1)]
        comm.Sendrecv(numbers(comm, 2), places[0], 0, into, places[1], 0)
        assert into.tolist() == [10 * (1 + places[1]), 10 * (1 + places[1]) + 1]

    assert "LookupError" in failure_of(wrong)
    right()


@pytest.mark.parametrize("name", [name for name in SEVERAL if not name.endswith("all")])
def test_a_message_that_is_there_counts_though_its_sender_has_failed_since(name: str) -> None:
    """Rank 1 sends a first message, but not a second one."""

    def gives(comm: Any) -> None:
        comm.Send(numbers(comm, 2), 0, 3)
        raise LookupError

    def takes(comm: Any) -> None:
        requests = [MPI.REQUEST_NULL, *(comm.Irecv(numbers(comm, 2), 1, tag) for tag in (3, 4))]
        until = time.monotonic() + 0.1
        while time.monotonic() < until:
            comm._raw.Iprobe()  # MPI makes progress
        if ask(name, requests, 0)[0]:
            raise KeyError

    assert_fails(as_two(takes, gives), "KeyError", "rank 0: failed: KeyError")


@pytest.mark.parametrize("name", [*sorted(POLLS & {*SEVERAL}), "Get_status", "get_status"])
@spmd(2)
def test_a_test_of_a_collective_that_a_rank_has_not_begun_waits_for_nobody(
    comm: Any, name: str
) -> None:
    into = np.zeros(2)
    if comm.rank == 1:
        comm.Recv(np.zeros(2), 0)
    request = comm.Iallgather(numbers(comm, 1), into)
    if comm.rank == 0:
        is_status, both = name not in SEVERAL, [MPI.REQUEST_NULL, request]
        is_complete = getattr(request, name)() if is_status else ask(name, both, 0)[0]
        is_active = bool(request)
        comm.Send(np.zeros(2), 1)
        assert (is_complete, is_active) == (False, True)
    while not request.Get_status():
        pass
    assert into.tolist() == [10, 20]
    assert request
    assert request.Test()
    assert not request


@pytest.mark.usefixtures("only_checked")
@spmd(2)
def test_a_send_that_is_cancelled_need_not_be_received(comm: Any) -> None:
    status, peer, into = MPI.Status(), 1 - comm.rank, np.zeros(2)
    status.Set_cancelled(True)  # an MPI library may cancel no send
    comm.Sendrecv(numbers(comm, 2), peer, 0, into, peer, 0)
    request = comm.Isend(numbers(comm, 2), peer)
    request.transfer.end(status)
    comm._raw.Recv(into, peer)  # so the kit knows of no receive
    request.Wait()
