"""Let pytest, or a program, use the device `late`: `-p device.plugin --sp-device late`."""

from __future__ import annotations

import faulthandler

import pytest

from device import group
from device.build import NAME as NAME, library, load
from sp_core import transport
from sp_core.attention import kernels
from sp_core.transport import cuda

TRANSPORTS = ("ipc", "pinned", "pipelined", "staged")
SLOT_BYTES = 1 << 11
"""Of windows, so that tensors of tests need several."""


def use() -> None:
    """Make torch know the device, and sp_core take it for one like CUDA, with CUDA's runtime."""
    load()
    group.register()
    vars(cuda)["loaded_library"] = lambda name: str(library())
    transport.NAMES[NAME] = TRANSPORTS
    transport.MESSAGES[NAME] = transport.MESSAGES["cuda"]
    kernels.FUSED.add(NAME)
    vars(transport).update(DEVICE_SLOT_BYTES=SLOT_BYTES, PINNED_SLOT_BYTES=SLOT_BYTES)


@pytest.hookimpl(trylast=True)
def pytest_configure() -> None:
    """Report host accesses of device memory, before pytest's own report."""
    if not faulthandler.is_enabled():
        faulthandler.enable()
    load().late_report_faults()


use()
