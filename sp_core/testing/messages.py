"""Send and receive on a checked communicator, with every call of mpi4py.

Waits poll outside MPI. Each message is counted, and the counts are compared at the end of an
example.
"""

import functools
import inspect
import operator
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from sp_core.testing.carriers import MpiCarrier, patiently
from sp_core.testing.comm import LockstepComm
from sp_core.testing.lockstep import UNCOUNTED, Call, Message
from sp_core.testing.requests import OBJECT, Transfer, begun, patient
from sp_core.testing.specs import Part, read
from sp_core.testing.unchecked import say

_SYNCHRONOUS = {"Isend": "Issend", "Send_init": "Ssend_init"}
"""Methods of mpi4py, and the synchronous ones that are called in their place.

A synchronous send completes only when its receive has begun, as MPI does with long messages.
"""
MESSAGES = {
    *("send", "bsend", "ssend", "recv", "isend", "ibsend", "issend", "irecv", "sendrecv"),
    *("Send", "Bsend", "Ssend", "Rsend", "Recv", "Isend", "Ibsend", "Issend", "Irsend", "Irecv"),
    *("Send_init", "Bsend_init", "Ssend_init", "Rsend_init", "Recv_init"),
    *("Sendrecv", "Isendrecv", "Sendrecv_replace", "Isendrecv_replace"),
}
"""Names of mpi4py's methods that send or receive."""
PROBES = {"Probe", "Iprobe", "Mprobe", "Improbe", "probe", "iprobe", "mprobe", "improbe"}
"""Names of mpi4py's methods that probe for a message."""
_signature = functools.cache(inspect.signature)


class Messages(LockstepComm):
    """The part of `CheckedComm` that sends and receives. Other ranks need not call its methods.

    A wait raises `PeerFailed` if a rank has left the example by an error, and `CollectiveMismatch`
    if no rank can go on.
    """

    _mpi: Any
    _carrier: MpiCarrier

    def _message(self, name: str, args: Sequence[Any], given: Mapping[str, Any]) -> Any:
        """Make the call `name` of mpi4py, which sends, receives or both, and return its result."""
        call = self._bound(name, args, given)
        _, *values = call.values()
        status = values.pop() if "status" in call else None
        begins = name[0] in "Ii" or name.endswith("_init")
        if name == "recv":
            return self._receive_object([*values, status])
        if "dest" in call and "source" in call:
            return self._begin_both(name, values) if begins else self._both(name, values, status)
        request = self._begin(
            name if begins else f"{'i' if name.islower() else 'I'}{name.lower()}", *values
        )
        return request if begins else request.Wait(status) and None

    def _probe(
        self, name: str, args: Sequence[Any], given: Mapping[str, Any], kind: str = ""
    ) -> Any:
        """Make the call `name` of mpi4py, which probes for a message, and return its result.

        `kind`: type of the elements, if the call takes the message, as Mprobe does.
        """
        _, source, tag, status = self._bound(name, args, given).values()
        test = name if name[0] in "Ii" else f"{'i' if name.islower() else 'I'}{name.lower()}"
        status = status or self._mpi.Status()

        def ask() -> tuple[bool, Any]:
            found = getattr(self._raw, test)(source, tag, status)
            if found and "mprobe" in test.lower():
                waited.end(status)
            return bool(found), found

        waited = self._transfer(None, (kind, source, tag))
        waited.done = False
        if test != name:
            return patient(ask, [waited])
        done, found = ask()
        if not done:
            self.lockstep.waiting(waited.what)
        return found

    def _bound(self, name: str, args: Sequence[Any], given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of a call of mpi4py's method `name`, by parameter, with defaults.

        The result has the unchecked communicator under "self".
        """
        self._allow(Call(name))
        call = _signature(getattr(type(self._raw), name)).bind(self._raw, *args, **given)
        call.apply_defaults()
        return call.arguments

    def _begin(self, name: str, buf: Any, peer: int, tag: int, part: Part | None = None) -> Any:
        """Begin to send or receive, or make a persistent request. Return the request.

        Args:
            name: mpi4py's method, such as "Isend", "irecv" or "Ssend_init".
            buf: buffer specification, or the object to send.
            peer: the rank to send to, or to receive from.
            tag: the message's tag.
            part: size and type of the message, if already known.
        """
        sends = "send" in name.lower()
        if name.islower() and sends:  # as mpi4py does it: the bytes of a pickle
            buf, name = self._pickle.dumps(buf), name.capitalize()
            part = Part(len(buf), OBJECT)
        part = part or self._part(buf)
        kind = OBJECT if name == "irecv" else part.kind
        raw = getattr(self._raw, _SYNCHRONOUS.get(name, name))(buf, peer, tag)
        if kind == UNCOUNTED and peer != self._mpi.PROC_NULL:
            say("a message in memory of a kind that only mpi4py knows")
        sides = ((part, peer, tag), None) if sends else (None, (kind, peer, tag))
        return begun(raw, self._transfer(*sides))

    def _receive_object(self, values: Sequence[Any]) -> Any:
        """Receive a pickled object and return it. `values` are buf, source, tag and status.

        If `buf` is not None, mpi4py warns that it is not needed.
        """
        buf, *source_and_tag, status = values
        if buf is not None:
            self._raw.recv(buf, self._mpi.PROC_NULL)
        return self._probe("mprobe", (*source_and_tag, status), {}, OBJECT).recv(status)

    def _both(self, name: str, values: list[Any], status: Any) -> Any:
        """Send and receive, and wait for both messages. Return a received object, or None.

        `name` is "sendrecv", "Sendrecv" or "Sendrecv_replace"; `values` its arguments without the
        status.
        """
        sent, dest, tag, *taking = values
        if name == "sendrecv":
            request = self._begin("isend", sent, dest, tag)
            received = self._receive_object([*taking, status])
            return request.Wait() and received
        part = None
        if name == "Sendrecv_replace":
            part, taking = self._part(sent), [sent, *taking]
            sent = sent if dest == self._mpi.PROC_NULL else self._packed(sent)
        self._raw.Send_init(sent, dest, tag).Free()  # if mpi4py refuses it, nothing is begun
        received = self._begin("Irecv", *taking)
        self._begin("Isend", sent, dest, tag, part).Wait()
        received.Wait(status)
        return None

    def _packed(self, buf: Any) -> Any:
        """Return a copy of the elements of a buffer, as the specification of a buffer."""
        status, comm = self._mpi.Status(), self._carrier.comm
        request = comm.Isend(buf, self.rank)
        message = comm.Mprobe(self.rank, status=status)
        copy = [bytearray(status.Get_count(self._mpi.BYTE)), self._mpi.PACKED]
        message.Recv(copy)
        request.Wait()
        return copy

    def _begin_both(self, name: str, values: list[Any]) -> Any:
        """Make the call "Isendrecv" or "Isendrecv_replace" of mpi4py, and return the request."""
        raw = getattr(self._raw, name)(*values)
        say(name)
        sides = (self._part(values[0]), *values[1:3]), (UNCOUNTED, *values[-2:])
        return begun(raw, self._transfer(*sides))

    def _transfer(
        self, gives: tuple[Part, int, int] | None, takes: tuple[str, int, int] | None
    ) -> Transfer:
        """Describe a request by the message that it sends and the message that it receives.

        Args:
            gives: size and type, destination and tag of the message sent; None if there is none.
            takes: type, source and tag of the message received; None if there is none.
        """
        message = ends = None
        whats = []
        if gives is not None and gives[1] != self._mpi.PROC_NULL:
            message = Message(self.rank, *gives[1:], *gives[0][:2])
            whats.append(f"waits for rank {gives[1]} to receive a message with tag {gives[2]}")
        if takes is not None and takes[1] != self._mpi.PROC_NULL:
            ends = (takes[1], self.rank, takes[2])
            whats.append(
                f"waits for a message from {'any rank' if takes[1] < 0 else f'rank {takes[1]}'} "
                f"with {'any tag' if takes[2] < 0 else f'tag {takes[2]}'}"
            )
        what = f"{' and '.join(whats) or 'a message to or from nobody'} on {self.lockstep.name}"
        return Transfer(self, what, message, ends, "" if takes is None else takes[0])

    def count_received(self, status: Any, kind: str) -> None:
        """Record a received message, given its status, for the check at the end of the example.

        `kind`: type of the message's elements; UNCOUNTED if the status may be wrong.
        """
        if kind == UNCOUNTED:
            message = Message(-1, self.rank, -1, 0, kind)
        else:
            nbytes = status.Get_count(self._mpi.BYTE)
            message = Message(status.source, self.rank, status.tag, nbytes, kind)
        self.lockstep.received.append(message)

    def _part(self, buf: Any) -> Part:
        """Return the size and element type of a message, given its buffer.

        The type is UNCOUNTED if only mpi4py can read the buffer, or if mpi4py will refuse it.
        """
        try:
            (part,) = read(buf, "", self.size).parts
            return part
        except (ValueError, TypeError, KeyError, BufferError, self._mpi.Exception):
            return Part(0, UNCOUNTED)

    def _clear(self) -> None:
        """Complete all messages of a failed example, so that none reaches the next example.

        Every rank calls this. The ranks exchange lists of their incomplete receives, and each rank
        sends empty messages to the receives that may take them. Then it receives all messages that
        are left.
        """
        last = self._mpi.COMM_WORLD.Get_attr(self._mpi.TAG_UB)
        carrier = MpiCarrier(self._carrier.comm)
        takes = [transfer.takes for transfer in self._requests if transfer.takes]
        awaited = carrier.gather(takes)
        sent = []
        for dest, ends in enumerate(awaited):
            mine = [tag for source, _, tag in ends if self.rank == (dest if source < 0 else source)]
            # a receive from any source may take a message meant for another receive
            sent += [self._raw.Isend(b"", dest, max(tag, 0)) for tag in mine for _ in ends]
        requests = [(transfer.request, transfer.takes) for transfer in self._requests]
        for transfer in [*self._requests]:
            transfer.end(None)  # from now on mpi4py alone completes it
        for request, _ in filter(operator.itemgetter(1), requests):
            with suppress(self._mpi.Exception):  # too long a message
                patiently(request.Test)
        carrier.gather(None)  # wait for all ranks: their receives could take the last messages
        sent += [self._raw.Isend(b"", dest, last) for dest in range(self.size)]
        for source in range(self.size):
            self._take_all(source, last)
        for request in [*sent, *(request for request, _ in requests)]:
            patiently(request.Test)

    def _take_all(self, source: int, last: int) -> None:
        """Receive and drop the messages of rank `source`, up to the one tagged `last`."""
        status = self._mpi.Status()
        while status.tag != last:
            message = patiently(lambda: self._raw.Improbe(source, self._mpi.ANY_TAG, status))
            message.Recv(bytearray(status.Get_count(self._mpi.BYTE)))
