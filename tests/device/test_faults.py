"""Every planted fault of the code for CUDA is seen on the device; without them nothing is."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import pytest

import sp_core as sp
from device.faults import (
    DOCUMENTS,
    FAULTS,
    HALF_MASKED,
    PIPELINED,
    WINDOW,
    attention,
    backward,
    message,
)
from sp_core.machine import bounded
from sp_core.testing import spmd

LAWS: dict[str, Any] = {
    "pipelined": PIPELINED,
    "window": WINDOW,
    "attention": attention,
    "ring in a window": partial(attention, transport="ipc"),
    "masked": partial(attention, mask=sp.Mask(window=5)),
    "message": partial(message, transport="ipc"),
    "pinned message": partial(message, transport="pinned"),
    "documents": DOCUMENTS,
    "half": partial(attention, head_dim=8, dtype="bfloat16"),
    "half, masked": HALF_MASKED,
    "all_gather": partial(backward, op="all_gather"),
    "all_reduce": partial(backward, op="all_reduce"),
}


@pytest.mark.parametrize("name", LAWS)
@spmd(2, 4)
def test_the_laws_hold(comm: Any, name: str) -> None:
    LAWS[name](comm)


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_seen(name: str) -> None:
    fault = FAULTS[name]
    code, output = bounded([sys.executable, "-m", "device.faults", name])
    assert code == fault.ends, output
    assert fault.says in output
