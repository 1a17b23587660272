"""Brings emulated hosts up, and takes them down whatever happens.

A cluster has a folder that is locked as long as its maker lives. The next start takes a folder that nobody holds any more for what
a killed run has left, and removes its namespaces; those of others it does not touch, because it does not know them.
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

from benchmarks.contests.netlab.plan import Command, Link, Plan

FOLDER = Path("/run/sp_core-netlab")
AGENT = Path(__file__).with_name("agent.sh")
PROGRAMS = {"ip": "iproute2", "tc": "iproute2", "unshare": "util-linux", "mount": "mount", "hostname": "hostname"}
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
        raise NetlabError("network namespaces need root. Run it as root, or pass --link-model for a model of the link.")
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        packages = sorted({PROGRAMS[name] for name in missing})
        raise NetlabError(f"{', '.join(missing)} not found on the PATH. Install {' and '.join(packages)} with apt-get or alike.")
    if not Path("/dev/net/tun").exists():
        raise NetlabError("there is no /dev/net/tun, which links with a delay need. Load the kernel's module tun.")


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
                raise NetlabError(f"{path} belongs to somebody else. Is the same program running twice in one process?")
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
    command = [sys.executable, "-m", "benchmarks.contests.netlab.switch", f"{plan.link.rate:.0f}", repr(plan.link.delay), *hosts]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
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
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=TIMEOUT, check=False, start_new_session=True
    )
