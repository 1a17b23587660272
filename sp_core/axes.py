"""The arithmetic of mesh axes: which rank has which coordinates. The last axis varies fastest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

Axes = dict[str, int]
Names = tuple[str, ...]


def place(axes: Axes, rank: int, names: Names) -> tuple[int, int]:
    """Return the number of a rank's group along some axes, and its number in the group."""
    rest, place = rank, {}
    for axis, length in reversed(axes.items()):
        rest, place[axis] = divmod(rest, length)
    return _index(axes, place, [axis for axis in axes if axis not in names]), _index(
        axes, place, names
    )


def members(axes: Axes, size: int, rank: int, names: Names) -> list[int]:
    """Return the ranks in the group of a rank along some axes, in the order of the group."""
    places = [place(axes, other, names) for other in range(size)]
    return sorted(
        (other for other in range(size) if places[other][0] == places[rank][0]),
        key=lambda other: places[other][1],
    )


def in_order(axes: Axes, names: Names) -> Names:
    """Return some axes in the order of the mesh."""
    return tuple(axis for axis in axes if axis in names)


def numbered(nodes: Sequence[int]) -> tuple[int, ...]:
    """Return the number of each node, from 0 in the order of their lowest ranks."""
    order = {node: number for number, node in enumerate(dict.fromkeys(nodes))}
    return tuple(order[node] for node in nodes)


def title(names: Names) -> str:
    """Return what error messages call the communicator along some axes."""
    return "mesh[" + ", ".join(map(repr, names)) + "]"


def _index(axes: Axes, place: Mapping[str, int], names: Sequence[str]) -> int:
    """Return the row-major place in the grid of the given axes, in their order."""
    index = 0
    for axis in names:
        index = index * axes[axis] + place[axis]
    return index
