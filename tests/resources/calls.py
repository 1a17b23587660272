"""Call everything public, as the subjects of the domains do, on meshes that stay open."""

import contextlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from domains.declared import Subject, Values
from domains.trial import attempt
from torch import Tensor

import sp_core as sp
from sp_core.llama.pipeline import loss_and_gradients, sum_tied_gradients
from sp_core.testing import device

SHOWING = {
    "x.gradient": "True",
    "x.shape": "more dims",
    "--flops": "None",
    "plan.policy": "dynamic",
}
"""Parts that use more of the product than the first parts of their factors."""
ROTATED = re.compile(r"algorithm|\(form\)|\(sharding\)")


class Meshes:
    """Hold meshes that stay open while subjects are called, one for each transport and grid."""

    def __init__(self) -> None:
        self._made: dict[int, dict[Any, sp.Mesh]] = {}

    @contextlib.contextmanager
    def opened(self, comm: Any, drawn: Values, axes: dict[str, Any]) -> Iterator[sp.Mesh]:
        """Yield the mesh of a subject, in place of `situations.opened`."""
        own, transport = self._made.setdefault(comm.rank, {}), drawn["(transport)"]
        key = (transport, *axes.items())
        if key not in own:
            own[key] = sp.Mesh(comm, device=device(), transport=transport, **axes)
        yield own[key]

    def free(self, comm: Any) -> None:
        """Free the meshes of this rank; every rank calls this."""
        for mesh in self._made.pop(comm.rank, {}).values():
            mesh.free()


def row_of(subject: Subject, number: int) -> dict[str, str]:
    """Return the row of turn `number`; transports and algorithms take turns."""
    row = subject.base | {name: part for name, part in SHOWING.items() if name in subject.factors}
    turning = {name: list(parts) for name, parts in subject.factors.items() if ROTATED.match(name)}
    row |= {name: parts[number // 2 % len(parts)] for name, parts in turning.items()}
    transport = ("host", "window")[number % 2]
    may_take = transport in subject.factors.get("(transport)", ())
    return row | ({"(transport)": transport} if may_take else {})


def turns_of(subject: Subject) -> int:
    """Return after how many turns a subject has used all parts that take turns."""
    turning = [parts for name, parts in subject.factors.items() if ROTATED.match(name)]
    return 2 * max(map(len, turning), default=1)


def use(subject: Subject, comm: Any, number: int) -> None:
    """Call a subject. On one or two ranks judge the result, on more only run its backward."""
    drawn = subject.draw(row_of(subject, number), number)
    ranks = subject.ranks(drawn)
    if ranks == 1 and comm.rank:
        return
    if ranks <= 2:
        attempt(subject, drawn, comm)
        return
    with subject.prepare(comm, drawn) as call:
        result = call()
        made = result if isinstance(result, tuple) else (result,)
        learning = [y.sum() for y in made if isinstance(y, Tensor) and y.requires_grad]
        if learning:
            torch.stack(learning).sum().backward()
        if call.function is loss_and_gradients:
            sum_tied_gradients(call.arguments["model"])


def refusals(comm: sp.Communicator, n: int) -> None:
    """Make wrong calls, each of which every rank must refuse."""
    qkv: list[Tensor] = [torch.ones(1, n, 4, 4), *[torch.ones(1, n, 2, 4)] * 2]
    wrong: list[Callable[[], object]] = [
        lambda: sp.all_gather(torch.ones(n), comm=comm, dim=3),
        lambda: sp.all_reduce(torch.ones(n), comm=comm, algorithm="magic"),
        lambda: sp.all_reduce(torch.ones(n + comm.rank), comm=comm),
        lambda: sp.Mesh(comm._comm, a=comm.size + 1),
        lambda: sp.ring_attention(*qkv, comm=comm, sharding=sp.Sharding.zigzag(n, comm.size)),
    ]
    for call in wrong:
        with contextlib.suppress(ValueError, sp.RankError):
            call()
            raise AssertionError("it was accepted")


def use_others(comm: sp.Communicator, n: int) -> None:
    """Make calls that no subject makes, on a group that shares memory; n sets the sizes."""
    sp.all_reduce_start(torch.ones(n), comm=comm, algorithm="ring")  # without its wait()
    while comm._pending:
        comm.poll()
    q = torch.ones(1, n, 4, 4, requires_grad=True)
    k, v = (sp.shared_empty((1, n, 2, 4), comm=comm).requires_grad_() for _ in range(2))
    sharding = sp.Sharding.striped(comm.size * n, comm.size)
    out: Any = sp.ring_attention(q, k, v, comm=comm, sharding=sharding)
    out.sum().backward()
    counter = comm.counter()
    counter.take()
    counter.free()
    other = comm.rank ^ 1
    comm.wait(comm.exchange([(other, torch.ones(n))], [(other, torch.empty(n))]), "exchange")
    refusals(comm, n)
