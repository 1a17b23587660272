"""Let pytest, or a program, use the device `late`: `-p device.plugin --sp-device late`."""

import faulthandler

import pytest

from device import group
from device.build import NAME as NAME, library, load
from sp_core import transport
from sp_core.attention import cuda as attention_cuda, kernels
from sp_core.transport import cuda

TRANSPORTS = ("ipc", "pinned", "pipelined", "staged")
SLOT_BYTES = 1 << 11
"""Size of a window's slot in bytes, so small that tensors of tests need several slots."""
CAPABILITY = (9, 0)
"""The compute capability that sp_core sees: that of an H100."""


def use() -> None:
    """Register the device with torch, and make sp_core treat it like CUDA, with CUDA's runtime."""
    load()
    group.register()
    vars(cuda)["loaded_library"] = lambda name: str(library())
    transport.NAMES[NAME] = TRANSPORTS
    transport.MESSAGES[NAME] = transport.MESSAGES["cuda"]
    kernels.FUSED.add(NAME)
    vars(attention_cuda)["capability"] = lambda device: CAPABILITY
    vars(transport).update(DEVICE_SLOT_BYTES=SLOT_BYTES, PINNED_SLOT_BYTES=SLOT_BYTES)


@pytest.hookimpl(trylast=True)
def pytest_configure() -> None:
    """Make host accesses of device memory print a message before faulthandler's stacks."""
    if not faulthandler.is_enabled():
        faulthandler.enable()
    load().late_report_faults()


use()
