"""Tests of programs whose ranks communicate: property tests over ranks, checked communicators, one report for all ranks.

Nothing here is imported before it is used, so that the pytest plugin and the launcher cost nothing where they are merely installed.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sp_core.testing.adjoint import check_adjoint, global_map
    from sp_core.testing.checked import CheckedComm
    from sp_core.testing.checked_group import CheckedGroup
    from sp_core.testing.engine import given, spmd
    from sp_core.testing.remarks import event, features, note, record_ratio, target
    from sp_core.testing.run import run_threads
    from sp_core.testing.session import device, tier
    from sp_core.testing.threads import ThreadComm
    from sp_core.testing.tolerance import bound, check_close

__all__ = [
    "CheckedComm",
    "CheckedGroup",
    "ThreadComm",
    "bound",
    "check_adjoint",
    "check_close",
    "device",
    "event",
    "features",
    "given",
    "global_map",
    "note",
    "record_ratio",
    "run_threads",
    "spmd",
    "target",
    "tier",
]

_HOMES = {
    "adjoint": ("check_adjoint", "global_map"),
    "checked": ("CheckedComm",),
    "checked_group": ("CheckedGroup",),
    "engine": ("given", "spmd"),
    "remarks": ("event", "features", "note", "record_ratio", "target"),
    "run": ("run_threads",),
    "session": ("device", "tier"),
    "threads": ("ThreadComm",),
    "tolerance": ("bound", "check_close"),
}
_MODULES = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
