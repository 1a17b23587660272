"""Bring emulated hosts up, and take them down whatever happens.

A cluster has a folder, named after the process that made it. The next start takes a folder whose
process has ended for what a killed run has left, and removes its namespaces. Those of others it
does not touch.

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
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.launching import UsageError

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
BURST = "128kb"
"""Of the token bucket: at 1 Gbit/s a millisecond, less than 1 % of a message of 16 MiB."""

QUEUE = "20ms"
"""Of packets before the bucket drops one, as a switch with small buffers would."""

MTU = 16000
"""Of TUN devices: few packets, because a Python program carries each of them."""


class NetlabError(UsageError):
    """The emulated cluster cannot be had; the text says why and what to do."""


@dataclass(frozen=True)
class Plan:
    """One cluster.

    Args:
        prefix: of the names of its namespaces; nobody else uses it.
        hosts: how many; at most 250.
        rate: bits per second of the link of each host, in each direction.
        delay: seconds from one host to another, apart from the time that the bits take.
    """

    prefix: str
    hosts: int
    rate: float
    delay: float = 0.0

    @property
    def names(self) -> list[str]:
        """Return the names of the hosts, as those know them who run on them."""
        return [f"h{number}" for number in range(self.hosts)]

    @property
    def bridge(self) -> str:
        """Return the namespace of the bridge."""
        return f"{self.prefix}sw"

    @property
    def namespaces(self) -> list[str]:
        """Return all namespaces, in the order in which they are made."""
        hosts = [self.prefix + host for host in self.names]
        return hosts if self.delay else [self.bridge, *hosts]

    def address(self, host: str) -> str:
        """Return the host's address."""
        return f"10.77.0.{int(host[1:]) + 1}"

    def tun(self, host: str) -> str:
        """Return the first name of the host's TUN device; at most 15 characters."""
        return self.prefix + "t" + host[1:]

    def hosts_file(self) -> str:
        """Return /etc/hosts of every host."""
        addresses = [f"{self.address(host)} {host}\n" for host in self.names]
        return "".join(("127.0.0.1 localhost\n", *addresses))

    def commands(self) -> list[str]:
        """Return what brings the network up; with a delay, after the switch made its devices."""
        found = [f"ip netns add {name}" for name in self.namespaces]
        if not self.delay:
            found.append(f"ip -n {self.bridge} link add br0 type bridge")
            found.append(f"ip -n {self.bridge} link set br0 up")
        for host in self.names:
            inside = self.prefix + host
            found += self._plugged(host, inside) if self.delay else self._wired(host, inside)
            found.append(f"ip -n {inside} addr add {self.address(host)}/24 dev eth0")
            found += [f"ip -n {inside} link set {device} up" for device in ("lo", "eth0")]
        return found

    def _wired(self, host: str, inside: str) -> list[str]:
        """Pair interfaces of host and bridge; each end is shaped and holds back what it sends."""
        bridge, port = self.bridge, "p" + host[1:]
        shape = f"root tbf rate {self.rate:.0f}bit burst {BURST} latency {QUEUE}"
        return [
            f"ip -n {inside} link add eth0 type veth peer name {port} netns {bridge}",
            f"ip -n {bridge} link set {port} master br0 up",
            f"tc -n {inside} qdisc add dev eth0 {shape}",
            f"tc -n {bridge} qdisc add dev {port} {shape}",
        ]

    def _plugged(self, host: str, inside: str) -> list[str]:
        """Move the switch's device to the host."""
        return [
            f"ip link set {self.tun(host)} netns {inside} name eth0",
            f"ip -n {inside} link set eth0 mtu {MTU} txqueuelen 2000",
        ]


@contextlib.contextmanager
def cluster(hosts: int, rate: float, delay: float, folder: Path = FOLDER) -> Iterator[list[str]]:
    """Keep emulated hosts for the length of a block.

    Args:
        hosts: how many.
        rate, delay: as in `Plan`.
        folder: where all clusters of this machine have theirs.

    Yields:
        The command in front of a host's name and a shell command to run there.

    Raises:
        NetlabError: this system cannot do it, or one of the commands failed.
    """
    check_system()
    remove_stale(folder)
    plan = Plan(f"spnl{os.getpid()}", hosts, rate, delay)
    own = folder / plan.prefix
    own.mkdir(parents=True, mode=0o700)
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, own)
        stack.callback(remove, plan.prefix)
        (own / "hosts").write_text(plan.hosts_file())
        if delay:
            stack.enter_context(_switch(plan))
        for command in plan.commands():
            found = _ran(command)
            if found.returncode:
                raise NetlabError(f"{command}: {found.stderr.strip() or found.returncode}")
        yield ["env", f"SP_NETLAB={own}", str(AGENT)]


def check_system() -> None:
    """Raise `NetlabError` where root cannot make namespaces."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        packages = " and ".join(sorted({PROGRAMS[name] for name in missing}))
        raise NetlabError(
            f"{', '.join(missing)} not found on the PATH. Install {packages} with apt-get."
        )
    if not Path("/dev/net/tun").exists():
        raise NetlabError(
            "there is no /dev/net/tun, which links with a delay need. Load the module tun."
        )


def remove_stale(folder: Path) -> list[str]:
    """Remove what killed runs have left. Return the prefixes of their names, which end in a pid."""
    ended = [path for path in folder.glob("spnl*") if not Path("/proc", path.name[4:]).exists()]
    for path in ended:
        remove(path.name)
        shutil.rmtree(path)
    return sorted(path.name for path in ended)


def remove(prefix: str) -> None:
    """Remove all namespaces that a plan with this prefix makes, and the processes in them."""
    listed = [line.split()[0] for line in _ran("ip netns list").stdout.splitlines() if line.strip()]
    for name in sorted(name for name in listed if re.fullmatch(rf"{prefix}(sw|h\d+)", name)):
        for pid in _ran(f"ip netns pids {name}").stdout.split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        _ran(f"ip netns del {name}")


@contextlib.contextmanager
def _switch(plan: Plan) -> Iterator[None]:
    """Run the process that carries packets with a delay. It ends with its standard input."""
    hosts = [f"{plan.tun(host)}={plan.address(host)}" for host in plan.names]
    module, rate, delay = "benchmarks.contests.netlab.switch", f"{plan.rate:.0f}", repr(plan.delay)
    process = subprocess.Popen(
        [sys.executable, "-m", module, rate, delay, *hosts],
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


def _ran(command: str) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, also if the terminal asks us to stop: what it made must be known.

    A command may fail, as for a namespace that is gone already.
    """
    return subprocess.run(
        command.split(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
        start_new_session=True,
    )
