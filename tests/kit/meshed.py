"""Open the mesh of a test whose whole body needs it."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

import sp_core as sp

Body = Callable[..., None]
FROM_TEST = ("transport", "check")
"""Options of a mesh that `meshed` takes from a test's arguments of these names."""


def meshed(
    axis: str = "sp",
    *,
    axes: Mapping[str, int] | None = None,
    device: Callable[[], torch.device | None] = lambda: None,
    **options: Any,
) -> Callable[[Body], Body]:
    """Run a body on a mesh of all ranks, which it takes in place of the communicator.

    Stands below @spmd or @given.

    Args:
        axis: the name of the only axis.
        axes: other axes and their lengths. They may also be the test's argument `axes`.
        device: is called on each rank and returns the device of the mesh.
        options: more options of the mesh. Those in FROM_TEST come from the test's arguments, too,
            and all those in an argument `options`.
    """

    def decorate(body: Body) -> Body:
        @functools.wraps(body)
        def on_mesh(comm: Any, **given: Any) -> None:
            own = {name: given[name] for name in FROM_TEST if name in given}
            own |= {**given.get("options", {}), **given.get("axes", axes or {axis: comm.size})}
            with sp.Mesh(comm, device=device(), **options, **own) as mesh:
                body(mesh, **given)

        return on_mesh

    return decorate
