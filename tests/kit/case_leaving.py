"""Programs in which an error leaves a mesh on rank 1, while the other ranks wait for its messages.

mpiexec -n 3 python case_leaving.py
"""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch

import sp_core as sp
from sp_core import observer, progress
from sp_core.llama.unequal import _taken
from sp_core.programs import ALGORITHMS

LOST = 1
NEEDED: dict[str, dict[str, int]] = {
    "all_to_all": {"split_dim": 0, "concat_dim": 1},
    "shift": {"offset": 1},
    "broadcast": {"root": LOST},
}
STARTED = sorted(op for op in ALGORITHMS if hasattr(sp, f"{op}_start"))
Case = tuple[dict[str, Any], Callable[[sp.Communicator, Callable[[], None]], object]]


class Lost(Exception):
    """The error that leaves the mesh on rank LOST."""


def started(op: str, algorithm: str, count: int) -> Case:
    """Start collectives; then rank LOST leaves and the others wait, for the last one first."""

    def body(group: sp.Communicator, leave: Callable[[], None]) -> None:
        x = torch.ones(6 * 8192, 2)
        arguments: Any = {"algorithm": algorithm, **NEEDED.get(op, {})}
        begun = [getattr(sp, f"{op}_start")(x, comm=group, **arguments) for _ in range(count)]
        leave()
        for pending in reversed(begun):
            pending.wait()

    return {"transport": "window"}, body


def of_plan(group: sp.Communicator, leave: Callable[[], None]) -> None:
    """Start a run of a plan, then rank LOST leaves."""
    plan = sp.plan("all_reduce", torch.ones(100_000), comm=group, algorithm="ring")
    handle = plan.start()
    leave()
    plan.finish(handle)


def a_run(group: sp.Communicator, leave: Callable[[], None]) -> None:
    """Let all ranks but LOST run a plan."""
    plan = sp.plan("all_reduce", torch.ones(100_000), comm=group, algorithm="ring")
    leave()
    plan.run()


def a_call(group: sp.Communicator, leave: Callable[[], None]) -> None:
    """Let rank 0 wait and the other ranks make a call: its agreement needs rank 0."""
    pending = sp.all_reduce_start(torch.ones(100_000), comm=group, algorithm="ring")
    leave()
    pending.wait() if group.rank == 0 else sp.all_reduce(torch.ones(1), comm=group)


def backward(group: sp.Communicator, leave: Callable[[], None]) -> None:
    """Complete a started collective; then rank LOST leaves before its backward."""
    x = torch.ones(50_000, requires_grad=True)
    y = sp.all_gather_start(x, comm=group, algorithm="ring").wait()
    leave()
    y.sum().backward()


def attention(group: sp.Communicator, leave: Callable[[], None]) -> None:
    """Let all ranks but LOST call a scheme."""
    sharding = sp.Sharding.contiguous(256 * group.size, group.size)
    q = torch.ones(1, 256, 2, 64)
    leave()
    with group.agreed():
        sp.ring_attention(q, q, q, comm=group, sharding=sharding)


def loss_of_attention(group: sp.Communicator) -> Any:
    """Return the sum of a scheme's result. With transport="window" its backward makes memory."""
    x = torch.ones(1, 2, 2, 4, requires_grad=True)
    sharding = sp.Sharding.contiguous(2 * group.size, group.size)
    out: Any = sp.ring_attention(x, x, x, comm=group, sharding=sharding)
    return out.sum()


def backward_in_place(group: sp.Communicator, leave: Callable[[], None]) -> None:
    """Call a scheme; then rank LOST leaves before its backward."""
    loss = loss_of_attention(group)
    leave()
    loss.backward()


def rows_that_wait(group: sp.Communicator, leave: Callable[[], None]) -> None:
    """Hand a row to each rank; then rank LOST leaves and the others find no more rows."""
    from mpi4py import MPI

    with sp.Mesh(MPI.COMM_SELF, tp=1) as alone:
        grid = SimpleNamespace(tensor=alone["tp"], sequence=group)
        model: Any = SimpleNamespace(grid=grid)
        for _ in _taken(model, [()] * group.size):
            sp.fence(comm=group)
            leave()


def calling(name: str, **arguments: Any) -> Callable[[sp.Communicator, Callable[[], None]], object]:
    """Return a body in which all ranks but LOST make a blocking call."""

    def body(group: sp.Communicator, leave: Callable[[], None]) -> None:
        x = () if name == "fence" else (torch.ones(100_000),)
        leave()
        getattr(sp, name)(*x, comm=group, **arguments)

    return body


BEGUN: dict[str, Case] = {
    **{
        f"{op} {algorithm}, {count} started": started(op, algorithm, count)
        for op in STARTED
        for algorithm in ALGORITHMS[op]
        for count in (1, 3)
    },
    "plan": ({}, of_plan),
    "a call": ({}, a_call),
}
"""Cases in which rank LOST makes the same calls as the others, except the wait."""
CASES: dict[str, Case] = BEGUN | {
    "backward": ({"check": "off"}, backward),
    "backward in place": ({"transport": "window", "check": "off"}, backward_in_place),
    "run of a plan": ({"transport": "host", "check": "off"}, a_run),
    "attention": ({"transport": "host"}, attention),
    "attention in place": ({"transport": "window"}, attention),
    "rows that wait": ({"transport": "host"}, rows_that_wait),
    "fence": ({"transport": "window", "check": "off"}, calling("fence")),
    **{
        f"all_reduce {algorithm}": (
            {"transport": "window", "check": "off"},
            calling("all_reduce", algorithm=algorithm),
        )
        for algorithm in ALGORITHMS["all_reduce"]
        if algorithm not in ("auto", "mpi")  # MPI itself waits there
    },
}


def outcomes(comm: Any, name: str) -> Iterator[str]:
    """Yield the error that leaves the mesh, the sum in a new mesh, and agreements left open."""
    options, body = CASES[name]

    def leave() -> None:
        if comm.rank == LOST:
            raise Lost

    try:
        with sp.Mesh(comm, sp=comm.size, **options) as mesh:
            body(mesh["sp"], leave)
    except (Lost, sp.PeerFailed) as error:
        yield type(error).__name__
    with sp.Mesh(comm, sp=comm.size, **options) as mesh:
        yield str(sp.all_reduce(torch.ones(1), comm=mesh["sp"], algorithm="ring").item())
    mine = progress.of_this_rank()
    mine.settle(5)
    yield f"{len(mine.kept)} open"


def wanted(comm: Any) -> list[str]:
    """Return what `outcomes` has to yield."""
    return ["Lost" if comm.rank == LOST else "PeerFailed", str(float(comm.size)), "0 open"]


def main() -> None:
    """Run every case on the ranks of MPI."""
    from mpi4py import MPI

    observer.GRACE_SECONDS = 0.01
    for name in CASES:
        found = [*outcomes(MPI.COMM_WORLD, name)]
        assert found == wanted(MPI.COMM_WORLD), (name, found)
    print(f"rank {MPI.COMM_WORLD.rank}: {len(CASES)} cases", flush=True)


if __name__ == "__main__":
    main()
