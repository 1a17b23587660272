"""Every collective equals its definition, is the adjoint of its conjugate, and is counted; over every transport that needs no device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

import sp_core as sp
from sp_core.sharding import split_sizes
from sp_core.testing import check_adjoint, given, global_map, spmd
from sp_core.testing.fake_device import DelayedStreams
from sp_core.transport.host import HostTransport
from sp_core.transport.staged import PipelinedTransport, StagedTransport

DTYPES = ["float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool"]
FLOATS = ["float64", "float32", "float16", "bfloat16"]
TRANSPORTS = ["host", "host in chunks", "staged", "pipelined"]
VIEWS = ["plain", "transposed", "every second", "expanded"]


@dataclass(frozen=True)
class Case:
    """A collective on random small integers, which every dtype adds exactly; shards along `dim` have random lengths."""

    op: str
    dim: int
    other_dim: int
    dtype: str
    view: str
    offset: int
    given_sizes: bool
    non_blocking: bool
    seed: int

    def lengths(self, size: int) -> tuple[int, ...]:
        random = Random(self.seed)
        return tuple(random.randrange(5) for _ in range(size))

    def inputs(self, size: int) -> list[Tensor]:
        """Every rank's input."""
        free = self.op in ("all_gather", "all_to_all", "shift", "gather_replicated")
        total = sum(self.lengths(size))
        return [self._tensor(rank, length if free else total) for rank, length in enumerate(self.lengths(size))]

    def _tensor(self, rank: int, length: int) -> Tensor:
        shape = [3, 4, 2]
        shape[self.dim] = length
        random = torch.Generator().manual_seed(self.seed * 31 + rank)
        x = torch.randint(0, 5, shape, generator=random).to(getattr(torch, self.dtype))
        if self.view == "transposed":
            return x.transpose(0, 2).contiguous().transpose(0, 2)
        if self.view == "every second":
            return torch.repeat_interleave(x, 2, 1)[:, ::2]
        if self.view == "expanded" and shape[2]:
            return x[..., :1].expand(x.shape)
        return x

    def root(self, size: int) -> int:
        return self.offset % size

    def arguments(self, size: int) -> dict[str, Any]:
        sizes = self.lengths(size) if self.given_sizes else None
        match self.op:
            case "all_gather" | "gather_replicated":
                return {"dim": self.dim, "sizes": sizes}
            case "reduce_scatter":
                return {"dim": self.dim - 3, "sizes": sizes}
            case "all_to_all":
                return {"split_dim": self.other_dim, "concat_dim": self.dim, "concat_sizes": sizes}
            case "shift":
                return {"dim": self.dim, "offset": self.offset, "sizes": sizes}
            case "broadcast" | "reduce":
                return {"root": self.root(size)}
            case _:
                return {}

    def expected(self, inputs: list[Tensor], rank: int, size: int) -> Tensor:
        match self.op:
            case "all_gather" | "gather_replicated":
                return torch.cat(inputs, self.dim)
            case "reduce_scatter":
                sizes = self.lengths(size) if self.given_sizes else split_sizes(sum(self.lengths(size)), size)
                return _sum(inputs).split(list(sizes), self.dim)[rank]
            case "all_reduce" | "reduce_from_group":
                return _sum(inputs)
            case "all_to_all":
                parts = split_sizes(inputs[0].shape[self.other_dim], size)
                return torch.cat([x.split(list(parts), self.other_dim)[rank] for x in inputs], self.dim)
            case "shift":
                return inputs[(rank - self.offset) % size]
            case "broadcast":
                return inputs[self.root(size)]
            case "reduce":
                return _sum(inputs) if rank == self.root(size) else torch.zeros_like(inputs[0])
            case _:
                return inputs[rank]

    def call(self, x: Tensor, comm: sp.Communicator) -> Tensor:
        start = getattr(sp, f"{self.op}_start", None)
        if self.non_blocking and start is not None:
            pending = start(x, comm=comm, **self.arguments(comm.size))
            comm.poll()
            return pending.wait()
        return getattr(sp, self.op)(x, comm=comm, **self.arguments(comm.size))


OPS = [
    *["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "shift", "broadcast", "reduce"],
    *["copy_to_group", "reduce_from_group", "gather_replicated"],
]
SUMS = ("reduce_scatter", "all_reduce", "reduce", "copy_to_group", "reduce_from_group")


@st.composite
def cases(draw: st.DrawFn, dtypes: list[str] = DTYPES, ops: list[str] = OPS) -> Case:
    op = draw(st.sampled_from(ops))
    dims = draw(st.permutations([0, 1, 2]))
    dtype = draw(st.sampled_from([name for name in dtypes if name != "bool" or op not in SUMS]))
    return Case(
        op,
        dims[0],
        dims[1],
        dtype,
        draw(st.sampled_from(VIEWS)),
        draw(st.integers(-5, 5)),
        draw(st.booleans()),
        draw(st.booleans()),
        draw(st.integers(0, 999)),
    )


def _sum(tensors: list[Tensor]) -> Tensor:
    return torch.stack([x.double() for x in tensors]).sum(0).to(tensors[0].dtype)


def use(transport: str, comm: sp.Communicator) -> None:
    """Let a communicator move bytes in another way."""
    raw = comm._comm
    host = HostTransport(raw, max_count=7 if transport == "host in chunks" else 2**30)
    if transport == "staged":
        comm.transport = StagedTransport(host)
    elif transport == "pipelined":
        comm.transport = PipelinedTransport(host, DelayedStreams(), comm.size, chunk_bytes=64)
    else:
        comm.transport = host


@pytest.mark.parametrize("transport", TRANSPORTS)
@given(case=cases())
def test_a_collective_equals_its_definition_and_leaves_its_input_alone(comm: Any, transport: str, case: Case) -> None:
    with sp.Mesh(comm, sp=comm.size) as mesh:
        use(transport, mesh["sp"])
        inputs = case.inputs(comm.size)
        mine = inputs[comm.rank]
        result = case.call(mine, mesh["sp"])
        expected = case.expected(case.inputs(comm.size), comm.rank, comm.size)
        assert result.dtype == mine.dtype
        assert result.shape == expected.shape
        assert torch.equal(result, expected)
        assert torch.equal(mine, case.inputs(comm.size)[comm.rank])
        assert (
            result.untyped_storage().data_ptr() != mine.untyped_storage().data_ptr()
            or case.op == "copy_to_group"
            or not mine.numel()
        )


@pytest.mark.parametrize("check", ["agree", "off"])
@given(case=cases(["float64"], ["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "shift", "broadcast", "reduce"]))
def test_backward_is_the_adjoint(comm: Any, check: Any, case: Case) -> None:
    with sp.Mesh(comm, check=check, sp=comm.size) as mesh:
        inputs = case.inputs(comm.size)
        shape = case.expected(inputs, comm.rank, comm.size).shape
        y = torch.randint(-4, 5, shape, generator=torch.Generator().manual_seed(case.seed + comm.rank)).double()
        check_adjoint(comm, lambda x: case.call(x, mesh["sp"]), None, inputs[comm.rank], y)


@given(case=cases(["float64"], ["all_gather", "all_reduce", "gather_replicated"]))
def test_values_held_alike_are_differentiated_once(comm: Any, case: Case) -> None:
    """copy_to_group, then reduce_from_group, is multiplication by P; a gathered value counts once."""
    size = comm.size
    with sp.Mesh(comm, sp=size) as mesh:
        group = mesh["sp"]
        x = case.inputs(size)[comm.rank].clone().requires_grad_()
        if case.op == "gather_replicated":
            whole = sp.gather_replicated(x, comm=group, dim=case.dim)
            weights = torch.arange(whole.numel()).reshape(whole.shape).double()
            (grad,) = torch.autograd.grad(whole, x, weights)
            assert torch.equal(
                grad, weights.split(list(case.lengths(size)), case.dim)[comm.rank] if case.op == "gather_replicated" else weights
            )
            return
        x = torch.ones(3, dtype=torch.float64, requires_grad=True)
        parts = sp.copy_to_group(x, comm=group) * (comm.rank + 1)
        whole = sp.reduce_from_group(parts, comm=group)
        (grad,) = torch.autograd.grad(whole, x, torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64))
        total = size * (size + 1) / 2
        assert torch.equal(whole.detach(), torch.full((3,), total, dtype=torch.float64))
        assert torch.equal(grad, torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64) * total)


@spmd()
def test_gradients_of_many_tensors_are_summed_together(comm: Any) -> None:
    with sp.Mesh(comm, sp=comm.size) as mesh:
        shapes = [
            ((2, 3), torch.float64, True),
            ((4,), torch.float32, True),
            ((), torch.float64, True),
            ((2,), torch.float64, False),
        ]
        tensors = [torch.ones(shape, dtype=dtype, requires_grad=needs) for shape, dtype, needs in shapes]
        mesh["sp"].counters.reset()
        copies = sp.copy_all_to_group(tensors, comm=mesh["sp"])
        sum(((comm.rank + 1 + place) * x.double().sum() for place, x in enumerate(copies)), torch.zeros(())).backward()
        for place, x in enumerate(tensors[:3]):
            expected = sum(rank + 1 + place for rank in range(comm.size))
            assert x.grad is not None
            assert torch.equal(x.grad, torch.full_like(x, expected))
        assert tensors[3].grad is None
        assert mesh["sp"].counters["all_reduce"].calls == 2  # one per dtype


def _gather(x: Tensor, comm: sp.Communicator) -> Tensor:
    return sp.all_gather(x, comm=comm, dim=1)


def _scatter(x: Tensor, comm: sp.Communicator) -> Tensor:
    return sp.reduce_scatter(x, comm=comm, dim=1)


def _exchange(x: Tensor, comm: sp.Communicator) -> Tensor:
    return sp.all_to_all(x, comm=comm, split_dim=1, concat_dim=0)


DIFFERENTIABLE: dict[str, Callable[[Tensor, sp.Communicator], Tensor]] = {
    "all_gather": _gather,
    "reduce_scatter": _scatter,
    "all_reduce": lambda x, comm: sp.all_reduce(x, comm=comm),
    "all_to_all": _exchange,
    "shift": lambda x, comm: sp.shift(x, comm=comm, offset=2),
    "broadcast": lambda x, comm: sp.broadcast(x, comm=comm, root=comm.size - 1),
    "reduce": lambda x, comm: sp.reduce(x, comm=comm, root=comm.size - 1),
    "all_gather_start": lambda x, comm: sp.all_gather_start(x, comm=comm, dim=1).wait(),
}


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("name", sorted(DIFFERENTIABLE))
def test_the_global_map_has_right_first_and_second_derivatives(name: str, size: int) -> None:
    """All shards to all outputs, in one check: per rank it would be wrong, because all ranks perturb at once."""

    def kept(comm: Any, x: Tensor) -> Tensor:
        mesh = sp.Mesh(comm, sp=comm.size)  # the backward needs it: it ends with the threads
        return DIFFERENTIABLE[name](x**3, mesh["sp"])

    random = torch.Generator().manual_seed(size)
    shards = [torch.randn(2, 3, generator=random, dtype=torch.float64, requires_grad=True) for _ in range(size)]
    assert torch.autograd.gradcheck(global_map(kept, size), shards)
    assert torch.autograd.gradgradcheck(global_map(kept, size), shards)


@given(case=cases(["bfloat16", "float16"], ["all_reduce", "reduce_scatter", "reduce"]))
def test_half_types_are_summed_in_float32_and_rounded_once(comm: Any, case: Case) -> None:
    """Within one rounding of the exact sum, and the float32 errors of P summands."""
    dtype = getattr(torch, case.dtype)
    random = torch.Generator().manual_seed(case.seed)
    inputs = [(torch.randn(3, 4, 2, generator=random) * 10 ** (rank % 3)).to(dtype) for rank in range(comm.size)]
    with sp.Mesh(comm, sp=comm.size) as mesh:
        arguments = {"all_reduce": {}, "reduce_scatter": {"dim": case.dim}, "reduce": {"root": case.root(comm.size)}}[case.op]
        result = getattr(sp, case.op)(inputs[comm.rank], comm=mesh["sp"], **arguments)
    exact = torch.stack([x.double() for x in inputs]).sum(0)
    scale = torch.stack([x.double().abs() for x in inputs]).sum(0)
    bound = exact.abs() * torch.finfo(dtype).eps / 2 + scale * comm.size * torch.finfo(torch.float32).eps
    if case.op == "reduce_scatter":
        exact, bound = (x.split(list(split_sizes(x.shape[case.dim], comm.size)), case.dim)[comm.rank] for x in (exact, bound))
    if case.op == "reduce" and comm.rank != case.root(comm.size):
        exact = torch.zeros_like(exact)
    worst = ((result.double() - exact).abs() / bound.clamp_min(torch.finfo(dtype).tiny)).max().item() if exact.numel() else 0.0
    assert worst <= 1.0


@spmd()
def test_max_and_min(comm: Any) -> None:
    with sp.Mesh(comm, sp=comm.size) as mesh:
        x = torch.tensor([float(comm.rank), -float(comm.rank)])
        last = float(comm.size - 1)
        assert sp.all_reduce(x, comm=mesh["sp"], op="max").tolist() == [last, 0.0]
        assert sp.all_reduce(x, comm=mesh["sp"], op="min").tolist() == [0.0, -last]


@spmd()
def test_pending_collectives_may_overlap_and_be_waited_for_in_any_order(comm: Any) -> None:
    with sp.Mesh(comm, sp=comm.size) as mesh:
        group = mesh["sp"]
        for transport in TRANSPORTS:
            use(transport, group)
            x = torch.full((50,), float(comm.rank + 1), requires_grad=True)
            gathered = sp.all_gather_start(x, comm=group)
            summed = sp.all_reduce_start(x * 2, comm=group)
            shifted = sp.shift_start(x, comm=group)
            group.poll()
            total = sum(range(1, comm.size + 1))
            assert shifted.wait()[0].item() == (comm.rank - 1) % comm.size + 1
            assert summed.wait()[0].item() == 2 * total
            assert gathered.wait().sum().item() == 50 * total
            assert gathered.wait() is gathered.wait()
            (grad,) = torch.autograd.grad(gathered.wait().sum() + summed.wait().sum(), x)
            assert torch.equal(grad, torch.full((50,), 3.0 * comm.size))


@given(case=cases(["float64", "bfloat16", "bool"]))
def test_counters_count_the_bytes_that_other_ranks_need(comm: Any, case: Case) -> None:
    size, rank = comm.size, comm.rank
    with sp.Mesh(comm, sp=size) as mesh:
        inputs = case.inputs(size)
        case.call(inputs[rank], mesh["sp"])
        mine, width = inputs[rank].nbytes, inputs[rank].itemsize
        kept = case.expected(inputs, rank, size).nbytes
        own_part = inputs[rank].split(list(split_sizes(inputs[rank].shape[case.other_dim], size)), case.other_dim)[rank].nbytes
        needed = {
            "all_gather": mine * (size - 1),
            "gather_replicated": mine * (size - 1),
            "reduce_scatter": mine - kept,
            "all_reduce": mine if size > 1 else 0,
            "reduce_from_group": mine if size > 1 else 0,
            "reduce": mine if size > 1 and rank != case.root(size) else 0,
            "broadcast": mine * (size - 1) if rank == case.root(size) else 0,
            "all_to_all": mine - own_part,
            "shift": mine if case.offset % size else 0,
            "copy_to_group": 0,
        }[case.op]
        total = mesh["sp"].counters.total()
        assert total.bytes_sent == needed, (case.op, width)
        assert total.calls == (case.op != "copy_to_group")
        assert total.messages == (case.op == "shift" and case.offset % size != 0)
        assert mesh["sp"].counters["control"].calls >= 1
