"""Every collective equals its definition and is counted, over every transport that needs no device."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from kit.narrow import narrow_transport
from oracle.collective_cases import Case, cases
from oracle.fake_device import DelayedStreams

import sp_core as sp
from sp_core.collectives import build
from sp_core.sharding import split_sizes
from sp_core.testing import given, spmd
from sp_core.transport.host import HostTransport
from sp_core.transport.staged import PipelinedTransport, StagedTransport

DEFAULTS = {
    "dim": 0,
    "root": 0,
    "offset": 1,
    "op": "sum",
    "algorithm": "auto",
    "deterministic": False,
    "sizes": None,
    "split_sizes": None,
    "concat_sizes": None,
}
TRANSPORTS = ["host", "host in chunks", "staged", "pipelined"]


def use(transport: str, comm: sp.Communicator) -> None:
    """Let a communicator move bytes in another way."""
    raw = comm._comm
    host = narrow_transport(raw, 7) if transport == "host in chunks" else HostTransport(raw)
    if transport == "staged":
        comm.transport = StagedTransport(host)
    elif transport == "pipelined":
        comm.transport = PipelinedTransport(host, DelayedStreams(), comm.size, chunk_bytes=64)
    else:
        comm.transport = host


@pytest.mark.parametrize("transport", TRANSPORTS)
@given(case=cases())
def test_a_collective_equals_its_definition_and_leaves_its_input_alone(
    comm: Any, transport: str, case: Case
) -> None:
    with sp.Mesh(comm, sp=comm.size) as mesh:
        use(transport, mesh["sp"])
        inputs = case.inputs(comm.size)
        mine = inputs[comm.rank]
        result = case.call(mine, mesh["sp"])
        expected = case.expected(case.inputs(comm.size), comm.rank, comm.size)
        assert result.dtype == mine.dtype
        torch.testing.assert_close(
            result, expected, rtol=0, atol=0, msg=lambda text: f"{case.op} over {transport}: {text}"
        )
        assert torch.equal(mine, case.inputs(comm.size)[comm.rank])
        assert (
            result.untyped_storage().data_ptr() != mine.untyped_storage().data_ptr()
            or case.op == "copy_to_group"
            or not mine.numel()
        )


@given(case=cases(["bfloat16", "float16"], ["all_reduce", "reduce_scatter", "reduce"]))
def test_half_types_are_summed_in_float32_and_rounded_once(comm: Any, case: Case) -> None:
    """Within one rounding of the exact sum, and the float32 errors of P summands."""
    dtype = getattr(torch, case.dtype)
    random = torch.Generator().manual_seed(case.seed)
    inputs = [
        (torch.randn(3, 4, 2, generator=random) * 10 ** (rank % 3)).to(dtype)
        for rank in range(comm.size)
    ]
    with sp.Mesh(comm, sp=comm.size) as mesh:
        arguments = {
            "all_reduce": {},
            "reduce_scatter": {"dim": case.dim},
            "reduce": {"root": case.root(comm.size)},
        }[case.op]
        result = getattr(sp, case.op)(inputs[comm.rank], comm=mesh["sp"], **arguments)
    exact = torch.stack([x.double() for x in inputs]).sum(0)
    scale = torch.stack([x.double().abs() for x in inputs]).sum(0)
    bound = (
        exact.abs() * torch.finfo(dtype).eps / 2
        + scale * comm.size * torch.finfo(torch.float32).eps
    )
    if case.op == "reduce_scatter":
        exact, bound = (
            x.split(list(split_sizes(x.shape[case.dim], comm.size)), case.dim)[comm.rank]
            for x in (exact, bound)
        )
    if case.op == "reduce" and comm.rank != case.root(comm.size):
        exact = torch.zeros_like(exact)
    worst = (
        ((result.double() - exact).abs() / bound.clamp_min(torch.finfo(dtype).tiny)).max().item()
        if exact.numel()
        else 0.0
    )
    assert worst <= 1.0, (
        f"{case.op} in {case.dtype}: {worst:.3g} times the error of a float32 sum that is rounded once"
    )


def test_an_argument_that_is_left_out_means_the_same_everywhere() -> None:
    """Also to `plan`, which passes on what it was given."""
    public = [getattr(sp, name) for name in sp.__all__]
    signatures = [inspect.signature(call).parameters for call in public if inspect.isfunction(call)]
    taking = [parameters.values() for parameters in signatures if "algorithm" in parameters]
    assert len(taking) > 13
    planned = {
        (name, value)
        for kind in build.KINDS.values()
        for name, value in kind.arguments.items()
        if value is not build.NEEDED
    }
    called = {
        (p.name, p.default) for parameters in taking for p in parameters if p.default is not p.empty
    }
    assert called == planned | {("algorithm", "auto")} == set(DEFAULTS.items())


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
