"""Every collective equals its definition, over every transport that needs no device."""

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
from sp_core.testing import given
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


def test_an_argument_that_is_left_out_means_the_same_everywhere() -> None:
    """Also to `plan`, which passes on what it was given."""
    public = [getattr(sp, name) for name in dir(sp)]
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
