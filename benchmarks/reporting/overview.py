"""The most important plots of a report as one picture."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from benchmarks.reporting.style import Picture, styled
from benchmarks.reporting.text import plain

MOST = {"Comparison": 1, "Scaling": 3, "Bandwidth": 2, "Communication": 1, "History": 1, "Timeline": 1}
"""How many of each kind."""

ALONE = 6  # where there is one kind only
DPI = 130
TITLE = 60  # characters
Pixels = NDArray[np.uint8]


def overview(pictures: Sequence[Picture]) -> bytes:
    """The first plots of each kind side by side as PNG. Titles go into the figures, so this is their last use."""
    chosen = list(_chosen(pictures))
    with styled():
        tiles = [_pixels(picture) for picture in chosen]
    return _png(_stacked(tiles))


def _chosen(pictures: Sequence[Picture]) -> Iterator[Picture]:
    kinds = dict.fromkeys(picture.kind for picture in pictures)
    for kind in kinds:
        most = ALONE if len(kinds) == 1 else MOST.get(kind, 1)
        yield from [picture for picture in pictures if picture.kind == kind][:most]


def _pixels(picture: Picture) -> Pixels:
    from matplotlib.image import imread

    file = io.BytesIO()
    picture.figure.suptitle(plain(picture.title, TITLE), fontsize=10)
    picture.figure.savefig(file, format="png", dpi=DPI, facecolor="white")
    file.seek(0)
    return np.asarray(imread(file)[..., :3] * 255).round().astype(np.uint8)


def _stacked(tiles: Sequence[Pixels]) -> Pixels:
    """Two tiles in a row, a broad one alone, white where they leave room."""
    width = 2 * min(tile.shape[1] for tile in tiles) if len(tiles) > 1 else tiles[0].shape[1]
    width = max(width, *(tile.shape[1] for tile in tiles), 0)
    rows: list[list[Pixels]] = []
    for tile in tiles:
        fits = rows and sum(other.shape[1] for other in rows[-1]) + tile.shape[1] <= width
        if fits:
            rows[-1].append(tile)
        else:
            rows.append([tile])
    return np.concatenate([_row(row, width) for row in rows])


def _row(tiles: Sequence[Pixels], width: int) -> Pixels:
    row = np.full((max(tile.shape[0] for tile in tiles), width, 3), 255, np.uint8)
    left = 0
    for tile in tiles:
        row[: tile.shape[0], left : left + tile.shape[1]] = tile
        left += tile.shape[1]
    return row


def _png(pixels: Pixels) -> bytes:
    from matplotlib.image import imsave

    file = io.BytesIO()
    imsave(file, pixels, format="png", metadata={"Software": "sp_core"})
    return file.getvalue()
