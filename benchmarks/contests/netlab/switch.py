"""Carry packets between emulated hosts, late: `python -m ....switch RATE DELAY NAME=ADDRESS...`.

It makes one TUN device for each NAME, says "ready", and forwards what is sent to an ADDRESS. A
packet of n bits leaves its host when the packets before it have left and n / RATE seconds have
passed, is under way for DELAY seconds, and keeps the receiver's link busy from its first bit to its
last. The kernel's netem would do this, and is not in every kernel. It ends when its standard input
does, which is when whoever started it has ended, however that came about. Nothing but the standard
library is imported.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import heapq
import itertools
import os
import select
import socket
import struct
import sys
import time
from collections.abc import Sequence

_SET_INTERFACE = 0x400454CA  # TUNSETIFF
_TUN, _NO_HEADER = 0x0001, 0x1000
_SET_TIMER_SLACK = 29  # prctl
LARGEST = 1 << 16
AT_ONCE = 16  # packets read from one host before the others have their turn
SPIN_SECONDS = 60e-6  # a sleep this short is not kept


class Wires:
    """When a packet arrives, given all that was sent before. Pure arithmetic.

    Args:
        rate: bytes per second of each host's link, in each direction.
        delay: seconds between hosts.
    """

    def __init__(self, rate: float, delay: float) -> None:
        self._rate, self._delay = rate, delay
        self._out: dict[int, float] = {}  # by host, when its link will be idle
        self._into: dict[int, float] = {}

    def arrival(self, now: float, source: int, dest: int, nbytes: int) -> float:
        """Return the time at which the last bit arrives."""
        takes = nbytes / self._rate
        left = max(self._out.get(source, 0.0), now) + takes
        arrived = max(self._into.get(dest, 0.0), left - takes + self._delay) + takes
        self._out[source], self._into[dest] = left, arrived
        return arrived


class Switch:
    """Forwards packets between open TUN devices.

    Args:
        wires: says when each packet arrives.
        ports: file descriptor of each host's device.
        addresses: of the hosts, four bytes each, in the same order.
    """

    def __init__(self, wires: Wires, ports: Sequence[int], addresses: Sequence[bytes]) -> None:
        self._wires, self._ports = wires, list(ports)
        self._number = {fd: number for number, fd in enumerate(ports)}
        self._host = {address: number for number, address in enumerate(addresses)}
        self._under_way: list[tuple[float, int, int, bytes]] = []
        self._count = itertools.count()

    def run(self, until: int) -> None:
        """Forward until a file descriptor can be read."""
        while True:
            readable, _, _ = select.select([*self._ports, until], (), (), self._pause())
            if until in readable:
                return
            for fd in readable:
                self._accept(fd)
            self._deliver()

    def _pause(self) -> float | None:
        """How long nothing is due."""
        if not self._under_way:
            return None
        due = self._under_way[0][0] - time.monotonic()
        return due - SPIN_SECONDS if due > SPIN_SECONDS else 0.0

    def _accept(self, fd: int) -> None:
        for _ in range(AT_ONCE):
            try:
                packet = os.read(fd, LARGEST)
            except BlockingIOError:
                return
            dest = self._host.get(packet[16:20]) if packet[0] >> 4 == 4 else None
            if dest is not None:
                arrival = self._wires.arrival(time.monotonic(), self._number[fd], dest, len(packet))
                heapq.heappush(self._under_way, (arrival, next(self._count), dest, packet))

    def _deliver(self) -> None:
        now = time.monotonic()
        while self._under_way and self._under_way[0][0] <= now:
            _, _, dest, packet = heapq.heappop(self._under_way)
            try:
                os.write(self._ports[dest], packet)
            except (
                OSError
            ):  # the device is down or its queue full: a packet lost, as on a real wire
                continue


def open_tun(name: str) -> int:
    """Create a TUN device. The kernel removes it when its file descriptor is closed."""
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    fcntl.ioctl(fd, _SET_INTERFACE, struct.pack("16sH22x", name.encode(), _TUN | _NO_HEADER))
    return fd


def main(arguments: Sequence[str]) -> None:
    """Forward packets. Arguments: bits per second, seconds, and the hosts."""
    rate, delay, *hosts = arguments
    named = [host.split("=") for host in hosts]
    ports = [open_tun(name) for name, _ in named]
    ctypes.CDLL(None).prctl(_SET_TIMER_SLACK, 1, 0, 0, 0)  # nanoseconds that the kernel may be late
    with contextlib.suppress(PermissionError):  # root of a container may lack it
        os.sched_setscheduler(
            0, os.SCHED_FIFO, os.sched_param(1)
        )  # a wire does not wait for a core
    switch = Switch(
        Wires(float(rate) / 8, float(delay)),
        ports,
        [socket.inet_aton(address) for _, address in named],
    )
    print("ready", flush=True)
    switch.run(until=sys.stdin.fileno())


if __name__ == "__main__":
    main(sys.argv[1:])
