"""Brings emulated hosts up, and takes them down whatever happens.

A cluster has a folder that is locked as long as its maker lives. The next start takes a folder that
nobody holds any more for what a killed run has left, and removes its namespaces; those of others it
does not touch, because it does not know them.

Every host is a network namespace. Without delay all hosts hang on one bridge, by pairs of virtual
interfaces shaped on both ends:

    host h0  eth0 ==shaped== p0  |
    host h1  eth0 ==shaped== p1  |  bridge br0, in a namespace of its own
    host h2  eth0 ==shaped== p2  |

With a delay each eth0 is a TUN device, and a process outside (`switch`) carries the packets from
one to the other.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path("/run/sp_core-netlab")
AGENT = Path(__file__).with_name("agent.sh")
PROGRAMS = {
    "ip": "iproute2",
    "tc": "iproute2",
    "unshare": "util-linux",
    "mount": "mount",
    "hostname": "hostname",
}
TIMEOUT = 20.0


class NetlabError(RuntimeError):
    """The emulated cluster cannot be had; the text says why and what to do."""


@dataclass(frozen=True)
class Cluster:
    """Hosts that are up.

    Args:
        plan: their names and addresses.
        folder: of this cluster; what the agent needs is there.
    """

    plan: Plan
    folder: Path

    def on(self, host: str, command: str) -> list[str]:
        """The command line that runs a shell command on a host."""
        return ["env", f"SP_NETLAB={self.folder}", str(AGENT), host, command]


@contextlib.contextmanager
def cluster(hosts: int, link: Link, folder: Path = FOLDER) -> Iterator[Cluster]:
    """Emulated hosts for the length of a block.

    Args:
        hosts: how many.
        link: of each of them.
        folder: where all clusters of this machine have theirs.

    Raises:
        NetlabError: this system cannot do it, or one of the commands failed.
    """
    check_system()
    remove_stale(folder)
    plan = Plan(f"spnl{os.getpid()}", hosts, link)
    with _locked(folder / plan.prefix) as own, contextlib.ExitStack() as stack:
        (own / "hosts").write_text(plan.hosts_file())
        stack.callback(remove, plan.prefix)
        if link.delay:
            stack.enter_context(_switch(plan))
        for command in plan.commands():
            _run(command)
        yield Cluster(plan, own)


def check_system() -> None:
    """Raise `NetlabError` where namespaces cannot be made."""
    if os.geteuid() != 0:
        raise NetlabError(
            "network namespaces need root. Run it as root, or pass --link-model for a model of the link."
        )
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        packages = sorted({PROGRAMS[name] for name in missing})
        raise NetlabError(
            f"{', '.join(missing)} not found on the PATH. Install {' and '.join(packages)} with apt-get or alike."
        )
    if not Path("/dev/net/tun").exists():
        raise NetlabError(
            "there is no /dev/net/tun, which links with a delay need. Load the kernel's module tun."
        )


def remove_stale(folder: Path) -> list[str]:
    """Remove what runs have left that were killed; the prefixes of their names."""
    found = []
    for path in sorted(folder.glob("spnl*")):
        with _held(path) as free:
            if free:
                remove(path.name)
                shutil.rmtree(path, ignore_errors=True)
                found.append(path.name)
    return found


def remove(prefix: str) -> None:
    """Remove all namespaces of a prefix, and the processes in them."""
    for name in namespaces(prefix):
        for pid in _said("ip", "netns", "pids", name).split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        _said("ip", "netns", "del", name)


def namespaces(prefix: str) -> list[str]:
    """The namespaces whose names are a prefix and what `Plan` puts after it."""
    names = [line.split()[0] for line in _said("ip", "netns", "list").splitlines() if line.strip()]
    return sorted(name for name in names if re.fullmatch(rf"{prefix}(sw|h\d+)", name))


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[Path]:
    """A folder that is ours while the block lasts, and gone after it."""
    path.mkdir(parents=True, mode=0o700)
    try:
        with _held(path) as free:
            if not free:
                raise NetlabError(
                    f"{path} belongs to somebody else. Is the same program running twice in one process?"
                )
            yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def _held(path: Path) -> Iterator[bool]:
    """Whether the lock of a folder could be had; it is held for the block. The kernel gives it back when its holder ends."""
    with (path / "lock").open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True


@contextlib.contextmanager
def _switch(plan: Plan) -> Iterator[None]:
    """The process that carries packets with a delay. It ends with its standard input."""
    hosts = [f"{plan.tun(host)}={plan.address(host)}" for host in plan.names]
    command = [
        sys.executable,
        "-m",
        "benchmarks.contests.netlab.switch",
        f"{plan.link.rate:.0f}",
        repr(plan.link.delay),
        *hosts,
    ]
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        said = process.stdout.readline()
        if said != "ready\n":
            raise NetlabError(f"the switch did not start: {said}{process.stdout.read()}")
        yield
    finally:
        process.terminate()
        process.communicate(timeout=TIMEOUT)


def _run(command: Command) -> None:
    found = _ran(command)
    if found.returncode:
        raise NetlabError(f"{' '.join(command)}: {found.stderr.strip() or found.returncode}")


def _said(*command: str) -> str:
    """What a command prints; nothing where it fails, as for a namespace that is gone already."""
    return _ran(command).stdout


def _ran(command: Command) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, also if the terminal asks us to stop: what it has made must be known."""
    return subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
        start_new_session=True,
    )


Command = tuple[str, ...]

MAX_HOSTS = 64
BURST = (
    "128kb"  # of the token bucket: at 1 Gbit/s a millisecond, less than 1 % of a message of 16 MiB
)
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
            raise ValueError(
                f"a link of {self.rate} bit/s and {self.delay} s was given; pass a rate > 0 and a delay >= 0."
            )

    @classmethod
    def parse(cls, text: str) -> Link:
        """A link from text such as "1gbit" or "100mbit,1ms".

        Raises:
            ValueError: text of another form.
        """
        found = _LINK.fullmatch(text)
        if found is None:
            raise ValueError(
                f"link {text!r} was given; pass a rate and perhaps a delay, such as '1gbit' or '100mbit,1ms'."
            )
        return cls(_value(found["rate"]), _value(found["delay"]) if found["delay"] else 0.0)

    def __str__(self) -> str:
        return f"{self.rate / 1e9:g} Gbit/s" + (f", {self.delay * 1e3:g} ms" if self.delay else "")


def _value(text: str) -> float:
    found = _NUMBER.fullmatch(text)
    if found is None:
        raise ValueError(
            f"{text!r} was given; pass a number and its unit, one of {', '.join(_UNITS)}."
        )
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
        return "".join(
            f"{address} {name}\n"
            for address, name in [("127.0.0.1", "localhost"), *self._addresses()]
        )

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
        yield (
            "ip",
            "-n",
            inside,
            "link",
            "add",
            "eth0",
            "type",
            "veth",
            "peer",
            "name",
            port,
            "netns",
            self.bridge,
        )
        yield ("ip", "-n", self.bridge, "link", "set", port, "master", "br0", "up")
        shape = (
            "root",
            "tbf",
            "rate",
            f"{self.link.rate:.0f}bit",
            "burst",
            BURST,
            "latency",
            QUEUE,
        )
        yield ("tc", "-n", inside, "qdisc", "add", "dev", "eth0", *shape)
        yield ("tc", "-n", self.bridge, "qdisc", "add", "dev", port, *shape)

    def _plugged(self, host: str) -> Iterator[Command]:
        """The switch's device, moved to the host."""
        yield ("ip", "link", "set", self.tun(host), "netns", self.namespace(host), "name", "eth0")
        yield (
            "ip",
            "-n",
            self.namespace(host),
            "link",
            "set",
            "eth0",
            "mtu",
            str(MTU),
            "txqueuelen",
            "2000",
        )
