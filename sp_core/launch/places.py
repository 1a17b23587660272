"""Find the line of a program that a call came from: in the library, and in the test."""

from __future__ import annotations

import functools
import os
import sys
import sysconfig
from pathlib import Path
from types import FrameType

LIBRARY = Path(__file__).parent.parent
KIT = tuple(f"{LIBRARY / name}{os.sep}" for name in ("launch", "testing"))
_FOREIGN = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib"))


@functools.lru_cache(1024)
def owner(filename: str) -> str:
    """Return whose code a file is.

    "kit", "library", "foreign" (Python and installed packages) or "test".
    """
    path = os.path.abspath(filename)
    if path.startswith(KIT):
        return "kit"
    if path.startswith(f"{LIBRARY}{os.sep}"):
        return "library"
    foreign = path.startswith(_FOREIGN) or filename.startswith("<")
    return "foreign" if foreign or filename.endswith((".pxi", ".pyx")) else "test"


@functools.lru_cache(1024)
def short(filename: str) -> str:
    """Return the last two parts of a path."""
    return os.sep.join(Path(filename).parts[-2:])


def here() -> str:
    """Return file and line of the innermost call outside `sp_core.testing`, and of the test."""
    inner = ""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        filename = frame.f_code.co_filename
        who = owner(filename)
        if who == "test" or (who == "library" and not inner):
            place = f"{short(filename)}:{frame.f_lineno}"
            if who == "test":
                return f"{inner} (called from {place})" if inner else place
            inner = place
        frame = frame.f_back
    return inner or "an unknown place"
