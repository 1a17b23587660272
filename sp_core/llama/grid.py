"""A model's view of a mesh.

Which ranks split weights, layers and sequences, and which hold replicas for other sequences.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from sp_core import arguments
from sp_core.communicator import Communicator
from sp_core.errors import ShapeError
from sp_core.mesh import Mesh
from sp_core.schemes import SCHEMES, hybrid_attention

SEQUENCE_AXES = ("ring", "ulysses")
AXES = ("dp", "pp", *SEQUENCE_AXES, "tp")
HYBRID = "hybrid"


GridAttention = Callable[..., Tensor | tuple[Tensor, Tensor]]
"""A scheme on its grid: called as one, without the ranks."""


@dataclass(frozen=True)
class Grid:
    """The groups of ranks that a model communicates in. Made by `of`.

    Args:
        tensor: split heads, feed-forward features and vocabulary; they have the same tokens.
        sequence: split each sequence.
        stages: hold the layers one after the other; each computes its own for a micro-batch and
            passes it on.
        replicas: hold the same weights for other sequences.
        data: sequence ranks and replicas together: all that hold the same slices of the weights and
            have other tokens.
        model: tensor and sequence ranks of all stages together: all that work on one sequence.
        everyone: all ranks of the mesh.
        attention: the scheme over `sequence`.
    """

    tensor: Communicator
    sequence: Communicator
    stages: Communicator
    replicas: Communicator
    data: Communicator
    model: Communicator
    everyone: Communicator
    attention: GridAttention

    @classmethod
    def of(cls, mesh: Mesh, scheme: str | None = None) -> Grid:
        """Make the grid of a mesh with any of the axes "dp", "pp", "ring", "ulysses" and "tp".

        An axis that it lacks has one rank.

        Args:
            mesh: the ranks.
            scheme: a name of `sp_core.schemes.SCHEMES`, or "hybrid"; if not given, what the axes
                are named after.

        Communication:
            One agreement.

        Raises:
            ShapeError: other axes; ValueError: another scheme, or "hybrid" without both of its
                axes. On every rank.
        """
        arguments.check_type("mesh", mesh, Mesh, "Make one, such as Mesh(MPI.COMM_WORLD, tp=2).")
        unknown = [axis for axis in mesh.axes if axis not in AXES]
        if unknown:
            raise ShapeError(
                f"the mesh has the axes {tuple(mesh.axes)}; a LLaMA can use {AXES}. Name them so."
            )

        def group(*names: str) -> Communicator:
            return mesh[tuple(axis for axis in mesh.axes if axis in names)]

        return cls(
            tensor=group("tp"),
            sequence=group(*SEQUENCE_AXES),
            stages=group("pp"),
            replicas=group("dp"),
            data=group("dp", *SEQUENCE_AXES),
            model=group("pp", *SEQUENCE_AXES, "tp"),
            everyone=group(*AXES),
            attention=_attention(mesh, group(*SEQUENCE_AXES), scheme),
        )


def _attention(mesh: Mesh, comm: Communicator, scheme: str | None) -> GridAttention:
    axes = tuple(axis for axis in mesh.axes if axis in SEQUENCE_AXES)
    name = scheme or (HYBRID if len(axes) == 2 else next(iter(axes), "allgather_kv"))

    def call() -> str:
        if name not in SCHEMES and (name != HYBRID or len(axes) != 2):
            raise ValueError(
                f"scheme {name!r} was asked for on a mesh with the axes {tuple(mesh.axes)}; there "
                f"are {sorted(SCHEMES)}, "
                f"and {HYBRID!r} where the mesh has both {SEQUENCE_AXES}."
            )
        return f"Grid.of(scheme={name!r})"

    mesh[tuple(mesh.axes)].agree_on(call)
    scheme_of_axes = (
        partial(hybrid_attention, mesh=mesh, axes=(axes[0], axes[1]))
        if name == HYBRID
        else SCHEMES[name]
    )
    return partial(scheme_of_axes, comm=comm)
