"""Read text that is on every machine: the source of Python's library."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from functools import cache
from pathlib import Path

SKIPPED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


@cache
def source_files() -> list[bytes]:
    """Return the standard library's .py files that are not empty, in the order of their names.

    Raises:
        RuntimeError: no source was found, as in an interpreter that ships only compiled modules.
    """
    library = Path(sysconfig.get_path("stdlib"))
    found = [text for text in _sources(library) if text]
    if not found:
        raise RuntimeError(
            f"no .py files under {library}: this Python has no source of its standard library."
        )
    return found


def source_bytes(count: int) -> bytes:
    """Return the first `count` bytes of the library's source; at its end it starts again."""
    text = b"".join(source_files())
    return (text * -(-count // len(text)))[:count]


def _sources(folder: Path) -> Iterator[bytes]:
    for path in sorted(folder.iterdir()):
        if path.is_dir() and path.name not in SKIPPED:
            yield from _sources(path)
        elif path.suffix == ".py" and path.is_file():
            yield path.read_bytes()
