"""Read from `libraries.toml` which libraries are tested, on which problems, and what they lack."""

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
"""The columns of this project. If one of them does not pass, the harness is wrong."""
TOLD = tomllib.loads(Path(__file__).with_name("libraries.toml").read_text())


@dataclass(frozen=True)
class Library:
    """One column of the report.

    Args:
        name: the name of the column.
        adapter: the name of a module in `conformance.adapters`.
        package: the distribution whose version is reported; several with spaces between them.
        variant: the name of the library's function, as the adapter knows it.
        needs: the problems that the library can take.
        known: by capability, where its fault has been reported to the library's project.
        flash: whether the library needs the stand-in for flash-attn.
        patience: the seconds that ranks wait for each other before they count as hung.
        about: the name of its subject, "attention" or "layers".
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
        """Return the module of the subject, with its capabilities and problems."""
        return SUBJECTS[self.about]

    def module(self) -> ModuleType:
        """Return the adapter. It may import the library only when it is first called.

        Raises:
            ImportError: the adapter is missing, or the library that it imports.
        """
        if self.flash:
            flash_standin.install()
        return importlib.import_module(f"conformance.adapters.{self.adapter}")

    def tried(self) -> list[str]:
        """Return the capabilities that are tried."""
        return [name for name in self.subject.CAPABILITIES if name not in self.excluded()]

    def excluded(self) -> dict[str, dict[str, str]]:
        """Return the capabilities that are not tried, such as missing layouts, with the reason.

        A capability is "refused" if the documentation says that it is not supported. It is "not
        offered" if the library's call has no argument for it.
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
    """Return each rank's positions for varlen functions: one or two pieces of every document."""
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
    """Split pieces r and 2R-1-r, of rank r in a ring of R ranks, over its Ulysses group."""
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
"""All libraries."""


def named(name: str) -> Library:
    """Return the library of a column."""
    return next(library for library in LIBRARIES if library.name == name)
