"""List results that docstrings promise to be the same on all ranks, as rows that yield them.

The numbers are such that their sums depend on the order in which they are added.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import torch
from llama_cases import Case
from promises.ledger import Rows, row
from torch import Tensor, nn

import sp_core as sp
from sp_core import llama, scheduling
from sp_core.llama import pipeline, train
from sp_core.nn import gradients, loss

MODEL = Case((4, 2), dtype="float32", hidden=8, ffn=8, vocab=12)
PROMPTS = [[1, 5, 3], [2], [7, 4]]


@dataclass(frozen=True)
class Place:
    """Hold a mesh all of whose ranks are along one axis, and draw numbers for them.

    Args:
        mesh, comm: the mesh, and the communicator of its ranks.
        dtype: the dtype of tensors.
        seed: the seed of random numbers.
    """

    mesh: sp.Mesh
    comm: sp.Communicator
    dtype: torch.dtype
    seed: int

    def noise(self, *shape: int, rank: int | None = None) -> Tensor:
        """Return numbers of very different sizes, which differ between ranks."""
        seed = 31 * self.seed + (self.comm.rank if rank is None else rank)
        random = torch.Generator().manual_seed(seed)
        scale = 10.0 ** torch.randint(-3, 4, shape, generator=random)
        return (torch.randn(shape, generator=random) * scale).to(self.dtype)

    def common(self, *shape: int) -> Tensor:
        """Return the same numbers on every rank."""
        return self.noise(*shape, rank=99)

    def model(self, **options: Any) -> llama.Llama:
        """Return a model with one layer for each pipeline stage."""
        config = replace(MODEL.config, num_hidden_layers=self.mesh.axes.get("pp", 1))
        return llama.create(config, self.mesh, seed=self.seed, **options)


ROWS: Rows = {}
"""Rows for a `Place`. Each row is run for each of its axes, with all ranks along that axis."""


@row(ROWS, "sp", "all_gather", "gather_replicated", "broadcast")
def _(place: Place) -> Iterator[Any]:
    for name in ("all_gather", "gather_replicated", "broadcast"):
        yield getattr(sp, name)(place.noise(3, 5), comm=place.comm)


@row(ROWS, "sp", "all_reduce", "all_reduce_", "reduce_from_group")
def _(place: Place) -> Iterator[Any]:
    for name in ("all_reduce", "all_reduce_", "reduce_from_group"):
        yield getattr(sp, name)(place.noise(97), comm=place.comm)
    yield sp.all_reduce_start(place.noise(97), comm=place.comm).wait()
    yield sp.plan("all_reduce", place.noise(97), comm=place.comm).run()
    yield sp.all_reduce(place.noise(97), comm=place.comm, deterministic=True)


@row(ROWS, "sp", "copy_to_group", "copy_all_to_group")
def _(place: Place) -> Iterator[Any]:
    one, other = place.common(5).requires_grad_(), place.common(3).double().requires_grad_()
    sp.copy_to_group(one, comm=place.comm).backward(place.noise(5))
    copies = sp.copy_all_to_group([one, other], comm=place.comm)
    torch.autograd.backward(copies, [place.noise(5), place.noise(3).double()])
    yield from (one.grad, other.grad)


@row(ROWS, "sp", "LayerNorm", "RMSNorm", "FeedForward", "SelfAttention", "TransformerBlock")
def _(place: Place) -> Iterator[Any]:
    torch.manual_seed(place.seed)
    comm, dtype = place.comm, torch.promote_types(place.dtype, torch.float32)
    sharding = sp.Sharding.striped(4 * comm.size + 1, comm.size)
    tokens = sharding.local_len(comm.rank)
    for norm, gated in (("layer", False), ("rms", True)):
        options: Any = {"norm": norm, "gated": gated, "rope": sp.Rope(4), "dtype": dtype}
        block = sp.TransformerBlock(8, 2, comm=comm, **options)
        for parameter in block.parameters():
            parameter.data = place.common(*parameter.shape).to(dtype)
        x = place.noise(2, tokens, 8).to(dtype)
        block(x, sharding=sharding).backward(place.noise(2, tokens, 8).to(dtype))
        yield from (parameter.grad for parameter in block.parameters())


@row(
    ROWS, "sp", "ColumnParallelLinear.to_linear", "RowParallelLinear.to_linear", "RowParallelLinear"
)
def _(place: Place) -> Iterator[Any]:
    comm, size = place.comm, place.comm.size
    sharding = sp.Sharding.zigzag(3 * size, size)
    for kind in (sp.ColumnParallelLinear, sp.RowParallelLinear):
        whole = nn.Linear(size + 1, size + 1, dtype=place.dtype)
        whole.weight.data, whole.bias.data = (
            place.common(size + 1, size + 1),
            place.common(size + 1),
        )
        layer = kind.from_linear(whole, comm=comm, sharding=sharding)
        yield from layer.to_linear().parameters()
    assert layer.bias is not None
    layer(place.noise(1, 3 * size, layer.sizes[comm.rank])).backward(place.noise(1, 3, size + 1))
    yield layer.bias.grad


@row(ROWS, "tp ring", "next_token_loss")
def _(place: Place) -> Iterator[Any]:
    tensor, data = (place.mesh[axis if axis in place.mesh.axes else ()] for axis in ("tp", "ring"))
    labels = torch.arange(6).reshape(2, 3) % 2
    yield loss.next_token_loss(place.noise(2, 3, 4), labels, tensor=tensor, data=data)


@row(ROWS, "sp", "reduce_gradients", "clip_gradient_norm")
def _(place: Place) -> Iterator[Any]:
    alone, shape = place.mesh[()], (place.comm.size, 3)
    for data, tensor in ((place.comm, alone), (alone, place.comm)):
        placement = gradients.Placement.replicated(shape, tensor.size, partial=True)
        weights = [gradients.place(nn.Parameter(place.common(*shape)), placement) for _ in range(2)]
        weights[0].grad = place.noise(*shape)
        gradients.reduce_gradients(weights, data=data, tensor=tensor)
        yield from [weight.grad.clone() for weight in weights if weight.grad is not None]
        yield gradients.clip_gradient_norm(weights, 1e-3, tensor=tensor, stages=data)
        yield from (weight.grad for weight in weights)


@torch.no_grad()
def descend(model: nn.Module) -> None:
    """Subtract the gradients from the weights, as SGD with lr=1; torch.optim imports slowly."""
    for parameter in model.parameters():
        parameter.sub_(cast("Tensor", parameter.grad))


@row(ROWS, "tp ring dp", "train_step", "backward", "create")
def _(place: Place) -> Iterator[Any]:
    """Yield loss and norm of a step, and the weights that ranks share, before and after it."""
    for tp_sp in (False, True):
        model = place.model(tp_sp=tp_sp)
        shared = [p for p in model.parameters() if len(set(gradients.placement_of(p).held)) == 1]
        assert len(shared) >= 3
        yield from (weight.detach().clone() for weight in shared)
        optimizer: Any = SimpleNamespace(step=partial(descend, model))
        step = train.train_step(model, optimizer, PROMPTS, max_norm=0.1)
        yield from (step.loss, step.norm, *shared)


@row(ROWS, "tp ring pp", "Decoder.prefill", "Decoder.decode")
def _(place: Place) -> Iterator[Any]:
    decoder = llama.Decoder(place.model(), [9, 9, 9])
    yield from (decoder.prefill(PROMPTS), decoder.decode([[1], [], [2]]))


@row(ROWS, "tp ring pp dp", "generate")
def _(place: Place) -> Iterator[Any]:
    sampling = llama.Sampling(temperature=1.0, seed=place.seed)
    yield llama.generate(place.model(), PROMPTS, max_tokens=3, sampling=sampling)


@row(ROWS, "tp ring", "prefill_unequal")
def _(place: Place) -> Iterator[Any]:
    model, lengths = place.model(), [5, 1, 2, 3, 1]
    for name in ("balanced", "dynamic"):
        plan = scheduling.POLICIES[name](lengths, model.grid.sequence.size, scheduling.Work(1, 1))
        texts = [[3] * length for length in lengths]
        yield llama.prefill_unequal(model, texts, plan, pass_tokens=2)


@row(ROWS, "pp tp", "loss_and_gradients")
def _(place: Place) -> Iterator[Any]:
    texts = [place.common(1, length).abs().long() % 12 for length in (2, 5)]
    batches = [pipeline.MicroBatch(x, x, sp.Sharding.contiguous(x.shape[1], 1)) for x in texts]
    yield pipeline.loss_and_gradients(place.model(), batches)
