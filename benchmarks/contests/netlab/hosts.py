"""Run a command on emulated hosts: `python -m ....hosts COUNT RATE DELAY COMMAND...` behind ALONE.

Every host is a network namespace with an address; the command runs on the first one. ALONE gives
the program mounts and processes of its own. Nobody else sees these hosts, and the kernel removes
them with the last process, however that ended. Without delay all hosts hang on one bridge, by pairs
of virtual interfaces shaped on both ends:

    host h0  eth0 ==shaped== p0  |
    host h1  eth0 ==shaped== p1  |  bridge br0, in the namespace of the switch
    host h2  eth0 ==shaped== p2  |

With a delay each eth0 is a TUN device, and a process (`switch`) carries the packets from one to the
other. Nothing but the standard library is imported.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ALONE = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
AGENT = Path(__file__).with_name("agent.sh")
BURST = "128kb"
"""Of the token bucket: at 1 Gbit/s a millisecond, less than 1 % of a message of 16 MiB."""

QUEUE = "20ms"
"""Of packets before the bucket drops one, as a switch with small buffers would."""

MTU = 16000
"""Of TUN devices: few packets, because a Python program carries each of them."""


def names(count: int) -> dict[str, str]:
    """Return the addresses of hosts by their names."""
    return {f"h{number}": f"10.77.0.{number + 1}" for number in range(count)}


def commands(addresses: Mapping[str, str], rate: float, delay: float) -> list[str]:
    """Return what connects the hosts; with a delay, after the switch made its devices.

    Args:
        addresses: of the hosts by name.
        rate: bits per second of the link of each host, in each direction.
        delay: seconds from one host to another, apart from the time that the bits take.
    """
    shape = f"root tbf rate {rate:.0f}bit burst {BURST} latency {QUEUE}"
    found = [] if delay else ["ip -n switch link add br0 type bridge"]
    for host, address in addresses.items():
        port = host.replace("h", "p")
        found.append(f"ip netns add {host}")
        if delay:
            found.append(f"ip -n switch link set {port} netns {host} name eth0")
            found.append(f"ip -n {host} link set eth0 mtu {MTU} txqueuelen 2000")
        else:
            found.append(f"ip -n {host} link add eth0 type veth peer name {port} netns switch")
            found.append(f"ip -n switch link set {port} master br0 up")
            found.append(f"tc -n {host} qdisc add dev eth0 {shape}")
            found.append(f"tc -n switch qdisc add dev {port} {shape}")
        found.append(f"ip -n {host} addr add {address}/24 dev eth0")
        found += [f"ip -n {host} link set {device} up" for device in ("lo", "eth0")]
    return [*found, *([] if delay else ["ip -n switch link set br0 up"])]


def main(count: str, rate: str, delay: str, *command: str) -> int:
    """Make hosts. Return the exit code of the command on the first one."""
    addresses = names(int(count))
    subprocess.run(["mount", "-t", "tmpfs", "none", "/run"], check=True)
    known = [f"{address} {host}\n" for host, address in addresses.items()]
    Path("/run/hosts").write_text("".join(("127.0.0.1 localhost\n", *known)))
    subprocess.run(["mount", "--bind", "/run/hosts", "/etc/hosts"], check=True)
    subprocess.run(["ip", "netns", "add", "switch"], check=True)
    if float(delay):
        ports = [f"{host.replace('h', 'p')}={address}" for host, address in addresses.items()]
        module = ("-m", "benchmarks.contests.netlab.switch", rate, delay, *ports)
        switch = ["ip", "netns", "exec", "switch", sys.executable, *module]
        said = subprocess.Popen(switch, stdout=subprocess.PIPE).stdout
        if said is None or said.readline() != b"ready\n":
            raise RuntimeError("the switch did not start")
    for line in commands(addresses, float(rate), float(delay)):
        subprocess.run(line.split(), check=True)
    return subprocess.run([AGENT, "h0", shlex.join(command)], check=False).returncode


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
