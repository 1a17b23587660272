"""Run a command on emulated hosts: `python -m ....hosts COUNT RATE DELAY COMMAND...` behind ALONE.

Every host is a network namespace with an address; the command runs on the first one. ALONE gives
the program mounts and processes of its own. Nobody else sees these hosts, and the kernel removes
them with the last process, however that ended. Without delay all hosts hang on one bridge, by pairs
of virtual interfaces shaped on both ends:

    host h0  eth0 ==shaped== p0  |
    host h1  eth0 ==shaped== p1  |  bridge br0, in the namespace of the switch
    host h2  eth0 ==shaped== p2  |

With a delay each eth0 is a TUN device, and a process carries the packets from one to the other:
`python -m ....hosts switch RATE DELAY NAME=ADDRESS...`. The kernel's netem could do this, but not
every kernel has it. A packet arrives when one wire for each host and direction would have brought
it (`LinkModel`).
"""

import contextlib
import ctypes
import fcntl
import heapq
import itertools
import os
import select
import shlex
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

ALONE = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
AGENT = Path(__file__).with_name("agent.sh")
BURST = "128kb"
"""Size of the token bucket: a millisecond at 1 Gbit/s, less than 1 % of a message of 16 MiB."""

QUEUE = "20ms"
"""The longest wait of a packet for the bucket, which drops later ones like a switch's buffer."""

MTU = 16000
"""Largest packet of a TUN device in bytes. A Python program carries each, so they should be few."""

_SET_INTERFACE = 0x400454CA  # TUNSETIFF
_TUN, _NO_HEADER = 0x0001, 0x1000
_SET_TIMER_SLACK = 29  # prctl
LARGEST = 1 << 16
SPIN_SECONDS = 60e-6  # a sleep this short would last too long, so the program polls


def names(count: int) -> dict[str, str]:
    """Return the addresses of hosts by their names."""
    return {f"h{number}": f"10.77.0.{number + 1}" for number in range(count)}


def commands(addresses: Mapping[str, str], rate: float, delay: float) -> list[str]:
    """Return the commands that connect the hosts; with a delay the switch must run before.

    Args:
        addresses: the hosts' addresses by name.
        rate: bits per second of the link of each host, in each direction.
        delay: seconds from one host to another, apart from the time that the bits take.
    """
    shape = f"root tbf rate {rate:.0f}bit burst {BURST} latency {QUEUE}"
    found = [] if delay else ["ip -n switch link add br0 type bridge"]
    for host, address in addresses.items():
        port = host.replace("h", "p")
        carried = (
            f"ip -n switch link set {port} netns {host} name eth0",
            f"ip -n {host} link set eth0 mtu {MTU} txqueuelen 2000",
        )
        shaped = (
            f"ip -n {host} link add eth0 type veth peer name {port} netns switch",
            f"ip -n switch link set {port} master br0 up",
            f"tc -n {host} qdisc add dev eth0 {shape}",
            f"tc -n switch qdisc add dev {port} {shape}",
        )
        found += [f"ip netns add {host}", *(carried if delay else shaped)]
        found.append(f"ip -n {host} addr add {address}/24 dev eth0")
        found += [f"ip -n {host} link set {device} up" for device in ("lo", "eth0")]
    return [*found, *([] if delay else ["ip -n switch link set br0 up"])]


def forward(ports: dict[bytes, int], wires: dict[int, Any]) -> NoReturn:
    """Forward packets between open devices.

    Args:
        ports: the file descriptor of each device, by its IPv4 address.
        wires: the `LinkModel` of each device.
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
            with contextlib.suppress(OSError):  # device down or queue full: the packet is lost
                os.write(dest, packet)


def open_tun(name: str) -> int:
    """Create a TUN device. The kernel removes it when its file descriptor is closed."""
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    fcntl.ioctl(fd, _SET_INTERFACE, struct.pack("16sH22x", name.encode(), _TUN | _NO_HEADER))
    return fd


def switch(rate: str, delay: str, *hosts: str) -> NoReturn:
    """Make a TUN device for each host, print "ready", and forward packets by their address."""
    from tests.oracle.link import LinkModel  # brings torch, which only this needs

    named = dict(host.split("=") for host in hosts)
    ports = {socket.inet_aton(address): open_tun(name) for name, address in named.items()}
    wires = {fd: LinkModel(float(delay), float(rate) / 8) for fd in ports.values()}
    ctypes.CDLL(None).prctl(_SET_TIMER_SLACK, 1, 0, 0, 0)  # the kernel may be 1 ns late
    with contextlib.suppress(PermissionError):  # root of a container may lack it
        # real-time priority, because a wire does not wait for a core
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    print("ready", flush=True)
    forward(ports, wires)


def main(count: str, rate: str, delay: str, *command: str) -> int:
    """Make hosts, and run a command on the first one. Return its exit code."""
    addresses = names(int(count))
    subprocess.run(["mount", "-t", "tmpfs", "none", "/run"], check=True)
    known = [f"{address} {host}\n" for host, address in addresses.items()]
    Path("/run/hosts").write_text("".join(("127.0.0.1 localhost\n", *known)))
    subprocess.run(["mount", "--bind", "/run/hosts", "/etc/hosts"], check=True)
    subprocess.run(["ip", "netns", "add", "switch"], check=True)
    if float(delay):
        ports = [f"{host.replace('h', 'p')}={address}" for host, address in addresses.items()]
        module = ("-m", "benchmarks.contests.netlab.hosts", "switch", rate, delay, *ports)
        switch = ["ip", "netns", "exec", "switch", sys.executable, *module]
        said = subprocess.Popen(switch, stdout=subprocess.PIPE).stdout
        if said is None or said.readline() != b"ready\n":
            raise RuntimeError("the switch did not start")
    for line in commands(addresses, float(rate), float(delay)):
        subprocess.run(line.split(), check=True)
    return subprocess.run([AGENT, "h0", shlex.join(command)], check=False).returncode


if __name__ == "__main__":
    sys.exit(switch(*sys.argv[2:]) if sys.argv[1] == "switch" else main(*sys.argv[1:]))
