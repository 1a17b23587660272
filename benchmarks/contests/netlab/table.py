"""Run collectives and ring attention over an emulated network of hosts with slow links.

Hosts are network namespaces; their links are shaped.

Every algorithm is checked across hosts, then the requirements on slow links are measured. As root
it needs `ip` and `tc`; without root it uses a model of the link inside the transport, and says so.
Exit code: 0 if all results were right, whatever the times; 1 if one was wrong or a launch failed; 2
for options that cannot be run.
"""

import argparse
import os
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import torch
from torch import Tensor

import sp_core as sp
from benchmarks.contests.contest import Contest, Entry, Part, at_least, installed, requirements
from benchmarks.contests.netlab.hosts import AGENT, ALONE, names
from benchmarks.launching import Launch, Record, UsageError, about
from benchmarks.machine import environment
from benchmarks.sample import Span, makespans, race
from benchmarks.statistics import WITHIN, Interval, Requirement, exact_interval
from benchmarks.worker import Intracomm, Rank
from sp_core.attention import Logits
from sp_core.programs import ALGORITHMS
from sp_core.schemes.problem import Problem
from sp_core.schemes.ring import ring_blocks
from sp_core.transport import Done, Handle, HostTransport, Messages
from tests.oracle.collective_cases import Case
from tests.oracle.link import LinkModel

MODEL = (
    "link model inside the transport, on this machine, because there is no root; the library's own "
    "collectives are not measured"
)
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


class Setting(msgspec.Struct, frozen=True):
    """One launch.

    Args:
        name: the launch's name, by which rows find their samples.
        kind: "check" (results of every algorithm), "all_reduce" or "overlap" (times).
        hosts, per_host: how many hosts, and ranks on each.
        rate, delay: the rate of each host's link in bits per second, and its delay in seconds.
        nbytes: bytes of the float32 vector.
        contestants: algorithms of an all-reduce; "library" is the MPI library's own.
        rounds: samples of each contestant.
        modelled: whether the link is a model inside the transport, on one machine.
    """

    name: str
    kind: str
    hosts: int
    per_host: int = 1
    rate: float = 1e9
    delay: float = 0.0
    nbytes: int = 1 << 24
    contestants: tuple[str, ...] = ()
    rounds: int = 9
    modelled: bool = False


LIBRARY, STREAM = "library", "stream"
RING, DOUBLING, HIERARCHY = "segmented_ring", "recursive_doubling", "hierarchical"
STREAM_BYTES = 1 << 24
PAIR, THREE, NODES = "16 MiB, P = 2", "16 MiB, P = 3", "16 MiB, 2 x 2"
TINY, SMALL, ATTENTION = "1 KiB, 1 ms, P = 4", "64 KiB, 1 ms, P = 4", "ring attention, P = 2"
FAR: dict[str, Any] = {"kind": "all_reduce", "hosts": 4, "delay": 1e-3, "rounds": 25}
SETTINGS = (
    Setting("check, 3 hosts", "check", hosts=3),
    Setting("check, 2 x 2", "check", hosts=2, per_host=2),
    Setting(PAIR, "all_reduce", hosts=2, contestants=(RING, LIBRARY), rounds=15),
    Setting(THREE, "all_reduce", hosts=3, contestants=(RING, LIBRARY), rounds=11),
    Setting(TINY, nbytes=1 << 10, contestants=(DOUBLING, LIBRARY), **FAR),
    Setting(SMALL, nbytes=1 << 16, contestants=(DOUBLING, LIBRARY), **FAR),
    Setting(NODES, "all_reduce", 2, 2, contestants=(HIERARCHY, RING, LIBRARY), rounds=11),
    Setting(ATTENTION, "overlap", hosts=2, rounds=25),
)
"""All launches."""

Of = Callable[[str], float]
"""Returns the seconds of a contestant, by its name, in one round."""

Step = Callable[[], object]
PORT, TRIES = 7077, 5
LEAD_SECONDS = 0.02  # until all ranks know the start, over links of a few milliseconds
LATE_SECONDS = 3e-4  # if a rank begins later than this, the sample is taken again
NAP_SECONDS = 2e-4
TOKENS, HEADS, HEAD_DIM = 2048, 8, 64
"""Sizes on each rank: attention to a block takes longer than sending the block at 1 Gbit/s."""


def all_reduces(setting: Setting, mesh: sp.Mesh) -> dict[str, Step]:
    """Return the all-reduce of each contestant, after a check of its result.

    Raises:
        RuntimeError: a result is wrong.
    """
    base, size = torch.arange(setting.nbytes // 4).remainder(97).float(), mesh.size
    x, wanted = base + mesh.rank, base * size + size * (size - 1) // 2
    found: dict[str, Step] = {}
    for name in setting.contestants:
        if name != LIBRARY or not setting.modelled:
            algorithm = "mpi" if name == LIBRARY else name
            made = sp.plan("all_reduce", x, comm=mesh["hosts", "ranks"], algorithm=algorithm)
            check(f"all_reduce by {name}", made.run(), wanted)
            found[name] = made.run
    return found


def check(what: str, got: object, expected: Tensor) -> None:
    """Raise RuntimeError if a result is not exactly the expected one."""
    if not isinstance(got, Tensor) or not torch.equal(got, expected):
        raise RuntimeError(f"{what} is wrong: {got} instead of {expected}")


class Stream:
    """Send data from the first host to the last over one TCP stream, to measure the link."""

    def __init__(self, world: Intracomm, address: str) -> None:
        self._buffer = bytearray(STREAM_BYTES)
        self._sends, self._receives = world.rank == 0, world.rank == world.size - 1
        listener = socket.create_server((address, PORT)) if self._sends else None
        world.Barrier()
        if self._receives:
            self._end = socket.create_connection((address, PORT), timeout=30)
        if listener is not None:
            self._end = listener.accept()[0]

    def __call__(self) -> None:
        """Send STREAM_BYTES once; ranks at neither end do nothing."""
        if self._sends:
            self._end.sendall(self._buffer)
            self._end.recv(1)  # else the next stream would begin while this one still arrives
        if self._receives:
            left = memoryview(self._buffer)
            while left:
                left = left[self._end.recv_into(left) :]
            self._end.sendall(b".")


class _Nowhere(HostTransport):
    """A transport in which every message is complete at once and carries no data."""

    def exchange(self, sends: Messages, recvs: Messages) -> Handle:
        return Done()


def overlaps(world: Intracomm, mesh: sp.Mesh, idle: sp.Mesh) -> dict[str, Step]:
    """Return three steps: ring attention, the same without messages, and its messages alone."""
    torch.manual_seed(mesh.rank)
    q, k, v = (torch.randn(1, TOKENS, HEADS, HEAD_DIM) for _ in range(3))
    sharding = sp.Sharding.contiguous(TOKENS * mesh.size, mesh.size)
    comm, silent = mesh["hosts", "ranks"], idle["hosts", "ranks"]
    problem = Problem(comm, sharding, sharding, sp.Mask(), Logits(1.0))
    result = sp.ring_attention(q, k, v, comm=comm, sharding=sharding)
    torch.testing.assert_close(
        result, sp.allgather_kv_attention(q, k, v, comm=comm, sharding=sharding)
    )
    silent.transport = _Nowhere(world)
    return {
        "both": partial(sp.ring_attention, q, k, v, comm=comm, sharding=sharding),
        "compute": partial(sp.ring_attention, q, k, v, comm=silent, sharding=sharding),
        "communication": lambda: [None for _ in ring_blocks(k, v, problem)],
    }


def begin(world: Intracomm) -> tuple[float, float]:
    """Wait, mostly asleep, for a start that rank 0 chooses. Return it and this rank's lateness.

    After a barrier ranks would start a link's delay apart. A rank that spins would take the core
    from ranks that share it. A rank that only sleeps would not forward the start, because some
    libraries send only while they are called.
    """
    start: float = world.bcast(time.perf_counter() + LEAD_SECONDS)
    while (left := start - time.perf_counter()) > 0:
        world.Iprobe()
        time.sleep(min(left, NAP_SECONDS))
    return start, time.perf_counter() - start


def sample(world: Intracomm, step: Step) -> Span:
    """Time a step from a common start. If a rank starts late, try again; return the least late."""
    tries: list[tuple[float, float, float]] = []
    for _ in range(TRIES):
        start, late = begin(world)
        step()
        end = time.perf_counter()
        tries.append((max(world.allgather(late)), start, end))
        if tries[-1][0] < LATE_SECONDS:
            break
    _, start, end = min(tries)
    return start, end


def check_all(comm: sp.Communicator, *, library: bool) -> int:
    """Check every algorithm of every collective. Return the number of algorithms."""
    absent = (*(() if library else ("auto", "mpi")), *(("window",) if comm.window is None else ()))
    chosen = [
        (op, name) for op, names in ALGORITHMS.items() for name in names if name not in absent
    ]
    for number, (op, algorithm) in enumerate(chosen):
        case = Case(op, 0, 1, "float32", "plain", 1, True, False, number, algorithm)
        inputs = case.inputs(comm.size)
        check(
            f"{op} by {algorithm}",
            case.call(inputs[comm.rank], comm),
            case.expected(inputs, comm.rank, comm.size),
        )
    return len(chosen)


def measure(values: Any, rank: Rank) -> Record:
    """Run one launch, and return its record."""
    from mpi4py import MPI

    setting, world = msgspec.convert(values, Setting), rank.world
    hosts = sorted(set(world.allgather(socket.gethostname())))
    library = MPI.Get_library_version().splitlines()[0].strip("\0 ")
    known = {"mpi": library, "env": environment(), "hosts": hosts}
    make = partial(sp.Mesh, world, hosts=setting.hosts, ranks=setting.per_host)
    carrier: Any = LinkModel(setting.delay, setting.rate / 8) if setting.modelled else "auto"
    usual = "ring" if setting.modelled else "auto"  # the model carries no collective of the library
    with (
        make(transport=carrier) as mesh,
        make(check="off", transport=carrier, algorithm=usual) as quick,
        make(check="off") as idle,
    ):
        if setting.kind == "check":
            checked = check_all(mesh["hosts", "ranks"], library=not setting.modelled)
            return {**known, "checked": checked}
        steps = (
            all_reduces(setting, quick)
            if setting.kind == "all_reduce"
            else overlaps(world, quick, idle)
        )
        if not setting.modelled:
            address: str = world.bcast(socket.gethostbyname(socket.gethostname()))  # of rank 0
            steps = {STREAM: Stream(world, address), **steps}
        runners = {name: partial(sample, world, step) for name, step in steps.items()}
        spans = race(world, runners, setting.rounds + 1, seed=0)
    # contestants take turns; the first round only warms up
    seconds = {name: makespans(by_rank)[1:] for name, by_rank in spans.items()}
    modelled = {STREAM: [STREAM_BYTES * 8 / setting.rate] * setting.rounds}
    return {**known, "seconds": {**modelled, **seconds}}


def across(mpi: str, hosts: int, per_host: int) -> tuple[str, ...]:
    """Return the arguments of mpiexec that put `per_host` ranks on each host, in order."""
    slots = ",".join(f"{host}:{per_host}" for host in names(hosts))
    if mpi == "mpich":
        return ("-launcher", "rsh", "-launcher-exec", str(AGENT), "-hosts", slots, "-iface", "eth0")
    chosen = {
        "plm_ssh_agent": str(AGENT),
        "rmaps_default_mapping_policy": "slot:oversubscribe",
        "hwloc_default_binding_policy": "none",
    }
    prte = [part for name, value in chosen.items() for part in ("--prtemca", name, value)]
    return (*prte, "--host", slots, "--map-by", "slot:oversubscribe")


def check_system() -> None:
    """Raise `UsageError` if a program or device that emulated hosts need is missing."""
    missing = ", ".join(name for name in ("ip", "tc") if shutil.which(name) is None)
    told = f"{missing} not found on the PATH. Install iproute2 with apt-get" if missing else ""
    if not missing and not Path("/dev/net/tun").exists():
        told = "/dev/net/tun, which links with a delay need, is not there. Load tun"
    if told:
        raise UsageError(f"{told}, or pass --link-model.")


def hosted(setting: Setting, mpi: str) -> Launch:
    """Return how the library `mpi` starts ranks on emulated hosts, which end with the launch."""
    module = (sys.executable, "-m", "benchmarks.contests.netlab.hosts")
    hosts = (*ALONE, *module, str(setting.hosts), str(setting.rate), str(setting.delay), "env")
    variables = [f"{name}={value}" for name, value in TCP[mpi].items()]
    mpi_args = across(mpi, setting.hosts, setting.per_host)
    return Launch(mpi_args=mpi_args, around=(*hosts, *variables))


def plan(options: argparse.Namespace) -> tuple[Record, list[Entry]]:
    """Return the first fields of the results file, and the launches to run.

    Settings with several ranks per host are left out if the link is a model.

    Raises:
        UsageError: emulated hosts are to be made, and a program or device for them is missing.
    """
    modelled, mpi = options.link_model or os.geteuid() != 0, installed()
    if not modelled and not options.list:
        check_system()
    entries: list[Entry] = []
    for one in SETTINGS:
        if one.per_host == 1 or not modelled:
            setting = msgspec.structs.replace(
                one, modelled=modelled, rounds=options.rounds or one.rounds
            )
            launch = Launch() if modelled else hosted(setting, mpi)
            known = {"setting": msgspec.structs.asdict(setting)}
            work = (one.name, one.hosts * one.per_host, setting, known, launch)
            # MPICH's launcher now and then dies while it starts; no result was wrong then
            entries.append(Entry(*work, again="demux engine error"))
    net = MODEL if modelled else "network namespaces"
    return {"mpi": mpi, "net": net, "rounds": options.rounds}, entries


def show(document: Record) -> Iterator[Part]:
    """Yield a line for each launch, then the table of requirements, which only MPICH must meet."""
    launches = {launch["name"]: launch for launch in document["launches"]}
    yield f"{document['mpi']} over {document['net']}"
    for name, launch in launches.items():
        if "checked" in launch:
            yield f"{name}: {launch['checked']} algorithms right on {', '.join(launch['hosts'])}"
        else:
            seconds = launch["seconds"].items()
            yield f"{name}: ms: {', '.join(f'{who} {median(x) * 1e3:.2f}' for who, x in seconds)}"
    title = "over the link" if document["mpi"] == "mpich" else "over the link (required of MPICH)"
    yield requirements(title, rows(launches), WITHIN)


def rows(launches: Mapping[str, Record]) -> list[Requirement]:
    """Return every requirement, from the launches by name.

    To sum 16 MiB, P hosts need at least 2(P-1)/P times as long as the stream of the same round.
    """
    bound, faster = "time / (2(P-1)/P n/B)", f"library / {DOUBLING}"
    attention = "ring attention: share of the communication that is hidden"
    required: tuple[tuple[str, str, float, str, Callable[[Of], float]], ...] = (
        (f"all_reduce {PAIR}: {bound}", "<=", 1.05, PAIR, lambda of: of(RING) / of(STREAM)),
        (
            *(f"all_reduce {THREE}: {bound}", "<=", 1.05, THREE),
            lambda of: of(RING) * 3 / 4 / of(STREAM),
        ),
        (
            *(f"all_reduce {THREE}: library / {RING}", ">=", 2.4, THREE),
            lambda of: of(LIBRARY) / of(RING),
        ),
        (f"all_reduce {TINY}: {faster}", ">=", 2.0, TINY, lambda of: of(LIBRARY) / of(DOUBLING)),
        (f"all_reduce {SMALL}: {faster}", ">=", 2.0, SMALL, lambda of: of(LIBRARY) / of(DOUBLING)),
        (
            *(f"all_reduce {NODES}: (n/B) / {HIERARCHY}", ">=", 0.9, NODES),
            lambda of: of(STREAM) / of(HIERARCHY),
        ),
        (
            *(attention, ">=", 0.85, ATTENTION),
            lambda of: 1 - (of("both") - of("compute")) / of("communication"),
        ),
    )
    return [
        Requirement(text, relation, bound, _each(launches.get(name, {}).get("seconds", {}), value))
        for text, relation, bound, name, value in required
    ]


def _each(seconds: Mapping[str, list[float]], value: Callable[[Of], float]) -> Interval | None:
    """Return the interval of a value over all rounds; None if a contestant was not measured."""
    rounds = [
        dict(zip(seconds, times, strict=True)) for times in zip(*seconds.values(), strict=True)
    ]
    try:
        return exact_interval([value(times.__getitem__) for times in rounds]) if rounds else None
    except KeyError:
        return None


OPTIONS = {
    "--rounds": about(type=at_least(1), metavar="N", help="samples of each contestant"),
    "--link-model": about(action="store_true", help="the model of the link, as without root"),
}
netlab = Contest(
    *("netlab", __doc__, OPTIONS, plan, f"{__package__}.table:measure", show),
    file="netlab-{mpi}.json",
    timeout=90.0,
)
