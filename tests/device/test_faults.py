"""Every planted fault of the code for CUDA is seen on the device; without them nothing is."""

import sys
from typing import Any

import pytest

from device.faults import FAULTS, LAWS
from sp_core.launch.bounded import bounded
from sp_core.testing import spmd


@pytest.mark.parametrize("name", sorted({*LAWS} - {"device"}))  # needs MPI that reads devices
@spmd(2, 4)
def test_the_laws_hold(comm: Any, name: str) -> None:
    LAWS[name](comm)


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_seen(name: str) -> None:
    fault = FAULTS[name]
    code, output = bounded([sys.executable, "-m", "device.faults", name])
    assert code == fault.ends, output
    assert fault.says in output
