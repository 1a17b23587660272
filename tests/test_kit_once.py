"""What all ranks need is computed once in a process. A GPU has the transports that are there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from oracle.once import KEPT, contents, once
from oracle.ways import offered

from sp_core.testing import run_threads


def test_ranks_that_are_threads_share_a_result() -> None:
    made: list[int] = []

    def body(comm: Any) -> object:
        def make() -> object:
            made.append(comm.rank)
            return object()

        return once(("test of once", id(made)), make)

    assert len(set(run_threads(4, body))) == len(made) == 1


def test_another_key_is_computed_and_the_oldest_forgotten() -> None:
    made: list[int] = []
    for number in (*range(KEPT + 1), KEPT, 0):
        once(("numbers", id(made), number), lambda number=number: made.append(number))  # type: ignore[misc]
    assert made == [*range(KEPT + 1), 0]


def test_contents_are_dtype_shape_and_bits() -> None:
    x = torch.tensor([0.0, 1.0])
    assert contents(x) == contents(x.clone()) == contents(torch.stack((x, x), 1)[:, 0])
    others = [x.double(), x.view(2, 1), torch.tensor([-0.0, 1.0]), x[:1], None]
    assert len({contents(other) for other in (x, *others)}) == 6


@pytest.mark.parametrize(
    ("named", "drawn"),
    [
        ("", ("ipc", "pinned", "pipelined", "staged")),
        ("host", ("ipc", "pinned", "pipelined", "staged")),
        ("device", ("device",)),
    ],
)
def test_tests_on_a_gpu_draw_transports_that_are_there_or_the_one_that_is_named(
    named: str, drawn: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SP_TRANSPORT", named)
    assert offered("cuda") == drawn
