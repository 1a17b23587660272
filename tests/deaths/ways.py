"""List the ways in which a rank can be lost, and the places at which it is lost."""

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
"""Places at which a rank is lost.

While tests are collected; before, inside and after a collective of an example; when the fixtures of
a test are torn down.
"""


def raise_an_error() -> None:
    """Raise an error, as an ordinary bug does."""
    raise LookupError("this rank is lost")


def spin() -> None:
    """Loop for ever."""
    while True:
        pass


def exhaust_memory() -> None:
    """Limit the memory of this process, to protect the machine, and allocate until MemoryError."""
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
"""Ways after which the rank runs no more code, so that it cannot write its stack."""
RAISED = ("exception", "sys.exit(0)", "sys.exit(3)", "out of memory")
"""Ways that are ordinary failures of a test: its example is shrunk, and the session goes on."""
