"""Test the model of a link: when messages arrive by the test's clock, and what it refuses."""

from functools import partial
from typing import Any
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


def instant() -> Mock:
    """Make a host transport that delivers messages at once, in the order in which they are sent."""
    mail = list[torch.Tensor]()

    def post(sends: Any, recvs: Any, tag: int) -> Done:
        mail.extend(x.clone() for _, x in sends)
        for _, x in recvs:
            x.copy_(mail.pop(0))
        return Done()

    return Mock(post=post, bind=lambda messages: messages)


def wires(count: int) -> tuple[Mock, list[LinkModel]]:
    """Make a clock that the test sets, and `count` wires that read it."""
    clock = Mock(return_value=100.0)
    return clock, [LinkModel(LATENCY, RATE, clock) for _ in range(count)]


@pytest.mark.parametrize("senders", [1, 6], ids="{} senders".format)
@drawn(sizes=SIZES)
def test_one_message_after_the_other_on_a_wire(senders: int, sizes: list[int]) -> None:
    """A sender's bytes take as long in many messages as in one. The latency comes once, at the end.

    Messages of different senders leave at the same time and share the wire of their receiver. If
    a wire was idle, earlier messages do not delay later ones.
    """
    clock, (into, *out) = wires(1 + senders)
    for start in (100.0, 105.0):
        clock.return_value = start
        departures = [out[i % senders].leaves(n) for i, n in enumerate(sizes)]
        last = start + (sum(sizes) if senders == 1 else max(sizes)) / RATE
        assert max(departures) == pytest.approx(last, abs=1e-9)
        arrivals = [into.arrives(left, n) for left, n in zip(departures, sizes, strict=True)]
        assert arrivals == sorted(arrivals)
        assert arrivals[-1] == pytest.approx(start + sum(sizes) / RATE + LATENCY, abs=1e-9)


def test_a_message_is_there_when_its_time_has_come_and_not_before() -> None:
    """A send is complete when the message has left, a receive when the message has arrived."""
    (clock, links), host = wires(2), instant()
    one, other = (link.over(host) for link in links)
    x, y = torch.arange(250.0), torch.zeros(250)
    sent, received = one.exchange([(1, x)], []), other.exchange([], [(0, y)])
    for ms in (0.0, 0.9, 1.1, 1.9, 2.1):
        clock.return_value = 100 + ms * 1e-3
        assert (sent.test(), received.test()) == (ms > 1, ms > 2)
    assert torch.equal(x, y)


@spmd()
def test_what_the_model_cannot_see_is_refused_on_every_rank(comm: Any) -> None:
    with sp.Mesh(comm, sp=comm.size, transport=LinkModel(1e-4, 1e7)) as mesh:
        call, x = partial(sp.all_reduce, comm=mesh["sp"]), torch.ones(3)
        with pytest.raises(sp.DeviceError, match=r"carries messages only.*algorithm='ring'"):
            call(x, algorithm="mpi")
        assert call(x, algorithm="ring").sum() == 3 * comm.size


@pytest.mark.parametrize(("latency", "rate"), [(-1.0, 1.0), (0.0, 0.0), (0.0, float("nan"))])
def test_a_link_that_cannot_be_is_refused(latency: float, rate: float) -> None:
    with pytest.raises(ValueError, match="pass a latency >= 0 and a rate > 0"):
        LinkModel(latency, rate)
