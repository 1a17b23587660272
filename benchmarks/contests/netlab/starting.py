"""Starts each MPI across the emulated hosts: by the agent instead of ssh, and over TCP between them."""

from __future__ import annotations

import shlex
import subprocess
from dataclasses import dataclass
from pathlib import Path

from benchmarks import launching
from benchmarks.contests.contest import Entry
from benchmarks.contests.netlab.hosts import AGENT, cluster
from benchmarks.launching import Launch, Record, UsageError
from sp_core.launch.command import find_mpiexec

NAMES = {"HYDRA": "mpich", "PRRTE": "openmpi", "Open MPI": "openmpi"}
TIMEOUT = 90.0
ATTEMPTS = 2  # MPICH's launcher now and then dies while it starts ("demux engine error")
TCP = {
    "mpich": {"MPIR_CVAR_CH4_NETMOD": "ofi", "FI_PROVIDER": "tcp", "FI_TCP_IFACE": "eth0"},
    "openmpi": {
        "OMPI_MCA_pml": "ob1",
        "OMPI_MCA_btl": "self,sm,tcp",
        "OMPI_MCA_btl_tcp_if_include": "eth0",
        "OMPI_MCA_btl_tcp_links": "4",  # with one socket it does not fill a link
        "OMPI_MCA_osc": "^ucx",
        "OMPI_MCA_mpi_yield_when_idle": "true",  # it cannot see that the hosts share their cores
    },
}


def installed() -> str:
    """Return the MPI of the mpiexec beside this Python, "openmpi" or "mpich".

    Raises:
        UsageError: it is another one, or there is none.
    """
    try:
        said = subprocess.run(
            [find_mpiexec(), "--version"], capture_output=True, text=True, timeout=60, check=False
        )
    except FileNotFoundError as error:
        raise UsageError(str(error)) from error
    found = [name for word, name in NAMES.items() if word in said.stdout + said.stderr]
    if not found:
        raise UsageError(
            f"{find_mpiexec()} is of no MPI that is known here ({', '.join(sorted(set(NAMES.values())))})."
        )
    return found[0]


def across(mpi: str, agent: Path, hosts: list[str], per_host: int) -> tuple[str, ...]:
    """Return the arguments of mpiexec for `per_host` ranks on each host, consecutive ranks on the same one."""
    slots = ",".join(f"{host}:{per_host}" for host in hosts)
    if mpi == "mpich":
        return ("-launcher", "rsh", "-launcher-exec", str(agent), "-hosts", slots, "-iface", "eth0")
    chosen = {
        "plm_ssh_agent": str(agent),
        "rmaps_default_mapping_policy": ":oversubscribe",
        "hwloc_default_binding_policy": "none",
    }
    prte = [part for name, value in chosen.items() for part in ("--prtemca", name, value)]
    return (*prte, "--host", slots, "--map-by", "slot:oversubscribe")


@dataclass(frozen=True)
class Hosted(Entry):
    """A launch on emulated hosts, or on this machine where the link is modelled."""

    mpi: str = "mpich"

    def run(self) -> Record:
        """Run the ranks, and once more if the launcher itself failed; never if a result was wrong."""
        record: Record = {}
        for _ in range(ATTEMPTS):
            record = self.once()
            if record["status"] == "ok" or "demux engine error" not in record["output"]:
                break
        return record

    def once(self) -> Record:
        """Run the ranks; the hosts exist as long."""
        if self.setting.modelled:
            return launching.run(self.ranks, self.measure, self.setting, self.launch)
        with cluster(self.setting.hosts, self.setting.wire) as up:
            how = Launch(
                timeout=TIMEOUT,
                mpi_args=across(self.mpi, AGENT, up.plan.names, self.setting.per_host),
            )
            variables = [f"{name}={value}" for name, value in TCP[self.mpi].items()]

            def on_first_host(command: list[str]) -> list[str]:
                return ["env", *variables, *up.on(up.plan.names[0], shlex.join(command))]

            return launching.run(self.ranks, self.measure, self.setting, how, around=on_first_host)
