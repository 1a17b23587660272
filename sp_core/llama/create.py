"""A LLaMA with random weights, the same ones on every mesh."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from sp_core import arguments
from sp_core.gradients import Placement
from sp_core.llama.config import LlamaConfig
from sp_core.llama.grid import Grid
from sp_core.llama.model import Llama
from sp_core.mesh import Mesh

DEVIATION = 0.02
"""Standard deviation of the weights, as `initializer_range` of Hugging Face's LLaMA."""


def create(
    config: LlamaConfig,
    mesh: Mesh,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    scheme: str | None = None,
    tp_sp: bool = False,
) -> Llama:
    """Make a model with random weights, of which each rank keeps its slices.

    Args:
        config: the architecture.
        mesh: with any of the axes "dp", "pp", "ring", "ulysses" and "tp".
        seed: of the weights; with the same one every mesh has the same model.
        dtype: in which to compute. The weights are drawn in float64 and rounded to it.
        scheme: as in `Grid.of`.
        tp_sp: as in `Llama`.

    Returns:
        The model: norms of one, all else normal with deviation 0.02.

    Communication:
        Two agreements.

    Raises:
        ShapeError: too many ranks; CollectiveMismatch: ranks that ask for different models. On every rank.
    """
    grid = Grid.of(mesh, scheme)
    made: list[Llama] = []

    def make() -> int:
        arguments.check(seed=seed, tp_sp=tp_sp)
        arguments.check_type("config", config, LlamaConfig, "Make one, or read it with LlamaConfig.from_folder.")
        made.append(Llama(config, grid, dtype=dtype, tp_sp=tp_sp))
        return 0

    grid.everyone.agree_on(lambda: f"create({config}, {seed}, {dtype}, {tp_sp})", make)
    made[0].fill(lambda name, placement: placement.take(random_weight(name, placement, seed), grid.tensor.rank))
    return made[0]


def random_weight(name: str, placement: Placement, seed: int) -> Tensor:
    """A whole weight in float64, which follows from its name and the seed alone."""
    if len(placement.shape) == 1:  # a norm's
        return torch.ones(placement.shape, dtype=torch.float64)
    digest = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=8).digest()
    random = torch.Generator().manual_seed(int.from_bytes(digest, "little"))
    return torch.randn(placement.shape, generator=random, dtype=torch.float64) * DEVIATION
