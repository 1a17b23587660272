"""Find the source line that a call came from, in the library and in the test.

Every source file has an owner: "kit" (`sp_core.launch` and `sp_core.testing`), "library" (the rest
of sp_core), "foreign" (Python, installed packages and Cython) or "test" (every other file).
"""

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
    """Return the owner of a source file: "kit", "library", "foreign" or "test"."""
    path = os.path.abspath(filename)
    if path.startswith(KIT):
        return "kit"
    if path.startswith(f"{LIBRARY}{os.sep}"):
        return "library"
    foreign = path.startswith(_FOREIGN) or filename.startswith("<")
    return "foreign" if foreign or filename.endswith((".pxi", ".pyx")) else "test"


@functools.lru_cache(1024)
def short(filename: str) -> str:
    """Return the last two parts of a path, such as "sp_core/mesh.py"."""
    return os.sep.join(Path(filename).parts[-2:])


def here() -> str:
    """Return the place of the innermost caller in the library or the test, as "file:line".

    After a place in the library the test's is added: "file:line (called from file:line)". Frames of
    the kit and foreign frames are skipped. Without any place return "an unknown place".
    """
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
