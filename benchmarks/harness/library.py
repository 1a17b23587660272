"""Which checkout the measured library comes from."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path


def take_library(root: Path) -> None:
    """Import `sp_core` from a checkout; whatever imports it later gets that one.

    Raises:
        SystemExit: another one was imported already, or the folder has none.
    """
    sys.path.insert(0, str(root))
    found = importlib.import_module("sp_core").__file__
    sys.path.pop(0)
    if found is None or Path(found).resolve().parent.parent != root.resolve():
        raise SystemExit(f"sp_core of {root} was asked for, {found} was imported. Is there a folder sp_core in {root}?")
