"""What docstrings of public functions and classes say."""

from __future__ import annotations

import inspect
import re
from typing import Any

from domains.public import MODULES, Public, functions

ALL_MODULES = (*MODULES, "sp_core.planning")


def everything() -> dict[str, Public]:
    """Return public functions, classes and methods by name."""
    return functions(ALL_MODULES)


def documented(words: str) -> set[str]:
    """Return the names, without their modules, of what has these words in its docstring."""
    return {
        without_module(name)
        for name, x in everything().items()
        if words in (inspect.getdoc(x) or "")
    }


def without_module(name: str) -> str:
    """Return a name without the modules in front of it, which have no capital letters."""
    return re.sub(r"^[a-z_.]+\.", "", name)


def told_alike() -> set[str]:
    """Return the names of what has a result that is the same on all ranks, by what it says."""
    said = re.compile(r"on every rank|all hold alike|all ranks hold alike|Every rank receives")
    return {without_module(name) for name, x in everything().items() if said.search(_of_result(x))}


def _of_result(x: Public) -> str:
    """What a docstring says first, and of what is returned."""
    first, *sections = (inspect.getdoc(x) or "").split("\n\n")
    return " ".join([first, *(text for text in sections if text.startswith("Returns:"))])


def code_of(x: Public) -> Any:
    """Return the code of a function, or of a class's own constructor if it has one."""
    made: Any = vars(x).get("__init__") if inspect.isclass(x) else getattr(x, "__func__", x)
    return None if made is None else inspect.unwrap(made).__code__
