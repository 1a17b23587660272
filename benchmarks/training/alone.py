"""One rank: the run with which every mesh is compared, and what decides how far one may be from it.

Two yardsticks. For gradients a float64 reference, which says element by element how far rounding may move a result. For whole
curves the same run from weights that differ by one unit in the last place: training amplifies every difference, and a mesh that
adds in another order may be as far away as such a run, within a factor.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.training.runs import Told, gradients, keep, step_name, trained
from benchmarks.training.setting import Setting
from sp_core.llama import Llama, byte_tokenizer, create, load, save
from sp_core.llama.train import Step
from sp_core.mesh import Mesh
from sp_core.sharding import Sharding
from sp_core.testing.tolerance import bound, error_ratio
from tests.oracle import reference

CURVE, MODEL = "curve.json", "model"
WEIGHTS = "model.safetensors"


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
            name = "training" if seed is None else f"training from other weights, {seed + 1} of {setting.perturbed}"
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
    keep(out / CURVE, {"dtype": dtype, "losses": losses, "norms": norms, "perturbed": others, "worst": worst})


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
            reference.next_token_loss(reference.llama(row, named, num_heads=num_heads, rounding=rounding), row) * (row.shape[1] - 1)
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
    values, scales = expected(load_file(folder / WEIGHTS), sequences, setting.config.num_attention_heads)
    norms = [torch.cat([x[name].flatten() for name in values if name != "loss"]).norm().reshape(1) for x in (values, scales)]
    factor = min(1.0, setting.max_norm / float(norms[0]))
    for name, share in (("norm", 1.0), ("clipped norm", factor)):
        values[name], scales[name] = (norm * share for norm in norms)
    worst = max(error_ratio(x, values[name], bound(scales[name], model.dtype)) for name, x in found.items())
    save_file({**found, **{f"scale {name}": scale for name, scale in scales.items()}}, folder.with_suffix(".safetensors"))
    return worst
