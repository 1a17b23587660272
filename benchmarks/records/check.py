"""From one line of text to one checked record, and back."""

from __future__ import annotations

import io
import math
import os
import re
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.files import ForeignError, read_bytes
from benchmarks.records.types import MEASURED, Record

MAX_LINE = 1 << 20  # bytes; 10,000 samples of three kinds are about 600 KiB
MAX_REASON = 4000  # characters, as in `Reason`
SHOWN = 160  # characters of a value that an error repeats
# relative; a median that is written and one that is computed again differ by rounding only
CLOSE = 1e-9
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_DECODER = msgspec.json.Decoder(Record)


class RecordError(ValueError):
    """A record that cannot be used; the text says where in it and why."""


def parse(line: bytes) -> Record:
    """Read the record that a line holds.

    Args:
        line: UTF-8 text of one JSON object, without the end of line.

    Raises:
        RecordError: the line is no JSON, has a number that is not finite, is too long, or is no
            record. Of a key that is there twice the last value counts.
    """
    if len(line) > MAX_LINE:
        raise RecordError(f"the line has {len(line)} bytes, {MAX_LINE} are allowed.")
    try:
        record = _DECODER.decode(line)
    except msgspec.ValidationError as error:
        raise RecordError(short(error)) from error
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise RecordError(f"no JSON: {short(error)}") from error
    contradiction = next(_contradictions(record), None)
    if contradiction is not None:
        raise RecordError(contradiction)
    return record


def text(record: Record | dict[str, Any]) -> bytes:
    """Return a valid record as one line.

    Raises:
        RecordError: it is not valid, holds a number that is not finite, or is too long.
    """
    try:
        line = msgspec.json.encode(record)
    except (ValueError, TypeError, RecursionError) as error:
        raise RecordError(f"no JSON: {short(error)}") from error
    parse(line)
    return line + b"\n"


def reason(told: str) -> str:
    """Return any text as a record's reason: cut, without control characters."""
    plain = _ESCAPES.sub("", told).encode(errors="replace").decode()
    return (
        "".join(c if c == "\n" or c.isprintable() else " " for c in plain).strip()[:MAX_REASON]
        or "no text"
    )


def _contradictions(record: Record) -> Iterator[str]:
    """Parts of a well-formed record that do not fit together."""
    case, timing = record.case, record.timing
    if math.prod(case.mesh.values()) != case.ranks:
        yield f"$.case: the mesh {case.mesh} has not {case.ranks} ranks."
    if record.status not in MEASURED:
        if not record.reason:
            yield f"$.reason: a record whose status is {record.status} needs one."
    else:
        parts = ("device", "transport", "env", "timing", "phases", "comm")
        missing = [name for name in parts if getattr(record, name) is None]
        yield from (
            f"$.{name}: a record whose status is {record.status} needs it." for name in missing
        )
    if record.phases is not None and "total" not in record.phases:
        yield "$.phases: there is no total."
    if timing is None:
        return
    lengths = {"samples_s": timing.iterations, "max_local_s": timing.iterations}
    for name, length in {**lengths, "per_rank_median_s": case.ranks}.items():
        if (found := len(getattr(timing, name))) != length:
            yield f"$.timing.{name} has {found} numbers, the record says {length}."
    median = statistics.median(timing.samples_s)
    if not math.isclose(timing.median_s, median, rel_tol=CLOSE):
        yield f"$.timing.median_s is {timing.median_s}, the median of the samples is {median}."


def short(value: object) -> str:
    """Return a value, cut and on one line, for an error text."""
    shown = str(value).encode("unicode_escape").decode()
    return shown if len(shown) <= SHOWN else shown[:SHOWN] + "..."


MAX_PROBLEMS = 20  # of one file that are told; a foreign file has one in every line


class Reading(msgspec.Struct):
    """What a file held.

    Args:
        records: those that are valid, in the order of the file.
        problems: one line of text for each thing that is not, with file and line.
    """

    records: list[Record] = []
    problems: list[str] = []


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
    """Read the records of a file that can be used, and say what is wrong with the rest.

    Args:
        path: a file of JSON lines, from whomever.

    Returns:
        Records and problems; never an exception for what the file holds, or because it is not
        there.
    """
    found, unsaid = Reading(), 0
    try:
        for number, line in enumerate(io.BytesIO(read_bytes(Path(path))), 1):
            try:
                if line.strip():
                    found.records.append(parse(line.rstrip(b"\r\n")))
            except RecordError as error:
                if len(found.problems) < MAX_PROBLEMS:
                    found.problems.append(f"{path}, line {number}: {error}")
                else:
                    unsaid += 1
    except ForeignError as error:
        found.problems.append(str(error))
    if unsaid:
        found.problems.append(f"{path}: {unsaid} more lines cannot be used.")
    return found


def _ends_with_line(descriptor: int) -> bool:
    """Return whether the file ends with a whole line, which a killed writer may have cut."""
    size = os.fstat(descriptor).st_size
    return size == 0 or os.pread(descriptor, 1, size - 1) == b"\n"
