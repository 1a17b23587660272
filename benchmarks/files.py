"""Write files in one step, and read files from elsewhere, which may hold anything."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")
MAX_BYTES = 256 << 20


class ForeignError(ValueError):
    """A file that cannot be used; the text names it and says why."""


def write_json(path: Path, document: Any) -> None:
    """Replace a file in one step; make its folder if it is missing.

    Args:
        path: of the file; a draft lies beside it for a moment, with the suffix ".tmp".
        document: plain values.

    Raises:
        ValueError: a number that is not finite.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".tmp")
    draft.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n")
    draft.replace(path)


def read_json(path: Path, form: type[T]) -> T:
    """Read a JSON file of a form that msgspec checks.

    Raises:
        ForeignError: the file is missing, is too large, is no JSON, or has another form.
    """
    data = read_bytes(path)
    try:
        return msgspec.json.decode(data, type=form)
    except (ValueError, RecursionError) as error:
        raise ForeignError(f"{path}: {error}") from error


def read_bytes(path: Path) -> bytes:
    """Read a file of bounded size.

    Raises:
        ForeignError: the file is missing, is too large, or is no ordinary file.
    """
    try:
        if path.exists() and not path.is_file():  # a pipe would keep the reader waiting for ever
            raise OSError(0, "this is no ordinary file.")
        if (size := path.stat().st_size) > MAX_BYTES:
            raise OSError(0, f"the file has {size} bytes, {MAX_BYTES} are allowed. Split it.")
        return path.read_bytes()
    except OSError as error:
        raise ForeignError(f"{path}: {error.strerror}") from error
