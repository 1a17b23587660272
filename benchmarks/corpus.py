"""The input of the experiment: real text that is on every machine, the source of Python's own standard library."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from functools import cache
from pathlib import Path

SKIPPED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


@cache
def source_bytes(count: int) -> bytes:
    """The first `count` bytes of the standard library's .py files, in the order of their names.

    Args:
        count: number of bytes; where the library is shorter, it starts again.

    Raises:
        RuntimeError: no source was found, as in an interpreter that ships only compiled modules.
    """
    library = Path(sysconfig.get_path("stdlib"))
    text = b"".join(_until(_sources(library), count))
    if not text:
        raise RuntimeError(f"no .py files under {library}: this Python has no source of its standard library.")
    return (text * -(-count // len(text)))[:count]


def source_files() -> list[bytes]:
    """The contents of the standard library's .py files that are not empty, in the order of their names.

    Raises:
        RuntimeError: no source was found, as in an interpreter that ships only compiled modules.
    """
    library = Path(sysconfig.get_path("stdlib"))
    found = [text for text in _sources(library) if text]
    if not found:
        raise RuntimeError(f"no .py files under {library}: this Python has no source of its standard library.")
    return found


def _sources(folder: Path) -> Iterator[bytes]:
    for path in sorted(folder.iterdir()):
        if path.is_dir() and path.name not in SKIPPED:
            yield from _sources(path)
        elif path.suffix == ".py" and path.is_file():
            yield path.read_bytes()


def _until(pieces: Iterator[bytes], count: int) -> Iterator[bytes]:
    for piece in pieces:
        yield piece
        count -= len(piece)
        if count <= 0:
            return
