"""What is a record, and what is not: one line of text to one checked record."""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

from jsonschema import Draft202012Validator
from jsonschema.exceptions import best_match
from jsonschema.protocols import Validator
from jsonschema.validators import extend

Record = dict[str, Any]

SCHEMA_VERSION = 1
SCHEMA = Path(__file__).with_name("schema.json")
MAX_LINE = 1 << 20  # bytes; 10,000 samples of three kinds are about 600 KiB
MAX_REASON = 4000  # characters, as in the schema
SHOWN = 160  # characters of a value that an error repeats
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
CLOSE = 1e-9  # relative; a median that is written and one that is computed again differ by rounding only


class RecordError(ValueError):
    """A record that cannot be used; the text says where in it and why."""


def validate(record: Any) -> None:
    """Raise what is wrong with a record.

    Args:
        record: plain values, as JSON gives them.

    Raises:
        RecordError: it does not have the form of `schema.json`, or its parts contradict each other.
    """
    if isinstance(record, dict) and record.get("schema") != SCHEMA_VERSION:
        raise RecordError(f"schema is {_short(record.get('schema'))}; this program reads version {SCHEMA_VERSION}.")
    error = best_match(_validator().iter_errors(record))
    if error is not None:
        raise RecordError(f"{error.json_path}: {_short(error.message)}")
    contradiction = next(_contradictions(record), None)
    if contradiction is not None:
        raise RecordError(contradiction)


def parse(line: bytes) -> Record:
    """The record that a line holds.

    Args:
        line: UTF-8 text of one JSON object, without the end of line.

    Raises:
        RecordError: no JSON, a key twice, a number that is not finite, too long, or no record.
    """
    if len(line) > MAX_LINE:
        raise RecordError(f"the line has {len(line)} bytes, {MAX_LINE} are allowed.")
    try:
        record: Record = json.loads(
            line.decode(), object_pairs_hook=_unique, parse_constant=_not_finite, parse_float=_finite, parse_int=_whole
        )
    except RecordError:
        raise
    except RecursionError as error:
        raise RecordError("the line is nested too deeply.") from error
    except ValueError as error:
        raise RecordError(f"no JSON: {_short(error)}") from error
    validate(record)
    return record


def reason(told: str) -> str:
    """Any text as a record's reason: cut, and without control characters such as a terminal's colours."""
    plain = _ESCAPES.sub("", told).encode(errors="replace").decode()
    return "".join(c if c == "\n" or c.isprintable() else " " for c in plain).strip()[:MAX_REASON] or "no text"


def text(record: Record) -> bytes:
    """A valid record as one line.

    Raises:
        RecordError: it is not valid, holds a number that is not finite, or is too long.
    """
    try:
        line = json.dumps(record, allow_nan=False, separators=(",", ":")).encode()
    except (ValueError, TypeError, RecursionError) as error:
        raise RecordError(f"no JSON: {_short(error)}") from error
    parse(line)  # what is written is what will be read: tuples have become lists, keys text
    return line + b"\n"


@cache
def _validator() -> Validator:
    """Of the schema, where an integer is one in Python too: 2.0 is none."""
    types = Draft202012Validator.TYPE_CHECKER.redefine("integer", lambda _, value: type(value) is int)
    made: Validator = extend(Draft202012Validator, type_checker=types)(json.loads(SCHEMA.read_text()))
    return made


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise RecordError(f"the key {_short(name)} is there twice.")
        found[name] = value
    return found


def _not_finite(name: str) -> NoReturn:
    raise RecordError(f"{name} is no number that a record may hold.")


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        _not_finite(_short(digits))
    return number


def _whole(digits: str) -> int:
    if len(digits) > 20:  # more than any count of 64 bits; int() of many digits is slow
        _not_finite(_short(digits))
    return int(digits)


def _contradictions(record: Record) -> Iterator[str]:
    """Parts of a well-formed record that do not fit together."""
    case, timing = record["case"], record["timing"]
    if math.prod(case["mesh"].values()) != case["ranks"]:
        yield f"$.case: the mesh {case['mesh']} has not {case['ranks']} ranks."
    if timing is None:
        return
    for name, length in (
        ("samples_s", timing["iterations"]),
        ("max_local_s", timing["iterations"]),
        ("per_rank_median_s", case["ranks"]),
    ):
        if len(timing[name]) != length:
            yield f"$.timing.{name} has {len(timing[name])} numbers, the record says {length}."
    median = statistics.median(timing["samples_s"])
    if not math.isclose(timing["median_s"], median, rel_tol=CLOSE):
        yield f"$.timing.median_s is {timing['median_s']}, the median of the samples is {median}."


def _short(value: object) -> str:
    """A value, cut and on one line, for an error text."""
    shown = str(value) if isinstance(value, str | Exception) else repr(value)
    shown = shown.encode("unicode_escape").decode()
    return shown if len(shown) <= SHOWN else shown[:SHOWN] + "..."
