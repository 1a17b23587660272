"""Read the libraries on trial: their problems, and what they do not offer (`libraries.toml`)."""

from __future__ import annotations

import importlib
import tomllib
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

from conformance import attention, flash_standin, layers
from conformance.adapters.yunchang_usp import degrees
from conformance.attention import Needs, PlacesOf, Positions

SUBJECTS: dict[str, ModuleType] = {"attention": attention, "layers": layers}
NOT_OFFERED = "not offered"
OURS = ("sp_core", "sp_core layers")
"""Those of this project: if one does not pass, the harness is wrong."""
TOLD = tomllib.loads(Path(__file__).with_name("libraries.toml").read_text())


@dataclass(frozen=True)
class Library:
    """One column of the report.

    Args:
        name: of the column.
        adapter: module of `conformance.adapters`.
        package: distribution whose version is told; with spaces between several.
        variant: for the adapter.
        needs: how it wants its problems.
        known: where a fault of a capability has been told to its project.
        flash: whether it is given the stand-in for flash-attn.
        patience: seconds that its ranks wait for each other before they count as hung.
        about: name of its subject.
    """

    name: str
    adapter: str
    package: str
    variant: str = ""
    needs: Needs = field(default_factory=Needs)
    known: dict[str, str] = field(default_factory=dict)
    flash: bool = False
    patience: float = 5.0
    about: str = "attention"

    @property
    def subject(self) -> ModuleType:
        """Return what is on trial."""
        return SUBJECTS[self.about]

    def module(self) -> ModuleType:
        """The adapter; the library itself is imported when it is first called.

        Raises:
            ImportError: it is not there.
        """
        if self.flash:
            flash_standin.install()
        return importlib.import_module(f"conformance.adapters.{self.adapter}")

    def tried(self) -> list[str]:
        """Capabilities that are put to it."""
        return [name for name in self.subject.CAPABILITIES if name not in self.excluded()]

    def excluded(self) -> dict[str, dict[str, str]]:
        """Return the capabilities that are not tried, such as missing layouts, with the reason.

        A capability is "refused" where the documentation says that it is not supported. It is "not
        offered" where the call has no place for it.
        """
        layouts = {"contiguous", "zigzag", "striped"} & set(self.subject.CAPABILITIES)
        missing = sorted(layouts - set(self.needs.layouts))
        other = {"verdict": NOT_OFFERED, "text": "another layout", "source": ""}
        told = {
            capability: {name: reason[name] for name in other}
            for reason in TOLD["reason"]
            for capability in reason["capabilities"]
            if self.name in reason["libraries"]
        }
        return dict.fromkeys(missing, other) | told


def _in_documents(
    halves: int, layout: str, seq_len: int, size: int, documents: tuple[int, ...] | None
) -> Positions:
    """Give every rank a piece, or two, of each document, as varlen functions want it."""
    shards: list[list[int]] = [[] for _ in range(size)]
    for start, end in pairwise(documents or (0, seq_len)):
        each = (end - start) // (halves * size)
        for rank, shard in enumerate(shards):
            for piece in (rank, 2 * size - 1 - rank)[:halves]:
                shard.extend(range(start + piece * each, start + (piece + 1) * each))
    return tuple(map(tuple, shards))


def _yunchang_zigzag(
    layout: str, seq_len: int, size: int, documents: tuple[int, ...] | None
) -> Positions:
    """Give the r-th rank of a ring of R pieces r and 2R-1-r; its Ulysses group shares them."""
    ulysses, ring = degrees(size)
    each = seq_len // (2 * ring)
    shards = []
    for rank in range(size):
        pieces = (rank // ulysses, 2 * ring - 1 - rank // ulysses)
        held = [token for piece in pieces for token in range(piece * each, (piece + 1) * each)]
        share = len(held) // ulysses
        shards.append(tuple(held[rank % ulysses * share : (rank % ulysses + 1) * share]))
    return tuple(shards)


PLACES: dict[str, PlacesOf] = {
    "pieces of documents": partial(_in_documents, 1),
    "zigzag of documents": partial(_in_documents, 2),
    "yunchang zigzag": _yunchang_zigzag,
}


def _library(told: dict[str, Any]) -> Library:
    needs = {**told.get("needs", {})}
    layouts, places = needs.pop("layouts", ["contiguous"]), PLACES.get(needs.pop("places", ""))
    return Library(**{**told, "needs": Needs(tuple(layouts), places=places, **needs)})


LIBRARIES = tuple(map(_library, TOLD["library"]))
"""Every library."""


def named(name: str) -> Library:
    """The library of a column."""
    return next(library for library in LIBRARIES if library.name == name)
