"""Training on one mesh, and comparing it with one rank at some of that one's steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from benchmarks.files import write_json
from benchmarks.training.setting import LAYOUTS, Place, Setting
from sp_core.collectives.api import all_reduce
from sp_core.llama import Llama, create, load
from sp_core.llama.model import checkpoint_name
from sp_core.llama.train import Layout, Step, backward, train_step
from sp_core.mesh import Mesh
from sp_core.nn.gradients import clip_gradient_norm, placement_of
from sp_core.sharding import Sharding
from sp_core.testing.tolerance import bound, error_ratio

Told = Callable[[str, int, int], None]
"""Called with what is going on, and how much of how much is done."""


def trained(
    model: Llama, setting: Setting, *, layout: Layout = Sharding.zigzag, before: Callable[[int], None] = lambda step: None
) -> list[Step]:
    """Train a model; `before` is called before every step and at the end."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=setting.learning_rate, fused=True)
    seen = []
    for step in range(setting.steps):
        before(step)
        for group in optimizer.param_groups:
            group["lr"] = setting.learning_rate * min(1.0, (step + 1) / setting.warmup)
        seen.append(train_step(model, optimizer, setting.batch(step), max_norm=setting.max_norm, layout=layout))
    before(setting.steps)
    return seen


def gradients(model: Llama, sequences: Sequence[Sequence[int]], max_norm: float, layout: Layout) -> dict[str, Tensor]:
    """Loss, this rank's gradients by name, and their norm before and after clipping."""
    loss = backward(model, sequences, layout=layout)
    found = {checkpoint_name(name): x.grad.clone() for name, x in model.named_parameters() if x.grad is not None}
    norms = [clip_gradient_norm(model.parameters(), limit, tensor=model.grid.tensor) for limit in (max_norm, torch.inf)]
    numbers = {"loss": loss, "norm": norms[0], "clipped norm": norms[1]}
    return {**{name: torch.tensor([value], dtype=torch.float64) for name, value in numbers.items()}, **found}


def step_name(step: int) -> str:
    """Folder of the weights that one rank had before a step; its gradients lie beside it."""
    return f"step-{step:04}"


def run_place(comm: Any, place: Place, dtype: str, setting: Setting, alone: Path, tell: Told) -> dict[str, Any]:
    """Train on a mesh from the first step to the last, then compare every few steps from one rank's weights.

    Args:
        comm: an mpi4py communicator.
        place: the mesh.
        dtype: of weights and arithmetic.
        setting: the run.
        alone: where `benchmarks.training.alone` has left what one rank did.
        tell: told what is going on.

    Returns:
        The record: losses and norms of all steps; for each kind of result the worst error over bound and where it was; and how far
        apart replicas of a weight are in the end, which should be 0.
    """
    layout = LAYOUTS[place.layout]
    with Mesh(comm, check="off", **place.axes) as mesh:
        model = create(setting.config, mesh, seed=setting.seed, dtype=getattr(torch, dtype), scheme=place.scheme, tp_sp=place.tp_sp)
        what = f"{place.name}, {dtype}"
        curve = trained(model, setting, layout=layout, before=lambda step: tell(f"{what}: training", step, setting.steps))
        worst: dict[str, tuple[float, str]] = {}
        for step in setting.checkpoints:
            tell(f"{what}: comparing gradients", step, setting.steps)
            for kind, (ratio, where) in _compare(mesh, place, setting, alone / dtype / step_name(step), step).items():
                worst[kind] = max(worst.get(kind, (0.0, "")), (ratio, where))
        return {
            "place": place.name,
            "ranks": mesh.size,
            "layout": place.layout,
            "dtype": dtype,
            "losses": [step.loss for step in curve],
            "norms": [step.norm for step in curve],
            "worst": worst,
            "apart": apart(model),
        }


def _compare(mesh: Mesh, place: Place, setting: Setting, folder: Path, step: int) -> dict[str, tuple[float, str]]:
    """Worst error over bound of loss, gradients and norms over all ranks, each with its place."""
    model = load(folder, mesh, scheme=place.scheme, tp_sp=place.tp_sp)
    found = gradients(model, setting.batch(step), setting.max_norm, LAYOUTS[place.layout])
    placements = {checkpoint_name(name): placement_of(parameter) for name, parameter in model.named_parameters()}
    stored = load_file(folder.with_suffix(".safetensors"))
    ratios = []
    for name, x in found.items():
        expected, scale = stored[name], stored[f"scale {name}"]
        if name in placements:
            expected, scale = (placements[name].take(whole, model.grid.tensor.rank) for whole in (expected, scale))
        ratios.append(error_ratio(x, expected, bound(scale, model.dtype)))
    greatest = all_reduce(torch.tensor(ratios, dtype=torch.float64), comm=model.grid.everyone, op="max").tolist()
    worst: dict[str, tuple[float, str]] = {}
    for name, ratio in zip(found, greatest, strict=True):
        kind = "gradients" if name in placements else name
        worst[kind] = max(worst.get(kind, (0.0, "")), (ratio, f"{name} at step {step}"))
    return worst


@torch.no_grad()
def apart(model: Llama) -> float:
    """The greatest difference between what two ranks hold of the same element of a weight."""
    greatest = 0.0
    for parameter in model.parameters():
        placement, tensor = placement_of(parameter), model.grid.tensor
        mine = placement.spread(parameter, tensor.rank)
        held = placement.spread(torch.ones_like(parameter), tensor.rank) > 0
        extremes = [mine.where(held, -torch.inf), (-mine).where(held, -torch.inf)]
        high, low = (all_reduce(x, comm=model.grid.everyone, op="max") for x in extremes)
        greatest = max(greatest, float((high + low).max()))
    return greatest


def keep(path: Path, values: dict[str, Any]) -> None:
    """Write what was found, on one line; a run that has diverged holds numbers that are not finite."""
    write_json(path, values, indent=None, allow_nan=True)
