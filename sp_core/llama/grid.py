"""`Grid`: which ranks of a mesh split a model's weights, layers and sequences, or hold replicas."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from sp_core import arguments
from sp_core.communicator import Communicator
from sp_core.errors import CheckpointError, ShapeError
from sp_core.mesh import Mesh
from sp_core.schemes import SCHEMES, hybrid_attention

SEQUENCE_AXES = ("ring", "ulysses")
AXES = ("dp", "pp", *SEQUENCE_AXES, "tp")
HYBRID = "hybrid"


GridAttention = Callable[..., Tensor | tuple[Tensor, Tensor]]
"""An attention scheme whose ranks are set: called as `ring_attention`, without comm or mesh."""


@dataclass(frozen=True)
class Grid:
    """For this rank, the groups of ranks with which a model communicates. Made by `of`.

    Args:
        tensor: the axis "tp": ranks that split heads, feed-forward features and vocabulary, and
            have the same tokens.
        sequence: the axes "ring" and "ulysses": ranks that split each sequence.
        stages: the axis "pp": ranks that hold consecutive layers, compute these for a
            micro-batch and send the result to the next rank.
        replicas: the axis "dp": ranks that hold the same weights for different sequences.
        data: "dp", "ring" and "ulysses": ranks that hold the same parts of the weights and have
            different tokens.
        model: all axes but "dp": the ranks of one replica, which work on the same sequences.
        everyone: all ranks of the mesh.
        attention: the attention scheme over `sequence`.
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
    def of(cls, mesh: Mesh, scheme: str | None = None) -> "Grid":
        """Make the grid of a mesh. Every rank of the mesh calls this.

        Args:
            mesh: the ranks, with any of the axes "dp", "pp", "ring", "ulysses" and "tp". An axis
                that is missing counts as one rank.
            scheme: the attention scheme: a name of `sp_core.schemes.SCHEMES`, or "hybrid". If not
                given, "hybrid" on a mesh with "ring" and "ulysses", the scheme of that name on a
                mesh with one of these axes, else "allgather_kv".

        Communication:
            One agreement (32-byte all-reduce).

        Raises:
            TypeError: on this rank: `mesh` is no Mesh.
            ShapeError: on every rank: the mesh has an axis that is not one of these.
            ValueError: on every rank: an unknown scheme, or "hybrid" without both axes.
            CollectiveMismatch: on every rank: the ranks name different schemes.
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

    def check_one_stage(self) -> None:
        """Raise ShapeError if the layers are split over stages: a call would compute only one."""
        if self.stages.size > 1:
            raise ShapeError(
                f"the layers are split over {self.stages.size} stages, and one call of the model "
                "would use one at a time. Use Decoder, or pipeline.loss_and_gradients to train; or "
                "leave pp out."
            )


def check_unstaged(grid: Grid) -> None:
    """Raise CheckpointError if the layers are split over stages: files need all layers."""
    if grid.stages.size > 1:
        raise CheckpointError(
            f"the layers are split over {grid.stages.size} stages; a model is saved without pp, "
            "and a training is saved and loaded without it. Leave it out."
        )


def _attention(mesh: Mesh, comm: Communicator, scheme: str | None) -> GridAttention:
    """Check that all ranks name the same scheme. Return the scheme's function, bound to `comm`."""
    axes = tuple(axis for axis in mesh.axes if axis in SEQUENCE_AXES)
    name = scheme or (HYBRID if len(axes) == 2 else next(iter(axes), "allgather_kv"))

    def call() -> str:
        if name not in SCHEMES and (name != HYBRID or len(axes) != 2):
            raise ValueError(
                f"scheme {name!r} was given on a mesh with axes {tuple(mesh.axes)}. Pass one of "
                f"{sorted(SCHEMES)}; {HYBRID!r} needs both axes {SEQUENCE_AXES}."
            )
        return f"Grid.of(scheme={name!r})"

    mesh[tuple(mesh.axes)].agree_on(call)
    scheme_of_axes = (
        partial(hybrid_attention, mesh=mesh, axes=(axes[0], axes[1]))
        if name == HYBRID
        else SCHEMES[name]
    )
    return partial(scheme_of_axes, comm=comm)
