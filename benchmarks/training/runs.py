"""Training on one mesh, compared with one rank at some of its steps; and that one rank, which decides how far a mesh may be off.

Two yardsticks. For gradients a float64 reference, which says element by element how far rounding
may move a result. For whole curves the same run from weights that differ by one unit in the last
place: training amplifies every difference, and a mesh that adds in another order may be as far away
as such a run, within a factor.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.files import write_json
from benchmarks.training.setting import LAYOUTS, Place, Setting, planted
from benchmarks.worker import Rank
from sp_core.agreement import ERRORS
from sp_core.collectives.api import all_reduce
from sp_core.llama import Llama, byte_tokenizer, create, load, save
from sp_core.llama.model import checkpoint_name
from sp_core.llama.train import Layout, Step, backward, train_step
from sp_core.mesh import Mesh
from sp_core.nn.gradients import clip_gradient_norm, placement_of
from sp_core.sharding import Sharding
from sp_core.testing.tolerance import bound, error_ratio
from tests.oracle import reference

CURVE, MODEL = "curve.json", "model"
WEIGHTS = "model.safetensors"
Told = Callable[[str, int, int], None]
"""Called with what is going on, and how much of how much is done."""


def trained(
    model: Llama,
    setting: Setting,
    *,
    layout: Layout = Sharding.zigzag,
    before: Callable[[int], None] = lambda step: None,
) -> list[Step]:
    """Train a model; `before` is called before every step and at the end."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=setting.learning_rate, fused=True)
    seen = []
    for step in range(setting.steps):
        before(step)
        for group in optimizer.param_groups:
            group["lr"] = setting.learning_rate * min(1.0, (step + 1) / setting.warmup)
        seen.append(
            train_step(
                model, optimizer, setting.batch(step), max_norm=setting.max_norm, layout=layout
            )
        )
    before(setting.steps)
    return seen


def gradients(
    model: Llama, sequences: Sequence[Sequence[int]], max_norm: float, layout: Layout
) -> dict[str, Tensor]:
    """Loss, this rank's gradients by name, and their norm before and after clipping."""
    loss = backward(model, sequences, layout=layout)
    found = {
        checkpoint_name(name): x.grad.clone()
        for name, x in model.named_parameters()
        if x.grad is not None
    }
    norms = [
        clip_gradient_norm(model.parameters(), limit, tensor=model.grid.tensor)
        for limit in (max_norm, torch.inf)
    ]
    numbers = {"loss": loss, "norm": norms[0], "clipped norm": norms[1]}
    return {
        **{name: torch.tensor([value], dtype=torch.float64) for name, value in numbers.items()},
        **found,
    }


def step_name(step: int) -> str:
    """Folder of the weights that one rank had before a step; its gradients lie beside it."""
    return f"step-{step:04}"


def run_place(
    comm: Any, place: Place, dtype: str, setting: Setting, alone: Path, tell: Told
) -> dict[str, Any]:
    """Train on a mesh from the first step to the last, then compare every few steps from one rank's weights.

    Args:
        comm: an mpi4py communicator.
        place: the mesh.
        dtype: of weights and arithmetic.
        setting: the run.
        alone: where ``run_alone`` has left what one rank did.
        tell: told what is going on.

    Returns:
        The record: losses and norms of all steps; for each kind of result the worst error over
        bound and where it was; and how far apart replicas of a weight are in the end, which should
        be 0.
    """
    layout = LAYOUTS[place.layout]
    with Mesh(comm, check="off", **place.axes) as mesh:
        model = create(
            setting.config,
            mesh,
            seed=setting.seed,
            dtype=getattr(torch, dtype),
            scheme=place.scheme,
            tp_sp=place.tp_sp,
        )
        what = f"{place.name}, {dtype}"
        curve = trained(
            model,
            setting,
            layout=layout,
            before=lambda step: tell(f"{what}: training", step, setting.steps),
        )
        worst: dict[str, tuple[float, str]] = {}
        for step in setting.checkpoints:
            tell(f"{what}: comparing gradients", step, setting.steps)
            for kind, (ratio, where) in _compare(
                mesh, place, setting, alone / dtype / step_name(step), step
            ).items():
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


def _compare(
    mesh: Mesh, place: Place, setting: Setting, folder: Path, step: int
) -> dict[str, tuple[float, str]]:
    """Worst error over bound of loss, gradients and norms over all ranks, each with its place."""
    model = load(folder, mesh, scheme=place.scheme, tp_sp=place.tp_sp)
    found = gradients(model, setting.batch(step), setting.max_norm, LAYOUTS[place.layout])
    placements = {
        checkpoint_name(name): placement_of(parameter)
        for name, parameter in model.named_parameters()
    }
    stored = load_file(folder.with_suffix(".safetensors"))
    ratios = []
    for name, x in found.items():
        expected, scale = stored[name], stored[f"scale {name}"]
        if name in placements:
            expected, scale = (
                placements[name].take(whole, model.grid.tensor.rank) for whole in (expected, scale)
            )
        ratios.append(error_ratio(x, expected, bound(scale, model.dtype)))
    greatest = all_reduce(
        torch.tensor(ratios, dtype=torch.float64), comm=model.grid.everyone, op="max"
    ).tolist()
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


def run_alone(comm: Any, dtype: str, setting: Setting, folder: Path, tell: Told) -> None:
    """Train on one rank and leave in `folder/dtype` its curve, the perturbed ones, weights, gradients and their scales.

    Args:
        comm: an mpi4py communicator of one rank.
        dtype: of weights and arithmetic.
        setting: the run.
        folder: where things go.
        tell: told what is going on.
    """
    out = folder / dtype
    out.mkdir(parents=True)
    with Mesh(comm, check="off", tp=1) as mesh:

        def run(seed: int | None) -> list[Step]:
            model = create(setting.config, mesh, seed=setting.seed, dtype=getattr(torch, dtype))
            name = (
                "training"
                if seed is None
                else f"training from other weights, {seed + 1} of {setting.perturbed}"
            )
            if seed is not None:
                move_by_one_ulp(model, seed)

            def before(step: int) -> None:
                tell(f"one rank, {dtype}: {name}", step, setting.steps)
                if seed is None and step in setting.checkpoints:
                    save(model, out / step_name(step))

            seen = trained(model, setting, before=before)
            if seed is None:
                save(model, out / MODEL, tokenizer=byte_tokenizer())
            return seen

        curve = run(None)
        others = [[step.loss for step in run(seed)] for seed in range(setting.perturbed)]
        worst = 0.0
        for step in setting.checkpoints:
            tell(f"one rank, {dtype}: gradients in float64", step, setting.steps)
            worst = max(worst, _keep_gradients(mesh, out / step_name(step), setting, step))
    losses, norms = [step.loss for step in curve], [step.norm for step in curve]
    keep(
        out / CURVE,
        {"dtype": dtype, "losses": losses, "norms": norms, "perturbed": others, "worst": worst},
    )


@torch.no_grad()
def move_by_one_ulp(model: Llama, seed: int) -> None:
    """Each weight to the next number of its dtype, up or down by chance."""
    random = torch.Generator().manual_seed(seed)
    for weight in model.parameters():
        up = torch.rand(weight.shape, generator=random) < 0.5
        weight.copy_(torch.nextafter(weight, torch.where(up, torch.inf, -torch.inf).to(weight)))


def expected(
    weights: dict[str, Tensor], sequences: Sequence[Sequence[int]], num_heads: int
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Loss and gradients in float64, each sequence by itself, and how far rounding may move each element."""
    rows = [torch.tensor([sequence]) for sequence in sequences if len(sequence) > 1]
    count = sum(row.shape[1] - 1 for row in rows)

    def run(rounding: Any, *values: Tensor) -> tuple[Tensor, ...]:
        leaves = [value.detach().requires_grad_() for value in values]
        named = dict(zip(weights, leaves, strict=True))
        losses = [
            reference.next_token_loss(
                reference.llama(row, named, num_heads=num_heads, rounding=rounding), row
            )
            * (row.shape[1] - 1)
            for row in rows
        ]
        loss = torch.stack(losses).sum() / count
        return loss.detach().reshape(1), *torch.autograd.grad(loss, leaves)

    values, scales = reference.sensitivity(run, [weight.double() for weight in weights.values()])
    names = ("loss", *weights)
    return dict(zip(names, values, strict=True)), dict(zip(names, scales, strict=True))


def _keep_gradients(mesh: Mesh, folder: Path, setting: Setting, step: int) -> float:
    """Store this rank's results from the weights in a folder, with their scales; their worst error over bound."""
    model = load(folder, mesh)
    sequences = setting.batch(step)
    found = gradients(model, sequences, setting.max_norm, Sharding.zigzag)
    values, scales = expected(
        load_file(folder / WEIGHTS), sequences, setting.config.num_attention_heads
    )
    norms = [
        torch.cat([x[name].flatten() for name in values if name != "loss"]).norm().reshape(1)
        for x in (values, scales)
    ]
    factor = min(1.0, setting.max_norm / float(norms[0]))
    for name, share in (("norm", 1.0), ("clipped norm", factor)):
        values[name], scales[name] = (norm * share for norm in norms)
    worst = max(
        error_ratio(x, values[name], bound(scales[name], model.dtype)) for name, x in found.items()
    )
    save_file(
        {**found, **{f"scale {name}": scale for name, scale in scales.items()}},
        folder.with_suffix(".safetensors"),
    )
    return worst


def attempt(world: Any, place: Place, *arguments: Any) -> dict[str, Any]:
    """The record of a mesh, also of one that was refused or whose numbers overflowed."""
    try:
        return run_place(world, place, *arguments)
    except ERRORS as error:  # the same one on every rank
        return {
            "place": place.name,
            "ranks": world.size,
            "dtype": arguments[0],
            "reason": str(error),
        }


def measure(job: dict[str, Any], rank: Rank) -> dict[str, Any]:
    """Do one job: train on each of its meshes, or, without meshes, each rank by itself in one of the dtypes.

    Rank 0 writes a file for each mesh as soon as that is done, also where all ranks have raised the
    same error.
    """
    from mpi4py import MPI

    setting, out, world = msgspec.convert(job["setting"], Setting), Path(job["out"]), rank.world
    if not job["places"]:
        run_alone(MPI.COMM_SELF, job["dtypes"][world.rank], setting, out, rank.tell)
    for dtype in job["dtypes"]:
        for place in msgspec.convert(job["places"], list[Place]):
            with planted(job["fault"]) if job["fault"] else contextlib.nullcontext():
                record = attempt(world, place, dtype, setting, out, rank.tell)
            if world.rank == 0:
                keep(Path(job["folder"]) / f"{dtype}-{place.name}.json", record)
    return {}
