"""What an emulated cluster is made of: names, addresses, and the commands that bring it up. Plain data.

Every host is a network namespace. Without delay all hosts hang on one bridge, by pairs of virtual interfaces shaped on both ends:

    host h0  eth0 ==shaped== p0  |
    host h1  eth0 ==shaped== p1  |  bridge br0, in a namespace of its own
    host h2  eth0 ==shaped== p2  |

With a delay each eth0 is a TUN device, and a process outside (`switch`) carries the packets from one to the other.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

Command = tuple[str, ...]

MAX_HOSTS = 64
BURST = "128kb"  # of the token bucket: at 1 Gbit/s a millisecond, less than 1 % of a message of 16 MiB
QUEUE = "20ms"  # of packets before the bucket drops one, as a switch with small buffers would
MTU = 16000  # of TUN devices: few packets, because a Python program carries each of them
_UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9, "us": 1e-6, "ms": 1e-3, "s": 1.0}
_LINK = re.compile(r"(?P<rate>[0-9.]+[kmg]bit)(?:,(?P<delay>[0-9.]+(?:us|ms|s)))?")
_NUMBER = re.compile(r"(\d+(?:\.\d+)?)([a-z]+)")


@dataclass(frozen=True)
class Link:
    """What joins a host to the others, in each direction.

    Args:
        rate: bits per second.
        delay: seconds from one host to another, apart from the time that the bits take.

    Raises:
        ValueError: a rate that is not positive, or a negative delay.
    """

    rate: float
    delay: float = 0.0

    def __post_init__(self) -> None:
        if not self.rate > 0 or self.delay < 0:
            raise ValueError(f"a link of {self.rate} bit/s and {self.delay} s was given; pass a rate > 0 and a delay >= 0.")

    @classmethod
    def parse(cls, text: str) -> Link:
        """A link from text such as "1gbit" or "100mbit,1ms".

        Raises:
            ValueError: text of another form.
        """
        found = _LINK.fullmatch(text)
        if found is None:
            raise ValueError(f"link {text!r} was given; pass a rate and perhaps a delay, such as '1gbit' or '100mbit,1ms'.")
        return cls(_value(found["rate"]), _value(found["delay"]) if found["delay"] else 0.0)

    def __str__(self) -> str:
        return f"{self.rate / 1e9:g} Gbit/s" + (f", {self.delay * 1e3:g} ms" if self.delay else "")


def _value(text: str) -> float:
    found = _NUMBER.fullmatch(text)
    if found is None:
        raise ValueError(f"{text!r} was given; pass a number and its unit, one of {', '.join(_UNITS)}.")
    return float(found[1]) * _UNITS[found[2]]


@dataclass(frozen=True)
class Plan:
    """One cluster.

    Args:
        prefix: of the names of its namespaces; nobody else uses it.
        hosts: how many.
        link: of each host.

    Raises:
        ValueError: fewer than one host, or too many for its addresses.
    """

    prefix: str
    hosts: int
    link: Link

    def __post_init__(self) -> None:
        if not 1 <= self.hosts <= MAX_HOSTS:
            raise ValueError(f"{self.hosts} hosts were asked for; pass 1 to {MAX_HOSTS}.")

    @property
    def names(self) -> list[str]:
        """What the hosts are called by those who run on them."""
        return [f"h{number}" for number in range(self.hosts)]

    @property
    def bridge(self) -> str:
        """The namespace of the bridge."""
        return f"{self.prefix}sw"

    @property
    def namespaces(self) -> list[str]:
        """All namespaces, in the order in which they are made."""
        return [*([] if self.link.delay else [self.bridge]), *map(self.namespace, self.names)]

    def namespace(self, host: str) -> str:
        """The namespace of a host."""
        return self.prefix + host

    def address(self, host: str) -> str:
        """The host's address."""
        return f"10.77.0.{int(host[1:]) + 1}"

    def tun(self, host: str) -> str:
        """What the host's TUN device is called before it is the host's; at most 15 characters."""
        return self.prefix + "t" + host[1:]

    def hosts_file(self) -> str:
        """/etc/hosts of every host."""
        return "".join(f"{address} {name}\n" for address, name in [("127.0.0.1", "localhost"), *self._addresses()])

    def commands(self) -> Iterator[Command]:
        """What brings the network up; with a delay, after the switch has made its devices."""
        for name in self.namespaces:
            yield ("ip", "netns", "add", name)
        if not self.link.delay:
            yield ("ip", "-n", self.bridge, "link", "add", "br0", "type", "bridge")
            yield ("ip", "-n", self.bridge, "link", "set", "br0", "up")
        for host in self.names:
            yield from self._plugged(host) if self.link.delay else self._wired(host)
            inside = ("ip", "-n", self.namespace(host))
            yield (*inside, "addr", "add", f"{self.address(host)}/24", "dev", "eth0")
            yield (*inside, "link", "set", "lo", "up")
            yield (*inside, "link", "set", "eth0", "up")

    def _addresses(self) -> Iterator[tuple[str, str]]:
        return ((self.address(host), host) for host in self.names)

    def _wired(self, host: str) -> Iterator[Command]:
        """A pair of interfaces between host and bridge, shaped on both ends: each end holds back what it sends."""
        inside, port = self.namespace(host), "p" + host[1:]
        yield ("ip", "-n", inside, "link", "add", "eth0", "type", "veth", "peer", "name", port, "netns", self.bridge)
        yield ("ip", "-n", self.bridge, "link", "set", port, "master", "br0", "up")
        shape = ("root", "tbf", "rate", f"{self.link.rate:.0f}bit", "burst", BURST, "latency", QUEUE)
        yield ("tc", "-n", inside, "qdisc", "add", "dev", "eth0", *shape)
        yield ("tc", "-n", self.bridge, "qdisc", "add", "dev", port, *shape)

    def _plugged(self, host: str) -> Iterator[Command]:
        """The switch's device, moved to the host."""
        yield ("ip", "link", "set", self.tun(host), "netns", self.namespace(host), "name", "eth0")
        yield ("ip", "-n", self.namespace(host), "link", "set", "eth0", "mtu", str(MTU), "txqueuelen", "2000")
