"""Carry packets between emulated hosts, late: `python -m ....switch RATE DELAY NAME=ADDRESS...`.

It makes one TUN device for each NAME, says "ready", and forwards what is sent to an ADDRESS. A
packet arrives when one wire for each host and direction would have brought it (`LinkModel`). The
kernel's netem would do this, and is not in every kernel.
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
from typing import NoReturn

from tests.oracle.link import LinkModel

_SET_INTERFACE = 0x400454CA  # TUNSETIFF
_TUN, _NO_HEADER = 0x0001, 0x1000
_SET_TIMER_SLACK = 29  # prctl
LARGEST = 1 << 16
SPIN_SECONDS = 60e-6  # a sleep this short is not kept


def forward(ports: dict[bytes, int], wires: dict[int, LinkModel]) -> NoReturn:
    """Forward packets between open devices.

    Args:
        ports: file descriptor of the device with an address.
        wires: of each device.
    """
    under_way: list[tuple[float, int, int, bytes]] = []
    numbers = itertools.count()
    while True:
        pause = None
        if under_way:
            pause = max(under_way[0][0] - time.monotonic() - SPIN_SECONDS, 0.0)
        for source in select.select(wires, (), (), pause)[0]:
            packet = os.read(source, LARGEST)
            dest = ports.get(packet[16:20]) if packet[0] >> 4 == 4 else None
            if dest is not None:
                left = wires[source].leaves(len(packet))
                due = wires[dest].arrives(left, len(packet))
                heapq.heappush(under_way, (due, next(numbers), dest, packet))
        while under_way and under_way[0][0] <= time.monotonic():
            _, _, dest, packet = heapq.heappop(under_way)
            with contextlib.suppress(OSError):  # down, or its queue is full: as on a real wire
                os.write(dest, packet)


def open_tun(name: str) -> int:
    """Create a TUN device. The kernel removes it when its file descriptor is closed."""
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    fcntl.ioctl(fd, _SET_INTERFACE, struct.pack("16sH22x", name.encode(), _TUN | _NO_HEADER))
    return fd


def main(rate: str, delay: str, *hosts: str) -> None:
    """Forward packets. Arguments: bits per second, seconds, and the hosts."""
    named = dict(host.split("=") for host in hosts)
    ports = {socket.inet_aton(address): open_tun(name) for name, address in named.items()}
    wires = {fd: LinkModel(float(delay), float(rate) / 8) for fd in ports.values()}
    ctypes.CDLL(None).prctl(_SET_TIMER_SLACK, 1, 0, 0, 0)  # nanoseconds that the kernel may be late
    with contextlib.suppress(PermissionError):  # root of a container may lack it
        # a wire does not wait for a core
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    print("ready", flush=True)
    forward(ports, wires)


if __name__ == "__main__":
    main(*sys.argv[1:])
