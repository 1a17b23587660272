"""Gradients do not depend on how upstream gradients lie in memory, nor on what is summed beside."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from domains.collectives import MEMORIES, in_memory
from hypothesis import strategies as st
from llama_cases import Case
from torch import Tensor, nn

import sp_core as sp
from sp_core.schemes import SCHEMES
from sp_core.testing import given, spmd

TOKENS, HIDDEN, HEADS = 5, 8, 2
Traced = tuple[list[Tensor], list[Tensor]]
"""Results, and the tensors that they are differentiated by."""


EVERY_MEMORY = (*MEMORIES, "rows apart")


def lying(x: Tensor, memory: str) -> Tensor:
    """A tensor that lies in memory as named; "rows apart" means with other numbers between rows."""
    if memory != "rows apart":
        return in_memory(x, memory)
    return torch.cat([torch.full_like(x[..., :1], torch.nan), x, x], -1)[..., 1 : x.shape[-1] + 1]


def leaf(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()


def sharding_of(comm: sp.Communicator) -> sp.Sharding:
    return sp.Sharding.zigzag(TOKENS, comm.size)


def qkv(comm: sp.Communicator) -> list[Tensor]:
    length = sharding_of(comm).local_len(comm.rank)
    return [leaf(2, length, HEADS, 4, seed=3 * comm.rank + turn) for turn in range(3)]


def by_a_scheme(name: str, mesh: sp.Mesh) -> Traced:
    comm, inputs = mesh["tp"], qkv(mesh["tp"])
    options: Any = {"sharding": sharding_of(comm), "mask": sp.Mask(causal=True), "return_lse": True}
    return list(SCHEMES[name](*inputs, comm=comm, **options)), inputs


def by_a_hybrid(mesh: sp.Mesh) -> Traced:
    inputs = qkv(mesh["tp"])
    axes: Any = {"axes": ("tp", "ring"), "ulysses": "tp", "sharding": sharding_of(mesh["tp"])}
    return list(sp.hybrid_attention(*inputs, mesh=mesh, **axes, return_lse=True)), inputs


def by_one_device(mesh: sp.Mesh) -> Traced:
    inputs = [leaf(2, TOKENS, HEADS, 4, seed=turn) for turn in range(3)]
    return list(sp.local_attention(*inputs, return_lse=True)), inputs


def by_a_layer(make: Callable[..., nn.Module], mesh: sp.Mesh) -> Traced:
    torch.manual_seed(0)
    layer, comm = make(HIDDEN, comm=mesh["tp"], dtype=torch.float64), mesh["tp"]
    x = leaf(2, sharding_of(comm).local_len(comm.rank), HIDDEN, seed=comm.rank)
    mixes = isinstance(layer, sp.SelfAttention | sp.TransformerBlock)
    out = layer(x, sharding=sharding_of(comm)) if mixes else layer(x)
    return [out], [x, *layer.parameters()]


def by_a_parallel_layer(kind: Any, mesh: sp.Mesh) -> Traced:
    torch.manual_seed(0)
    comm, sharding = mesh["tp"], sharding_of(mesh["tp"])
    layer = kind.from_linear(nn.Linear(4, 4, dtype=torch.float64), comm=comm, sharding=sharding)
    gathers = kind is sp.ColumnParallelLinear
    shape = (sharding.local_len(comm.rank), 4) if gathers else (TOKENS, layer.sizes[comm.rank])
    x = leaf(2, *shape, seed=comm.rank)
    return [layer(x)], [x, *layer.parameters()]


def by_a_model(tp_sp: bool, mesh: sp.Mesh) -> Traced:
    case = Case((4, 2), layers=1)
    model = case.model(mesh, tp_sp=tp_sp)
    logits = model(case.tokens(2, TOKENS), sharding=sp.Sharding.contiguous(TOKENS, 1))
    return [logits], list(model.parameters())


def by_small_functions(mesh: sp.Mesh) -> Traced:
    x = leaf(2, TOKENS, HEADS, 4, seed=mesh.rank)
    return [
        sp.Rope(4).apply(x, range(TOKENS)),
        sp.dropout(x, 0.5, seed=1, positions=range(TOKENS)),
    ], [x]


SUBJECTS: dict[str, Callable[[sp.Mesh], Traced]] = {
    **{name: partial(by_a_scheme, name) for name in SCHEMES},
    "hybrid": by_a_hybrid,
    "one device": by_one_device,
    "LayerNorm": partial(by_a_layer, sp.LayerNorm),
    "RMSNorm": partial(by_a_layer, sp.RMSNorm),
    "FeedForward": partial(by_a_layer, partial(sp.FeedForward, gated=True)),
    "SelfAttention": partial(by_a_layer, partial(sp.SelfAttention, num_heads=2)),
    "TransformerBlock": partial(by_a_layer, partial(sp.TransformerBlock, num_heads=2)),
    "ColumnParallelLinear": partial(by_a_parallel_layer, sp.ColumnParallelLinear),
    "RowParallelLinear": partial(by_a_parallel_layer, sp.RowParallelLinear),
    "Llama": partial(by_a_model, False),
    "Llama with TP-SP": partial(by_a_model, True),
    "small functions": by_small_functions,
}


@pytest.mark.parametrize("name", sorted(SUBJECTS))
@spmd(1, 3)
def test_an_upstream_gradient_may_lie_in_memory_in_any_way(comm: Any, name: str) -> None:
    """It stays as it is, and so does what lies beside it. Collectives have a domain for this."""
    with sp.Mesh(comm, tp=comm.size, ring=1) as mesh:
        results, leaves = SUBJECTS[name](mesh)
        for memory in EVERY_MEMORY:
            numbers = [leaf(*y.shape, seed=turn).detach() for turn, y in enumerate(results)]
            upstream = [lying(x, memory) for x in numbers]
            wanted = gradients(results, leaves, [x.clone(memory_format=PLAIN) for x in upstream])
            before = [stored(x).clone() for x in upstream]
            for one, other in zip(gradients(results, leaves, upstream), wanted, strict=True):
                torch.testing.assert_close(one, other, msg=f"{{}} {memory}".format)
            for x, numbers_before in zip(upstream, before, strict=True):
                assert torch.equal(stored(x), numbers_before), memory


PLAIN = torch.contiguous_format


def gradients(
    results: list[Tensor],
    leaves: list[Tensor],
    upstream: list[Tensor],
) -> list[Tensor]:
    return list(torch.autograd.grad(results, leaves, upstream, retain_graph=True))


def stored(x: Tensor) -> Tensor:
    """All memory that a tensor is a view of."""
    return x.new_empty(0, dtype=torch.uint8).set_(x.untyped_storage())


@dataclass(frozen=True)
class Copied:
    """A tensor that is copied to all ranks, and how it is used there."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    use: str
    memory: str

    def tensor(self) -> Tensor:
        return torch.ones(self.shape, dtype=self.dtype, requires_grad=self.use != "no gradient")

    def upstream(self, place: int, rank: int) -> Tensor:
        """The gradient of its copy on a rank."""
        random = torch.Generator().manual_seed(31 * place + rank)
        numbers = torch.randint(-4, 5, self.shape, generator=random).to(self.dtype)
        return lying(numbers, self.memory) if self.shape else numbers


SHAPES = st.lists(st.integers(0, 3), max_size=2).map(tuple)
DTYPES = st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16])
USES = st.sampled_from(["used", "used", "no gradient", "not used"])
COPIED = st.builds(Copied, SHAPES, DTYPES, USES, st.sampled_from(EVERY_MEMORY))


@given(max_examples=20, drawn=st.lists(COPIED, max_size=6))
def test_tensors_of_any_dtypes_are_summed_as_if_alone(comm: Any, drawn: list[Copied]) -> None:
    """In one all-reduce for each dtype; small whole numbers, which every dtype adds exactly."""
    with sp.Mesh(comm, sp=comm.size) as mesh:
        tensors = [one.tensor() for one in drawn]
        copies = sp.copy_all_to_group(tensors, comm=mesh["sp"])
        used = [place for place, one in enumerate(drawn) if one.use == "used"]
        mesh["sp"].counters.reset()
        torch.autograd.backward(
            [copies[place] for place in used],
            [drawn[place].upstream(place, comm.rank) for place in used],
        )
        for place, (one, x) in enumerate(zip(drawn, tensors, strict=True)):
            parts = [one.upstream(place, rank) for rank in range(comm.size)]
            if one.use == "used":
                assert torch.equal(x.grad, torch.stack(parts).sum(0))
            elif x.grad is not None:
                assert one.use == "not used"
                assert not x.grad.any()
        dtypes = {one.dtype for one in drawn if one.use != "no gradient"} if used else ()
        assert mesh["sp"].counters["all_reduce"].calls == len(dtypes)
