"""How each MPI is started across the emulated hosts: by the agent instead of ssh, and over TCP between them."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

from sp_core.launch.command import find_mpiexec

NAMES = {"HYDRA": "mpich", "PRRTE": "openmpi", "Open MPI": "openmpi"}


@dataclass(frozen=True)
class Across:
    """Arguments for mpiexec, and the environment, of a launch on several hosts."""

    arguments: tuple[str, ...]
    environment: dict[str, str]


def installed() -> str:
    """Which MPI the mpiexec beside this Python belongs to, "openmpi" or "mpich".

    Raises:
        ValueError: it is another one.
    """
    said = subprocess.run([find_mpiexec(), "--version"], capture_output=True, text=True, timeout=60, check=False)
    found = [name for word, name in NAMES.items() if word in said.stdout + said.stderr]
    if not found:
        raise ValueError(f"{find_mpiexec()} is of no MPI that is known here ({', '.join(sorted(set(NAMES.values())))}).")
    return found[0]


def across(mpi: str, agent: Path, hosts: list[str], per_host: int) -> Across:
    """How an MPI starts `per_host` ranks on each host, consecutive ranks on the same one."""
    return {"mpich": _mpich, "openmpi": _openmpi}[mpi](agent, [f"{host}:{per_host}" for host in hosts])


def _mpich(agent: Path, slots: list[str]) -> Across:
    arguments = ("-launcher", "rsh", "-launcher-exec", str(agent), "-hosts", ",".join(slots), "-iface", "eth0")
    return Across(arguments, {"MPIR_CVAR_CH4_NETMOD": "ofi", "FI_PROVIDER": "tcp", "FI_TCP_IFACE": "eth0"})


def _openmpi(agent: Path, slots: list[str]) -> Across:
    """Yields while it waits: it cannot see that the hosts share their cores. Several sockets: with one it does not fill a link."""
    chosen = {
        "plm_ssh_agent": str(agent),
        "rmaps_default_mapping_policy": ":oversubscribe",
        "hwloc_default_binding_policy": "none",
    }
    prte = [part for name, value in chosen.items() for part in ("--prtemca", name, value)]
    mca = {
        "pml": "ob1",
        "btl": "self,sm,tcp",
        "btl_tcp_if_include": "eth0",
        "btl_tcp_links": "4",
        "osc": "^ucx",
        "mpi_yield_when_idle": "true",
    }
    arguments = (*prte, "--host", ",".join(slots), "--map-by", "slot:oversubscribe")
    return Across(arguments, {f"OMPI_MCA_{name}": value for name, value in mca.items()})
