"""Files of records: appended to so that a crash loses at most the line under way, read so that one bad line costs only itself."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.records.check import MAX_LINE, RecordError, parse, text
from benchmarks.records.types import Record

MAX_FILE = 256 << 20  # bytes
MAX_PROBLEMS = 20  # of one file that are told; a foreign file has one in every line


@dataclass(frozen=True)
class Reading:
    """What a file held.

    Args:
        records: those that are valid, in the order of the file.
        problems: one line of text for each thing that is not, with file and line.
    """

    records: list[Record] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def append(path: Path | str, record: Record | dict[str, Any]) -> None:
    """Add a record to a file, which is created if need be, and bring it to the disk.

    Args:
        path: the file; its folder exists.
        record: a valid record.

    Raises:
        RecordError: it is not valid; nothing has been written.
        OSError: it cannot be written.
    """
    line = text(record)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        rest = memoryview(line if _ends_with_line(descriptor) else b"\n" + line)
        while rest:
            rest = rest[os.write(descriptor, rest) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read(path: Path | str) -> Reading:
    """All records of a file that can be used, and what is wrong with the rest.

    Args:
        path: a file of JSON lines, from whomever.

    Returns:
        Records and problems; never an exception for what the file holds, or because it is not there.
    """
    path, found, unsaid = Path(path), Reading(), 0
    try:
        for number, line in _lines(path):
            try:
                found.records.append(parse(line))
            except RecordError as error:
                unsaid += len(found.problems) >= MAX_PROBLEMS
                found.problems.extend([f"{path}, line {number}: {error}"] if len(found.problems) < MAX_PROBLEMS else [])
    except (OSError, RecordError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        found.problems.append(f"{path}: {reason}")
    if unsaid:
        found.problems.append(f"{path}: {unsaid} more lines cannot be used.")
    return found


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Number and text of every line that is not empty; one too long is cut where `parse` refuses it."""
    if path.exists() and not path.is_file():  # a pipe would keep the reader waiting for ever
        raise RecordError("this is no ordinary file.")
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > MAX_FILE:
            raise RecordError(f"the file has {size} bytes, {MAX_FILE} are allowed. Split it.")
        number = 0
        while line := file.readline(MAX_LINE + 2):
            number += 1
            whole = line
            while not whole.endswith(b"\n") and (whole := file.readline(MAX_LINE)):
                pass
            if line.strip():
                yield number, line.rstrip(b"\r\n")


def _ends_with_line(descriptor: int) -> bool:
    """Whether what is written next begins a line: a writer that was killed may have left half of one."""
    size = os.fstat(descriptor).st_size
    return size == 0 or os.pread(descriptor, 1, size - 1) == b"\n"
