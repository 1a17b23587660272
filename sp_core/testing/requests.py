"""Replace mpi4py's requests, so that their waits end if a peer has failed.

mpi4py waits inside MPI, where nothing can wake a rank. `install` replaces `MPI.Request` and
`MPI.Prequest`, once in a process, by subclasses that poll. Requests of communicators without checks
are handed on to mpi4py.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

from sp_core.errors import CollectiveMismatch
from sp_core.testing.carriers import patiently
from sp_core.testing.comm import LockstepComm
from sp_core.testing.lockstep import Beginning, Call, Message
from sp_core.testing.stuck import Ends, turn
from sp_core.testing.unchecked import UNCHECKED, say

OBJECT = "a pickled object"


class Transfer:
    """The message or collective behind a request of a checked communicator.

    Args:
        comm: communicator on which it began.
        what: describes it, for error messages.
        sends: the message that it sends, or None.
        takes: source, destination and tag of the message that it receives, or None; negative
            numbers stand for any.
        kind: type of the received elements.

    Attributes:
        done: whether it has not begun, or is complete.
        request: mpi4py's request while it is under way, which keeps the memory of the message
            alive.
    """

    def __init__(
        self,
        comm: Any,
        what: str,
        sends: Message | None = None,
        takes: tuple[int, int, int] | None = None,
        kind: str = "",
    ) -> None:
        self.comm, self.what, self.sends, self.takes, self.kind = comm, what, sends, takes, kind
        self.done = True
        self.request: Any = None

    def waits(self) -> tuple[int, Ends]:
        """Return the entry of `stuck.Report.awaits` for the message that this one waits for."""
        lockstep = self.comm.lockstep
        sends: Any = self.sends
        ends = self.takes or (sends.source, sends.dest, sends.turn)
        return 0 if self.takes else turn(lockstep.sent, self.sends), (lockstep.name, *ends)

    @property
    def is_message(self) -> bool:
        """Whether it is a message and no collective, so its end depends on another rank's call."""
        return self.sends is not None or self.takes is not None

    def start(self, request: Any) -> None:
        """Note that the transfer has begun."""
        self.done, self.request = False, request
        self.comm.started(self)
        self.comm.lockstep.sent += [] if self.sends is None else [self.sends]

    def end(self, status: Any) -> None:
        """Note that the transfer is complete, with MPI's status or None if that is not known."""
        self.done, self.request = True, None
        if status is not None and status.Is_cancelled():
            self.comm.lockstep.sent = [
                message for message in self.comm.lockstep.sent if message is not self.sends
            ]
        elif status is not None and self.takes is not None:
            self.comm.count_received(status, self.kind)


def begun(raw: Any, transfer: Transfer) -> Any:
    """Return a request like mpi4py's `raw`, whose `Wait` and `Test` also check for deadlocks.

    Add `transfer` to the transfers under way, unless `raw` is persistent and not yet started.
    """
    from mpi4py import MPI

    persistent = isinstance(raw, MPI.Prequest)
    request: Any = (MPI.Prequest if persistent else MPI.Request)(raw)
    request.transfer = transfer
    if not persistent:
        transfer.start(request)
    return request


def _made(request: Any) -> Any:
    """Wait until all ranks have announced the request's collective. Return the request of MPI."""
    beginning: Beginning | None = getattr(request, "beginning", None)
    return request if beginning is None else beginning.settle()


def _made_by_now(request: Any) -> Any:
    """Return the request of MPI, or None if not all ranks have announced its collective."""
    beginning: Beginning | None = getattr(request, "beginning", None)
    return _made(request) if beginning is None or beginning.step() else None


def request_classes(request: Any, persistent: Any) -> dict[str, type]:
    """Return by name the classes that replace `MPI.Request` and `MPI.Prequest`, given these."""

    def start(self: Any) -> None:
        transfer = _under(self)
        if transfer is not None and not transfer.is_message:
            transfer.comm._enter(Call("Start", (transfer.what,), text=transfer.what))
        persistent.Start(self)
        if transfer is not None:
            transfer.start(self)

    def get_status(self: Any, status: Any = None) -> bool:
        made = _made_by_now(self)
        return made is not None and request.Get_status(made, status)

    def is_active(self: Any) -> bool:
        made = _made_by_now(self)
        return made is None or request.__bool__(made)

    def free(self: Any) -> None:
        self = _made(self)
        transfer = _under(self)
        if transfer is not None and not transfer.done:
            status = transfer.comm._mpi.Status()
            transfer.end(status if request.Get_status(self, status) else None)
        request.Free(self)

    def start_all(cls: type, requests: Sequence[Any]) -> None:
        for each in requests:
            each.Start()

    waits = {
        name: _method(request, name)
        for kind in ("Test", "Wait", "test", "wait")
        for name in (kind, f"{kind}any", f"{kind}all", f"{kind}some")
    }
    asks = {"Get_status": get_status, "get_status": get_status, "__bool__": is_active}
    made = replacement(request, {**waits, **asks, "Free": free})
    starts = {"Start": start, "Startall": classmethod(start_all)}
    return {"Request": made, "Prequest": replacement(persistent, starts, made)}


def _under(request: Any) -> Any:
    """Return the `Transfer` of a request, or None."""
    return getattr(request, "transfer", None)


def _may_end(request: Any) -> bool:
    """Return whether MPI may find the request complete: it is made and, if persistent, started."""
    transfer = _under(request)
    return bool(request) and (transfer is None or not transfer.done)


def _method(base: Any, name: str) -> Any:
    """Return the method `name` of requests, such as "Waitall", which polls with mpi4py's tests."""
    from mpi4py import MPI

    test = name.replace("Wait", "Test").replace("wait", "test")
    find = _made_by_now if name == test else _made

    def run(requests: Sequence[Any], target: Any, status: Any) -> Any:
        transfers = [t for t in map(_under, requests) if t is not None and not t.done]
        if not transfers:
            return getattr(base, name)(target, status)
        ask = functools.partial(_ask, base, test, requests, target, _room(test[4:], status))
        if name != test:
            return patient(ask, transfers, test.endswith("all"))
        done, got, _ = ask()
        if not done:
            _hear(transfers)
        return got

    def single(self: Any, status: Any = None) -> Any:
        made = find(self)
        return _nothing(test) if made is None else run([made], made, status)

    def several(
        cls: type, requests: Sequence[Any], status: Any = None, statuses: Any = None
    ) -> Any:
        made = [*map(find, requests)]
        if None in made and (test.endswith("all") or not any(map(_may_end, made))):
            return _nothing(test)
        made = [MPI.REQUEST_NULL if each is None else each for each in made]
        return run(made, made, status if statuses is None else statuses)

    return single if len(test) == 4 else classmethod(several)


def _nothing(test: str) -> Any:
    """Return the result of mpi4py's method `test`, such as "Testany", if no request is complete."""
    from mpi4py import MPI

    capital = {"Test": False, "Testall": False, "Testany": (MPI.UNDEFINED, False), "Testsome": []}
    small: dict[str, Any] = {"testany": (MPI.UNDEFINED, False, None), "testsome": ([], [])}
    return (small | capital).get(test, (False, None))


def _room(several: str, given: Any) -> Any:
    """Return the status, or the list for statuses, that MPI fills: the caller's if there is one.

    `several` is "" for one request, or "any", "all" or "some".
    """
    from mpi4py import MPI

    if several in ("", "any"):
        return given or MPI.Status()
    return given if isinstance(given, list) else list(given or ())


def _ask(
    base: Any, test: str, requests: Sequence[Any], target: Any, status: Any
) -> tuple[bool, Any, Any]:
    """Call a test method of mpi4py once, in place of a wait, and end completed transfers.

    Args:
        base, test: mpi4py's class and the name of its method, such as Testall.
        requests: the requests that are tested.
        target, status: the arguments of the method.

    Returns:
        (whether the wait is over, what the test returned, what the wait would return).
    """
    complete: Sequence[int] = ()
    try:
        got = _tested(base, test, target, status)
        done, answer, complete = _meaning(
            test[4:], got if isinstance(got, tuple) else (got,), len(requests)
        )
    except RuntimeError as error:  # an MPI error; the requests concerned are complete
        from mpi4py import MPI

        complete = [index for index, request in enumerate(requests) if not request]
        taken = [each for each in map(_under, requests) if each is not None and each.takes]
        code = getattr(error, "Get_error_class", int)()  # int: for an error in an object's pickle
        if taken and code in (MPI.ERR_TRUNCATE, MPI.ERR_IN_STATUS):
            for each in taken:
                each.comm.family.stopped = True
            raise CollectiveMismatch(
                "a message is longer than its buffer: the ranks' sizes differ, or messages of one "
                f"tag came in another order; this rank {taken[0].what}"
            ) from error
        raise
    finally:
        for place, index in enumerate(complete):
            if (transfer := _under(requests[index])) is not None and not transfer.done:
                known = [status] if test[4:] in ("", "any") else status[place:]
                transfer.end(next(iter(known), None))
    return done, got, answer


def _tested(base: Any, test: str, requests: Any, status: Any) -> Any:
    """Call a test method of mpi4py, and return its result.

    MPI_Testall of MPICH fails for persistent collectives, although its MPI_Waitall takes them. So
    this reads their state, passes only the other requests to Testall, and completes them last.
    """
    from mpi4py import MPI

    collectives = [
        each
        for each in (requests if test == "Testall" else ())
        if isinstance(each, MPI.Prequest) and not getattr(_under(each), "is_message", True)
    ]
    if not collectives:
        return getattr(base, test)(requests, status)
    others = [MPI.REQUEST_NULL if each in collectives else each for each in requests]
    return (
        all(each.Get_status() for each in collectives)
        and base.Testall(others, status)
        and all(base.Test(each) for each in collectives)
    )


def _meaning(several: str, got: tuple[Any, ...], number: int) -> tuple[bool, Any, Sequence[int]]:
    """Return whether a test was successful, the wait's result, and which requests are complete.

    `got` is the result of the test in mpi4py; `several` as in `_room`.
    """
    if several == "some":
        indices, *messages = got
        return indices != [], got if messages else indices, indices
    if several == "any":
        index, flag, *message = got
        return flag, (index, *message) if message else index, [index] if flag else []
    flag, *messages = got
    return flag, messages[0] if messages else True, range(number) if flag else []


def patient(
    ask: Callable[[], tuple[Any, ...]], transfers: Sequence[Transfer], every: bool = False
) -> Any:
    """Poll until a wait is over; return its result. Raise if a peer failed or no rank can go on.

    Args:
        ask: returns a tuple: first whether the wait is over, last the result.
        transfers: messages and collectives that this rank waits for.
        every: whether this rank waits for all of `transfers`, not for one.
    """

    def ready() -> tuple[Any] | None:
        done, *_, answer = ask()
        if not done:
            _hear(transfers)
        return (answer,) if done else None

    def look() -> None:
        pending = [transfer for transfer in transfers if transfer.is_message]
        if pending and (every or pending == transfers):
            (first, *_), what = pending, " and ".join(each.what for each in pending)
            first.comm.family.look(first.comm, what, pending, every=every)

    (answer,) = patiently(ready, look)
    return answer


def _hear(transfers: Sequence[Transfer]) -> None:
    """Raise `PeerFailed` if a peer has failed while one of these messages is under way."""
    for transfer in transfers:
        if transfer.is_message:
            transfer.comm.lockstep.waiting(transfer.what)


class _Replaced(type):
    """The metaclass of a class that replaces one of mpi4py's.

    `isinstance` accepts objects of the original class as objects of the replacement.
    """

    def __instancecheck__(cls, instance: object) -> bool:
        base = vars(cls).get("replaced")
        return super().__instancecheck__(instance) if base is None else isinstance(instance, base)


def replacement(base: Any, methods: dict[str, Any], *others: type) -> type:
    """Return a subclass of mpi4py's class `base` with other methods, to replace `base`."""
    for name in ("fromhandle", "fromint", "f2py"):
        methods[name] = classmethod(lambda cls, number, name=name: cls(getattr(base, name)(number)))
    return _Replaced(
        base.__name__, (base, *others), {**methods, "replaced": base, "__module__": base.__module__}
    )


@functools.cache
def install() -> None:
    """Replace, once in a process, mpi4py's classes that wait inside MPI or take a communicator."""
    from mpi4py import MPI

    replaced = request_classes(MPI.Request, MPI.Prequest)
    for base in (MPI.Win, MPI.File):
        names = [x.partition(".")[2] for x in UNCHECKED if x.startswith(f"{base.__name__}.")]
        replaced[base.__name__] = replacement(base, {x: _taking(base, x) for x in names})
    probes = {"Probe": "Mprobe", "Iprobe": "Improbe", "probe": "mprobe", "iprobe": "improbe"}
    replaced["Message"] = replacement(
        MPI.Message, {name: _taking(MPI.Message, name, own) for name, own in probes.items()}
    )
    vars(MPI).update(replaced)


def _taking(base: Any, name: str, of_comm: str = "") -> Any:
    """Return a class method that replaces one of mpi4py's which takes a communicator.

    For a checked communicator it calls the communicator's method `of_comm`. Without one it prints
    that the call is unchecked, and calls mpi4py's method.
    """

    def call(cls: type, *args: Any, **given: Any) -> Any:
        checked = [each for each in (*args, *given.values()) if isinstance(each, LockstepComm)]
        if checked and of_comm:
            comm, *_ = checked
            rest = {key: value for key, value in given.items() if value is not comm}
            return getattr(comm, of_comm)(*(x for x in args if x is not comm), **rest)
        if checked:
            say(f"{base.__name__}.{name}")
        return vars(base)[name].__get__(None, cls)(*args, **given)

    return classmethod(call)
