"""Files that are whole whenever somebody looks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def write_json(
    path: Path, document: Any, *, indent: int | None = 1, allow_nan: bool = False
) -> None:
    """Replace a file in one step; its folder is made where it is missing.

    Args:
        path: of the file; a draft lies beside it for a moment, with the suffix ".tmp".
        document: plain values.
        indent, allow_nan: as in `json.dumps`.

    Raises:
        ValueError: a number that is not finite, where these are not allowed.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".tmp")
    draft.write_text(json.dumps(document, indent=indent, allow_nan=allow_nan) + "\n")
    draft.replace(path)
