"""Read text that is on every machine: the source of Python's library."""

import os
import sysconfig
from functools import cache
from pathlib import Path

SKIPPED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


@cache
def source_files() -> list[bytes]:
    """Return the standard library's .py files that are not empty, folder by folder.

    Raises:
        RuntimeError: no source was found, as in an interpreter that ships only compiled modules.
    """
    library, found = sysconfig.get_path("stdlib"), list[bytes]()
    for folder, names, files in os.walk(library):
        names[:] = sorted({*names} - SKIPPED)
        texts = (Path(folder, name).read_bytes() for name in sorted(files) if name.endswith(".py"))
        found += filter(None, texts)
    if not found:
        raise RuntimeError(
            f"no .py files under {library}: this Python has no source of its standard library."
        )
    return found


def source_bytes(count: int) -> bytes:
    """Return `count` bytes of Python's standard library source, repeated if it is too short."""
    text = b"".join(source_files())
    return (text * -(-count // len(text)))[:count]
