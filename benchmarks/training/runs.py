"""Train on a mesh and compare with a run on one rank, which also gives the limits.

There are two limits. Gradients have a bound by element, from a float64 reference: the error that
rounding may cause. Losses are compared with a run from weights that differ by one unit in the last
place. Training amplifies every difference, and a mesh adds in a different order. So its losses may
be as far away as those of such a run, within a factor.
"""

import contextlib
import inspect
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

import sp_core as sp
from benchmarks.corpus import source_bytes
from benchmarks.worker import Rank
from sp_core.llama import Llama, LlamaConfig, create, load, model as models, save, train
from sp_core.llama.names import checkpoint_name
from sp_core.llama.train import Layout, Step, backward, train_step
from sp_core.nn import gradients as of_weights, loss
from sp_core.nn.gradients import clip_gradient_norm, placement_of
from sp_core.testing.tolerance import bound, error_ratio
from tests.oracle import reference

DTYPES = ("float64", "float32")


class Place(msgspec.Struct, frozen=True):
    """A mesh and how it is used.

    Args:
        axes: the sizes of the mesh's axes by name.
        scheme: the attention scheme over the ranks that share a sequence; None is the default.
        layout: which of these ranks has which tokens.
        tp_sp: whether tensor ranks split the tokens too.
    """

    axes: dict[str, Any]
    scheme: str | None = None
    layout: str = "zigzag"
    tp_sp: bool = False

    @property
    def name(self) -> str:
        """Return a name for people and for files."""
        axes = [f"{axis}{size}" for axis, size in self.axes.items()]
        return "_".join(filter(None, (*axes, self.scheme, "sp" * self.tp_sp)))


def places(ranks: int) -> list[Place]:
    """Return every scheme on every mesh: all ranks along one axis; 4 ranks also as 2 x 2."""
    single = [
        Place({"dp": ranks}),
        Place({"ring": ranks}),
        Place({"ring": ranks}, "allgather_kv", "contiguous"),
        Place({"ulysses": ranks}, None, "striped"),
        Place({"tp": ranks}),
        Place({"tp": ranks}, tp_sp=True),
    ]
    pairs = [
        Place({"dp": 2, "ring": 2}, None, "striped"),
        Place({"dp": 2, "ring": 2}, "allgather_kv", "zigzag"),
        Place({"dp": 2, "ulysses": 2}),
        Place({"dp": 2, "tp": 2}),
        Place({"ring": 2, "ulysses": 2}),
        Place({"ring": 2, "tp": 2}, None, "contiguous"),
        Place({"ring": 2, "tp": 2}, "allgather_kv", "striped"),
        Place({"ulysses": 2, "tp": 2}, None, "contiguous", tp_sp=True),
    ]
    return [*single, *(pairs if ranks == 4 else [])]


MODEL: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 144,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 24,
}
"""A million parameters; 3 and 4 tensor ranks share key/value heads, 4 do not divide the heads."""


class Setting(msgspec.Struct, frozen=True):
    """A training run.

    Args:
        steps: the number of steps.
        every: gradients are compared once in so many steps.
        sequences: the number of sequences in a batch.
        shortest, longest: the limits of a sequence's length in tokens.
        learning_rate: the learning rate of AdamW, reached after `warmup` steps.
        max_norm: the norm to which gradients are clipped.
        perturbed: number of runs from weights that differ by one unit in the last place.
        seed: the seed of weights and batches.
        model: sizes of the LLaMA.
    """

    steps: int = 150
    every: int = 25
    sequences: int = 4
    shortest: int = 16
    longest: int = 64
    learning_rate: float = 1e-3
    warmup: int = 20
    max_norm: float = 1.0
    perturbed: int = 3
    seed: int = 1
    model: dict[str, Any] = msgspec.field(default_factory=lambda: dict(MODEL))

    @property
    def config(self) -> LlamaConfig:
        """Return the architecture."""
        return LlamaConfig(**self.model)

    @property
    def checkpoints(self) -> range:
        """Return the steps before which gradients are compared; the last is after the training."""
        return range(0, self.steps + 1, self.every)

    def batch(self, step: int) -> list[list[int]]:
        """Return pieces of the standard library's source, of unequal lengths, as bytes."""
        chance = random.Random(f"{self.seed} {step}")
        lengths = [chance.randint(self.shortest, self.longest) for _ in range(self.sequences)]
        text = source_bytes(1 << 20)
        starts = [chance.randrange(len(text) - length) for length in lengths]
        return [list(text[a : a + n]) for a, n in zip(starts, lengths, strict=True)]


FAULTS = {
    "gradients of norms are not reduced": (
        *(of_weights, "reduce_gradients", "    pairs = [(_own_gradient"),
        "    wanted = {n: pair for n, pair in wanted.items() if pair[0].dim() > 1}\n"
        "    pairs = [(_own_gradient",
    ),
    "a mean of the ranks' means": (
        *(loss, "next_token_loss", "counted(valid, data)"),
        "max(int(valid.sum()), 1) * data.size",
    ),
    "labels shifted inside each shard": (
        *(loss, "next_token_labels", "    return labels\n"),
        "    return torch.cat((tokens[:, 1:], torch.full_like(tokens[:, :1], IGNORED)), 1)\n",
    ),
}
"""Name of a fault -> module, its function, a text in the function, and its wrong replacement."""


@contextlib.contextmanager
def planted(name: str) -> Iterator[None]:
    """Plant a fault into the library while the block runs.

    Raises:
        LookupError: the library no longer has the text that the fault replaces.
    """
    module, function, text, wrong = FAULTS[name]
    right = getattr(module, function)
    source = inspect.getsource(right)
    callers = [each for each in (train, models) if vars(each).get(function) is right]
    if source.count(text) != 1 or not callers:
        raise LookupError(
            f"{function} has no {text!r}, or is not what a step calls; plant the fault elsewhere."
        )
    names = dict(vars(module))
    exec(compile(source.replace(text, wrong), f"<{name}>", "exec"), names)
    for caller in callers:
        setattr(caller, function, names[function])
    try:
        yield
    finally:
        for caller in callers:
            setattr(caller, function, right)


WEIGHTS = "model.safetensors"
Worst = dict[str, tuple[float, str]]
"""Kind of result -> (greatest error over its bound, name of the result with that error)."""


def trained(
    model: Llama,
    setting: Setting,
    layout: Layout,
    before: Callable[[int], None] = lambda step: None,
) -> list[Step]:
    """Train a model and return its steps; `before` runs before each step and after the last."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=setting.learning_rate, fused=True)
    take = partial(train_step, model, optimizer, max_norm=setting.max_norm, layout=layout)
    seen = []
    for step in range(setting.steps):
        before(step)
        for group in optimizer.param_groups:
            group["lr"] = setting.learning_rate * min(1.0, (step + 1) / setting.warmup)
        seen.append(take(setting.batch(step)))
    before(setting.steps)
    return seen


def gradients(
    model: Llama, sequences: Sequence[Sequence[int]], max_norm: float, layout: Layout
) -> dict[str, Tensor]:
    """Return loss, this rank's gradients by name, and their norm before and after clipping."""
    loss = backward(model, sequences, layout=layout)
    named = {checkpoint_name(name): x.grad for name, x in model.named_parameters()}
    found = {name: grad.clone() for name, grad in named.items() if grad is not None}
    clip = partial(clip_gradient_norm, list(model.parameters()), tensor=model.grid.tensor)
    numbers = {"loss": loss, "norm": clip(max_norm), "clipped norm": clip(torch.inf)}
    wide = {name: torch.tensor([x], dtype=torch.float64) for name, x in numbers.items()}
    return {**wide, **found}


def run_place(comm: Any, place: Place, dtype: str, setting: Setting, alone: Path) -> dict[str, Any]:
    """Train on a mesh. Then check the mesh's gradients for the weights that one rank has stored.

    Args:
        comm: an mpi4py communicator.
        place: the mesh, with its scheme and layout.
        dtype: the dtype of weights and arithmetic.
        setting: the sizes and numbers of the training run.
        alone: the folder that `run_alone` has filled with weights and expected gradients.

    Returns:
        The record. "losses" has the loss of each step. "worst" has for each kind of result the
        greatest error over its bound, with the result's name and step. "apart" is how far copies
        of a weight differ between ranks in the end, which should be 0.
    """
    layout: Layout = getattr(sp.Sharding, place.layout)
    how: Any = {"scheme": place.scheme, "tp_sp": place.tp_sp}
    with sp.Mesh(comm, check="off", **place.axes) as mesh:
        model = create(setting.config, mesh, seed=setting.seed, dtype=getattr(torch, dtype), **how)
        curve = trained(model, setting, layout)
        worst: Worst = {}
        for step in setting.checkpoints:
            folder = alone / dtype / f"step-{step}"
            again = load(folder, mesh, **how)
            found = gradients(again, setting.batch(step), setting.max_norm, layout)
            stored = load_file(folder.with_suffix(".safetensors"))
            for kind, ratio, name in compare(again, found, stored):
                worst[kind] = max(worst.get(kind, (0.0, "")), (ratio, f"{name} at step {step}"))
        return {
            "place": place.name,
            "ranks": mesh.size,
            "layout": place.layout,
            "dtype": dtype,
            "losses": [step.loss for step in curve],
            "worst": worst,
            "apart": apart(model),
        }


def compare(
    model: Llama, found: dict[str, Tensor], stored: dict[str, Tensor]
) -> list[tuple[str, float, str]]:
    """Return kind, greatest error over its bound on any rank, and name of each result."""
    rank, ratios = model.grid.tensor.rank, []
    weights = {checkpoint_name(name): weight for name, weight in model.named_parameters()}
    for name, x in found.items():
        expected, scale = stored[name], stored[f"scale {name}"]
        if name in weights:
            placement = placement_of(weights[name])
            expected, scale = (placement.take(whole, rank) for whole in (expected, scale))
        ratios.append(error_ratio(x, expected, bound(scale, model.dtype)))
    mine = torch.tensor(ratios, dtype=torch.float64)
    greatest = sp.all_reduce(mine, comm=model.grid.everyone, op="max")
    return [
        ("gradients" if name in weights else name, ratio, name)
        for name, ratio in zip(found, greatest.tolist(), strict=True)
    ]


@torch.no_grad()
def apart(model: Llama) -> float:
    """Return the greatest difference between two ranks' copies of one element of a weight."""
    rank, found = model.grid.tensor.rank, list[Tensor]()
    for parameter in model.parameters():
        spread = placement_of(parameter).spread
        mine, held = spread(parameter, rank), spread(torch.ones_like(parameter), rank) > 0
        extremes = [x.where(held, -torch.inf) for x in (mine, -mine)]
        high, low = (sp.all_reduce(x, comm=model.grid.everyone, op="max") for x in extremes)
        found.append((high + low).max())
    return float(torch.stack(found).max())  # `max` of Python may drop a NaN


def run_alone(comm: Any, dtype: str, setting: Setting, folder: Path) -> dict[str, Any]:
    """Train on one rank, and write weights, gradients and their scales into `folder/dtype`.

    Args:
        comm: an mpi4py communicator of one rank.
        dtype: the dtype of weights and arithmetic.
        setting: the sizes and numbers of the training run.
        folder: the folder for all dtypes. Weights before step N go into a folder `step-N`,
            gradients into a file beside it.

    Returns:
        The losses, those of perturbed runs, and the worst error over bound of the gradients.
    """
    out = folder / dtype
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    with sp.Mesh(comm, check="off", tp=1) as mesh:

        def run(seed: int | None) -> list[float]:
            model = create(setting.config, mesh, seed=setting.seed, dtype=getattr(torch, dtype))
            if seed is not None:
                move_by_one_ulp(model, seed)

            def before(step: int) -> None:
                if seed is None and step in setting.checkpoints:
                    save(model, out / f"step-{step}")

            return [step.loss for step in trained(model, setting, sp.Sharding.zigzag, before)]

        losses, *others = (run(seed) for seed in (None, *range(setting.perturbed)))
        ratios = [
            _keep_gradients(mesh, out / f"step-{step}", setting, step)
            for step in setting.checkpoints
        ]
    return {"dtype": dtype, "losses": losses, "perturbed": others, "worst": max(ratios)}


@torch.no_grad()
def move_by_one_ulp(model: Llama, seed: int) -> None:
    """Move each weight to the next number of its dtype, up or down by chance."""
    random = torch.Generator().manual_seed(seed)
    for weight in model.parameters():
        up = torch.rand(weight.shape, generator=random) < 0.5
        weight.copy_(torch.nextafter(weight, torch.where(up, torch.inf, -torch.inf).to(weight)))


def expected(
    weights: dict[str, Tensor], sequences: Sequence[Sequence[int]], num_heads: int
) -> reference.Reference:
    """Return loss and gradients in float64, computed for each sequence by itself."""
    rows = [torch.tensor([sequence]) for sequence in sequences if len(sequence) > 1]
    count = sum(row.shape[1] - 1 for row in rows)

    def run(rounding: Any, leaves: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        losses = []
        for row in rows:
            logits = reference.llama(row, leaves, num_heads=num_heads, rounding=rounding)
            losses.append(F.cross_entropy(logits[0, :-1], row[0, 1:], reduction="sum"))
        loss = torch.stack(losses).sum() / count
        return loss, {"loss": loss.reshape(1)}

    return reference.sensitivity(run, weights)


def _keep_gradients(mesh: sp.Mesh, folder: Path, setting: Setting, step: int) -> float:
    """Store the float64 results for the weights in a folder. Return the worst error over bound."""
    model, sequences = load(folder, mesh), setting.batch(step)
    found = gradients(model, sequences, setting.max_norm, sp.Sharding.zigzag)
    weights = load_file(folder / WEIGHTS)
    values, scales, _ = expected(weights, sequences, setting.config.num_attention_heads)
    norms = [torch.cat([x[name].flatten() for name in weights]).norm() for x in (values, scales)]
    factor = min(1.0, setting.max_norm / float(norms[0]))
    for name, share in (("norm", 1.0), ("clipped norm", factor)):
        values[name], scales[name] = (norm.reshape(1) * share for norm in norms)
    stored = {**values, **{f"scale {name}": scale for name, scale in scales.items()}}
    worst = max(ratio for _, ratio, _ in compare(model, found, stored))
    save_file({**stored, **found}, folder.with_suffix(".safetensors"))
    return worst


def measure(job: dict[str, Any], rank: Rank) -> dict[str, Any]:
    """Train on a mesh in every dtype. Without a mesh each rank trains alone, in one dtype."""
    from mpi4py import MPI

    setting, folder = msgspec.convert(job["setting"], Setting), Path(job["folder"])
    if job["place"] is None:
        dtype = DTYPES[rank.world.rank]
        curve = run_alone(MPI.COMM_SELF, dtype, setting, folder)
        return {"curves": dict(zip(DTYPES, rank.world.allgather(curve), strict=True))}
    place = msgspec.convert(job["place"], Place)
    with planted(job["fault"]) if job["fault"] else contextlib.nullcontext():
        runs = [run_place(rank.world, place, dtype, setting, folder) for dtype in DTYPES]
    return {"runs": runs}
