"""Keep measured constants (`Tuning`) in files: a JSON file for each machine and MPI library.

The folder is $SP_TUNING_DIR, else `sp_core` in the user's cache ($XDG_CACHE_HOME or ~/.cache).
SP_TUNING names the constants to use (see `find`). A fingerprint is a dict of texts that identifies
a machine and its MPI library, as `sp_core.mesh.fingerprint` returns it.
"""

import contextlib
import hashlib
import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any
from uuid import uuid4

from sp_core.tuning.model import LINKS, Curve, Tuning

SCHEMA_VERSION = 1
"""The version of the file format."""
VARIABLE = "SP_TUNING"
"""The environment variable with the constants to use."""
FOLDER = "SP_TUNING_DIR"
"""The environment variable with the folder of the files."""


class FileError(ValueError):
    """Report a file of constants that cannot be used. The text says why."""


def default_path(fingerprint: Mapping[str, str]) -> Path:
    """Return the path of the file for the constants of a machine. The file need not exist.

    Raises:
        FileError: no variable names a folder, and the user has no home folder.
    """
    folder = os.environ.get(FOLDER, "")
    if not folder:
        try:
            folder = f"{os.environ.get('XDG_CACHE_HOME') or Path.home() / '.cache'}/sp_core"
        except RuntimeError:
            raise FileError(
                f"there is no home folder for measured constants. Set {FOLDER} to a folder."
            ) from None
    name = hashlib.blake2b(
        json.dumps(dict(fingerprint), sort_keys=True).encode(), digest_size=8
    ).hexdigest()
    return Path(folder) / f"tuning-{name}.json"


def find(
    fingerprint: Callable[[], Mapping[str, str]], choice: str | Path | None = None
) -> Tuning | None:
    """Load the measured constants from which algorithm="auto" chooses.

    Args:
        fingerprint: function that returns what identifies this machine and its software; called
            only for "auto".
        choice: path of a file; "off" for no constants; "auto" for the file at `default_path`, if
            there is one. If None, the environment variable SP_TUNING is used, or "auto" if it is
            not set.

    Returns:
        The constants. None for "off", and for "auto" if the file is missing or cannot be used;
        `sp-core doctor` then says why.

    Raises:
        FileError: the file that `choice` or SP_TUNING names cannot be used.
    """
    source = "" if choice is not None else f"; {VARIABLE} names it"
    choice = (os.environ.get(VARIABLE) or "auto") if choice is None else choice
    if choice == "off":
        return None
    if choice != "auto":
        try:
            return load(Path(choice))
        except FileError as error:
            raise FileError(f"{error}{source}") from None
    try:
        return load(default_path(fingerprint()), fingerprint())
    except FileError:
        return None


def latest(host: str) -> Tuning | None:
    """Return the newest constants measured on a machine with any MPI library, or None.

    Args:
        host: the machine's name, as in the fingerprint's "host".
    """
    found = []
    with contextlib.suppress(FileError, OSError):  # of a folder that cannot be searched
        for path in sorted(default_path({}).parent.glob("tuning-*.json")):
            with contextlib.suppress(FileError):
                found.append(load(path))
    mine = [tuning for tuning in found if tuning.fingerprint.get("host") == host]
    return max(mine, key=lambda tuning: tuning.measured_at, default=None)


def load(path: Path, fingerprint: Mapping[str, str] | None = None) -> Tuning:
    """Read measured costs of messages and copies (`Tuning`) from a file.

    Args:
        path: the file of constants.
        fingerprint: the fingerprint of the machine and MPI library on which the constants must have
            been measured; None for any.

    Raises:
        FileError: the file is missing, cannot be read, is no file of constants, has another format
            version, or was measured on another machine or MPI library.
    """
    try:
        found = json.loads(path.read_text())
    except FileNotFoundError:
        raise FileError(f"{path}: there is no such file") from None
    except (OSError, ValueError, RecursionError) as error:
        raise FileError(f"{path} cannot be read: {error}") from None
    version = found.get("schema_version") if isinstance(found, dict) else None
    if version != SCHEMA_VERSION:
        raise FileError(
            f"{path} has version {version!r} of the format; this sp_core reads {SCHEMA_VERSION}. "
            "Measure again."
        )
    try:
        tuning = _tuning(found)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise FileError(f"{path} is damaged ({error!r}). Measure again.") from None
    if fingerprint is not None and tuning.fingerprint != dict(fingerprint):
        raise FileError(
            f"{path} is of another machine or MPI library: {tuning.fingerprint}. Measure again."
        )
    return tuning


def save(tuning: Tuning, path: Path) -> None:
    """Write constants to a file, and make its folder if needed.

    The file is replaced in one operation, so a process that reads meanwhile sees the old file or
    the new file, never a part.

    Raises:
        OSError: the folder or the file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(
        {"schema_version": SCHEMA_VERSION, **asdict(tuning)}, indent=" ", allow_nan=False
    )
    draft = path.with_suffix(f".{uuid4().hex}")
    try:
        draft.write_text(text + "\n")  # unlike a file of tempfile, others may read it
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def _tuning(found: dict[str, Any]) -> Tuning:
    """Convert the JSON object of a file to constants.

    A damaged object raises KeyError, TypeError, ValueError, AttributeError or OverflowError.
    """
    if found["links"].keys().isdisjoint(LINKS):
        raise ValueError(f"links of {LINKS} are needed")
    if not found["nodes"]:
        raise ValueError("nodes of at least one rank are needed")
    return Tuning(
        fingerprint={str(key): str(value) for key, value in found["fingerprint"].items()},
        nodes=tuple(int(node) for node in found["nodes"]),
        links={str(kind): _curve(curve) for kind, curve in found["links"].items()},
        add=_curve(found["add"]),
        copy=_curve(found["copy"]),
        start=_number(found["start"]),
        bind=_pair(found["bind"]),
        times={
            op: {name: _curve(curve) for name, curve in by_name.items()}
            for op, by_name in found["times"].items()
        },
        error=_pair(found["error"]),
        measured_at=str(found["measured_at"]),
    )


def _curve(found: dict[str, Any]) -> Curve:
    """Convert the JSON object of a file to a `Curve`."""
    return Curve(tuple((int(_number(size)), float(seconds)) for size, seconds in found["points"]))


def _pair(found: list[float]) -> tuple[float, float]:
    """Convert a JSON list of two numbers to a pair of floats."""
    first, second = found
    return _number(first), _number(second)


def _number(found: float) -> float:
    """Convert a JSON number to a float, or raise ValueError if it is negative or not finite."""
    if not 0 <= float(found) < math.inf:
        raise ValueError(f"{found} is no finite number >= 0")
    return float(found)
