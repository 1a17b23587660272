"""The ways in which a rank can be lost, and the points at which."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path

ROOM_BYTES = 256 << 20
BLOCK_BYTES = 16 << 20
PLACES = ("collection", "before", "inside", "after", "tear-down")
"""While tests are collected.

Before, in and after a collective of a body; when the fixtures of a test are torn down.
"""


def raise_an_error() -> None:
    """An ordinary bug."""
    raise LookupError("this rank is lost")


def spin() -> None:
    """Never come back."""
    while True:
        pass


def exhaust_memory() -> None:
    """Take more than this process may have; the machine is not harmed."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(
        resource.RLIMIT_AS,
        (pages * os.sysconf("SC_PAGE_SIZE") + ROOM_BYTES, resource.RLIM_INFINITY),
    )
    blocks = []
    while True:
        blocks.append(bytearray(BLOCK_BYTES))


WAYS: dict[str, Callable[[], object]] = {
    "exception": raise_an_error,
    "sys.exit(0)": lambda: sys.exit(0),
    "sys.exit(3)": lambda: sys.exit(3),
    "os._exit(0)": lambda: os._exit(0),
    "os._exit(3)": lambda: os._exit(3),
    "SIGKILL": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "SIGSTOP": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "endless loop": spin,
    "abort": os.abort,
    "segmentation fault": lambda: ctypes.string_at(0),
    "out of memory": exhaust_memory,
}
SILENT = ("os._exit(0)", "os._exit(3)", "SIGKILL")
"""After these no code of the rank runs any more that could write its stack."""
RAISED = ("exception", "sys.exit(0)", "sys.exit(3)", "out of memory")
"""These are failures of a test as any other: it is shrunk, and the session goes on."""
STUCK = ("SIGSTOP", "endless loop")
"""These end with a time limit."""
