"""JSON files from elsewhere: of bounded size and of the form that is asked for, or an error that names the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NoReturn

from benchmarks.reporting.tables import plain

MAX_BYTES = 256 << 20


class ForeignError(ValueError):
    """A file that cannot be used; the text names it and says why."""


def load(path: Path, schema: str) -> dict[str, Any]:
    """Read a JSON file.

    Args:
        path: the file.
        schema: name of a JSON schema beside this module.

    Raises:
        ForeignError: there is no such file, it is too large, no JSON, or has another form.
    """
    from jsonschema import Draft202012Validator

    rules = json.loads(Path(__file__).with_name(schema).read_text())
    found = _parse(path)
    error = next(Draft202012Validator(rules).iter_errors(found), None)
    if error is not None:
        raise ForeignError(f"{path}: {error.json_path}: {plain(error.message)}")
    result: dict[str, Any] = found
    return result


def _parse(path: Path) -> Any:
    try:
        if path.exists() and not path.is_file():  # a pipe would keep the reader waiting for ever
            raise ForeignError(f"{path}: this is no ordinary file.")
        if (size := path.stat().st_size) > MAX_BYTES:
            raise ForeignError(f"{path}: {size} bytes; {MAX_BYTES} are allowed.")
        return json.loads(path.read_bytes(), parse_constant=_refuse)
    except OSError as error:
        raise ForeignError(f"{path}: {error.strerror}") from error
    except RecursionError as error:
        raise ForeignError(f"{path}: it is nested too deeply.") from error
    except ForeignError:
        raise
    except ValueError as error:
        raise ForeignError(f"{path}: no JSON: {plain(error)}") from error


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number that a file may hold")
