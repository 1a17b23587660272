"""Where in the source a call came from: the line in the library, and the line in the test."""

from __future__ import annotations

import functools
import os
import sys
import sysconfig
from pathlib import Path
from types import FrameType

KIT = str(Path(__file__).parent)
LIBRARY = str(Path(__file__).parent.parent)
_FOREIGN = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib"))


@functools.cache
def owner(filename: str) -> str:
    """Whose code a file is: "kit", "library", "foreign" (Python and installed packages) or "test"."""
    path = os.path.abspath(filename)
    if path.startswith(KIT + os.sep):
        return "kit"
    if path.startswith(LIBRARY + os.sep):
        return "library"
    return "foreign" if filename.startswith("<") or path.startswith(_FOREIGN) else "test"


@functools.cache
def short(filename: str) -> str:
    """The last two parts of a path: enough to find the file, short enough for a table."""
    return os.sep.join(Path(filename).parts[-2:])


def here() -> str:
    """The innermost line outside the kit, and the line of the test below it where that is another one."""
    inner = outer = ""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        filename = frame.f_code.co_filename
        who = owner(filename)
        if who in ("library", "test"):
            place = f"{short(filename)}:{frame.f_lineno}"
            inner = inner or place
            if who == "test":
                outer = place
                break
        frame = frame.f_back
    if not inner:
        return "an unknown place"
    return inner if inner == outer or not outer else f"{inner} (called from {outer})"
