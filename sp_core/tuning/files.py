"""Constants on disk: one JSON file for each machine and MPI library, in the user's cache."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sp_core.tuning.model import Curve, Tuning

SCHEMA_VERSION = 1
VARIABLE = "SP_TUNING"
FOLDER = "SP_TUNING_DIR"


class FileError(ValueError):
    """A file of constants cannot be used. The text says why."""


def default_path(fingerprint: Mapping[str, str]) -> Path:
    """Return the path of a machine's constants.

    It is in $SP_TUNING_DIR, else in the user's cache.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sp_core"
    folder = Path(os.environ.get(FOLDER) or cache)
    name = hashlib.blake2b(
        json.dumps(dict(fingerprint), sort_keys=True).encode(), digest_size=8
    ).hexdigest()
    return folder / f"tuning-{name}.json"


def find(
    fingerprint: Callable[[], Mapping[str, str]], choice: str | Path | None = None
) -> Tuning | None:
    """Find the constants to use.

    Args:
        fingerprint: gives that of this machine; asked where it is needed.
        choice: a file, which must be usable; "off" for none; "auto" for those of this machine, if
            there are any. Default: the environment's SP_TUNING, else "auto".

    Returns:
        The constants; None for none, and for a kept file that cannot be used: `doctor` says why.

    Raises:
        FileError: the file that was named cannot be used.
    """
    choice = (os.environ.get(VARIABLE) or "auto") if choice is None else choice
    if choice == "off":
        return None
    if choice != "auto":
        return load(Path(choice))
    try:
        return load(default_path(fingerprint()), fingerprint())
    except FileError:
        return None


def latest(host: str) -> Tuning | None:
    """Return the newest constants of a machine, with any MPI library.

    Return None if there are none.
    """
    folder, found = default_path({}).parent, []
    for path in sorted(folder.glob("tuning-*.json")):
        with contextlib.suppress(FileError):
            found.append(load(path))
    mine = [tuning for tuning in found if tuning.fingerprint.get("host") == host]
    return max(mine, key=lambda tuning: tuning.measured_at, default=None)


def load(path: Path, fingerprint: Mapping[str, str] | None = None) -> Tuning:
    """Read constants from a file.

    Args:
        path: the file.
        fingerprint: of the machine that they must be of; None takes those of another one too.

    Raises:
        FileError: there is no such file, it is no such file, is of another version of it, or of
            another machine.
    """
    try:
        found = json.loads(path.read_text())
    except FileNotFoundError:
        raise FileError(f"{path}: there is no such file") from None
    except (OSError, ValueError) as error:
        raise FileError(f"{path} cannot be read: {error}") from None
    version = found.get("schema_version") if isinstance(found, dict) else None
    if version != SCHEMA_VERSION:
        raise FileError(
            f"{path} has version {version!r} of the format; this sp_core reads {SCHEMA_VERSION}. "
            "Measure again."
        )
    try:
        tuning = _tuning(found)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise FileError(f"{path} is damaged ({error!r}). Measure again.") from None
    if fingerprint is not None and tuning.fingerprint != dict(fingerprint):
        raise FileError(
            f"{path} is of another machine or MPI library: {tuning.fingerprint}. Measure again."
        )
    return tuning


def save(tuning: Tuning, path: Path) -> None:
    """Write constants. A process that reads meanwhile finds the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(
        {"schema_version": SCHEMA_VERSION, **asdict(tuning)}, indent=1, allow_nan=False
    )
    descriptor, draft = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(text + "\n")
        Path(draft).replace(path)
    except BaseException:
        Path(draft).unlink(missing_ok=True)
        raise


def _tuning(found: dict[str, Any]) -> Tuning:
    times = {
        op: {name: _curve(curve) for name, curve in by_name.items()}
        for op, by_name in found["times"].items()
    }
    return Tuning(
        fingerprint={str(key): str(value) for key, value in found["fingerprint"].items()},
        nodes=tuple(int(node) for node in found["nodes"]),
        links={str(kind): _curve(curve) for kind, curve in found["links"].items()},
        add=_curve(found["add"]),
        copy=_curve(found["copy"]),
        start=float(found["start"]),
        bind=_pair(found["bind"]),
        times=times,
        error=_pair(found["error"]),
        measured_at=str(found["measured_at"]),
    )


def _curve(found: dict[str, Any]) -> Curve:
    return Curve(tuple((int(size), float(seconds)) for size, seconds in found["points"]))


def _pair(found: list[float]) -> tuple[float, float]:
    first, second = found
    return float(first), float(second)
