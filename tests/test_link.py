"""The model of a link: when messages arrive, by a clock of the test; and what it refuses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given as drawn, strategies as st
from oracle.link import LinkModel

import sp_core as sp
from sp_core.testing import spmd
from sp_core.transport import Done

LATENCY, RATE = 1e-3, 1e6
SIZES = st.lists(st.integers(0, 10_000), min_size=1, max_size=6)


class Instant:
    """A host whose messages are there at once; what is sent is what is received."""

    def __init__(self) -> None:
        self._mail: list[Any] = []

    def announce(self, sends: Any, recvs: Any) -> None:
        pass

    def bind(self, messages: Sequence[tuple[int, torch.Tensor]]) -> Any:
        return messages

    def post(self, sends: Any, recvs: Any, tag: int) -> Done:
        self._mail += [x.clone() for _, x in sends]
        for _, x in recvs:
            x.copy_(self._mail.pop(0))
        return Done()


def sender(clock: Mock) -> LinkModel:
    return LinkModel(LATENCY, RATE, clock)


@drawn(sizes=SIZES)
def test_one_message_after_the_other_on_a_wire(sizes: list[int]) -> None:
    """All bytes of a sender take their time, however they are cut; then comes the latency."""
    clock = Mock(return_value=100.0)
    out, into = sender(clock), sender(clock)
    departures = [out.leaves(n) for n in sizes]
    assert departures[-1] == pytest.approx(100 + sum(sizes) / RATE, abs=1e-9)
    arrivals = [into.arrives(left, n) for left, n in zip(departures, sizes, strict=True)]
    assert arrivals == sorted(arrivals)
    assert arrivals[-1] == pytest.approx(100 + sum(sizes) / RATE + LATENCY, abs=1e-9)


@drawn(sizes=SIZES)
def test_senders_share_the_wire_of_their_receiver(sizes: list[int]) -> None:
    """Messages of different ranks leave together and arrive one after the other."""
    clock = Mock(return_value=100.0)
    into = sender(clock)
    arrivals = [into.arrives(sender(clock).leaves(n), n) for n in sizes]
    assert max(arrivals) == pytest.approx(100 + LATENCY + sum(sizes) / RATE, abs=1e-9)


def test_an_idle_wire_forgets() -> None:
    clock = Mock(return_value=100.0)
    out = sender(clock)
    assert out.leaves(1000) == pytest.approx(100.001)
    clock.return_value = 105.0
    assert out.leaves(1000) == pytest.approx(105.001)


def test_a_message_is_there_when_its_time_has_come_and_not_before() -> None:
    """It is complete for its sender when it has left, for its receiver when it has arrived."""
    clock, host = Mock(return_value=100.0), cast("Any", Instant())
    one, other = (sender(clock).over(host) for _ in range(2))
    x, y = torch.arange(250.0), torch.zeros(250)
    sent = one.exchange([(1, x)], [])
    received = other.exchange([], [(0, y)])
    for ms, left, arrived in (
        (0.0, False, False),
        (0.9, False, False),
        (1.1, True, False),
        (1.9, True, False),
        (2.1, True, True),
    ):
        clock.return_value = 100 + ms * 1e-3
        assert (sent.test(), received.test()) == (left, arrived), ms
    assert torch.equal(x, y)


@spmd()
def test_what_the_model_cannot_see_is_refused_on_every_rank(comm: Any) -> None:
    with sp.Mesh(comm, sp=comm.size, transport=LinkModel(1e-4, 1e7)) as mesh:
        with pytest.raises(sp.DeviceError, match=r"carries messages only.*algorithm='ring'"):
            sp.all_reduce(torch.ones(3), comm=mesh["sp"], algorithm="mpi")
        assert (
            sp.all_reduce(torch.ones(3), comm=mesh["sp"], algorithm="ring").sum() == 3 * comm.size
        )


@pytest.mark.parametrize(("latency", "rate"), [(-1.0, 1.0), (0.0, 0.0), (0.0, float("nan"))])
def test_a_link_that_cannot_be_is_refused(latency: float, rate: float) -> None:
    with pytest.raises(ValueError, match="pass a latency >= 0 and a rate > 0"):
        LinkModel(latency, rate)
