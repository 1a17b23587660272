"""The staged path against a device that does everything as late as it can."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from oracle.attention_check import check_attention
from oracle.collective_cases import Case, cases
from oracle.fake_device import DelayedMemory, DelayedStreams
from oracle.strategies import AttentionProblem, attention_problems

import sp_core as sp
from sp_core.schedules import operation
from sp_core.schemes import SCHEMES
from sp_core.testing import given, run_threads
from sp_core.transport.host import HostTransport
from sp_core.transport.staged import PipelinedTransport
from sp_core.transport.window import Window

OPS = ["all_gather", "reduce_scatter", "all_reduce", "shift", "broadcast", "reduce"]


def pipelined(
    comm: sp.Communicator, streams: DelayedStreams, chunk_bytes: int
) -> PipelinedTransport:
    return PipelinedTransport(
        HostTransport(comm._comm), streams, comm.size, chunk_bytes=chunk_bytes
    )


@given(
    case=cases(["float64", "bfloat16"], OPS),
    chunk_bytes=st.sampled_from([1, 64, 200, 10**6]),
    polls=st.integers(0, 4),
)
def test_results_are_right_however_late_the_device_is(
    comm: Any, case: Case, chunk_bytes: int, polls: int
) -> None:
    """The input is computed late, copies run late, and the results are read after them."""
    case = replace(case, dim=0, view="plain")
    streams = DelayedStreams(polls=polls, lazy=True)
    with sp.Mesh(comm, sp=comm.size) as mesh:
        mesh["sp"].transport = pipelined(mesh["sp"], streams, chunk_bytes)
        inputs = case.inputs(comm.size)
        for _ in range(2):  # the second call finds the buffers of the first
            x = torch.full_like(inputs[comm.rank], torch.nan)
            streams.compute(functools.partial(x.copy_, inputs[comm.rank]))
            result = case.call(x, mesh["sp"])
            streams.begin()
            streams.settle()
            stays = case.op == "shift" and case.offset % comm.size == 0
            if stays or (case.op == "broadcast" and comm.rank == case.root(comm.size)):
                result = x  # what stays at a rank is copied by the device, not by the transport
            assert torch.equal(result, case.expected(inputs, comm.rank, comm.size))


@pytest.mark.parametrize("name", sorted(SCHEMES))
@given(
    max_examples=8,
    problem=attention_problems(17),
)
def test_schemes_do_not_know_that_they_share_memory_of_a_device(
    comm: Any, name: str, problem: AttentionProblem
) -> None:
    """Staged and pipelined messages carry schemes in `domains/attention.py`."""
    with sp.Mesh(comm, sp=comm.size) as mesh:
        group = mesh["sp"]
        group.transport = pipelined(group, DelayedStreams(), 256)
        group.window = Window(group._comm, 256, DelayedMemory())
        check_attention(
            name,
            functools.partial(SCHEMES[name], comm=group),
            problem,
            group,
        )


class Failing(HostTransport):
    """A host transport that fails."""

    def start(self, *arguments: Any) -> Any:
        raise OSError("the network is gone")


def test_a_failed_transfer_fails_everything_behind_it_and_again_when_asked_again() -> None:
    def body(comm: Any) -> None:
        with sp.Mesh(comm, sp=comm.size) as mesh:
            streams = DelayedStreams()
            transport = PipelinedTransport(Failing(mesh["sp"]._comm), streams, comm.size)
            x, y = torch.ones(5), torch.full((5,), -1.0)
            handles: list[Any] = []
            for _ in range(2):
                try:
                    handles.append(transport.start(operation("all_reduce", 0, 1, (5,)), x, y))
                except OSError:
                    handles.append(None)
            for handle in handles:
                for _ in range(6):
                    if handle is None:
                        continue
                    try:
                        assert not handle.test()
                    except OSError:
                        break
                else:
                    assert handle is None
                if handle is not None:
                    with pytest.raises(OSError, match="network"):
                        handle.test()

    run_threads(1, body)
