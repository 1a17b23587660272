"""Open the mesh of a test whose whole body needs it."""

import functools
from collections.abc import Callable
from typing import Any

import torch

import sp_core as sp

Body = Callable[..., None]
FROM_TEST = ("transport", "check")
"""Options of a mesh that `meshed` takes from a test's arguments of these names."""


def meshed(
    axis: str = "sp", *, device: Callable[[], torch.device | None] = lambda: None, **options: Any
) -> Callable[[Body], Body]:
    """Run a body on a mesh of all ranks, which it takes in place of the communicator.

    Stands below @spmd or @given.

    Args:
        axis: the name of the only axis. A test's argument `axes` has other axes and their lengths.
        device: is called on each rank and returns the device of the mesh.
        options: more options of the mesh. Those in FROM_TEST come from the test's arguments, too.
    """

    def decorate(body: Body) -> Body:
        @functools.wraps(body)
        def on_mesh(comm: Any, **given: Any) -> None:
            own = {name: given[name] for name in FROM_TEST if name in given}
            axes = given.get("axes", {axis: comm.size})
            with sp.Mesh(comm, device=device(), **options, **own, **axes) as mesh:
                body(mesh, **given)

        return on_mesh

    return decorate
