"""Test layers, sums of gradients and rotary angles; `domains/` judges what layers compute."""

import copy
import inspect
import math
import pickle
from collections.abc import Callable, Iterable
from functools import partial
from itertools import compress, pairwise, product
from typing import Any

import numpy as np
import pytest
import torch
from domains.declared import normal
from domains.numeric import SCALINGS, YARN, uniform
from kit.meshed import meshed
from oracle import reference
from oracle.changed_parts import CHANGES, PARTS
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import sp_core as sp
from sp_core.llama import LlamaConfig, create
from sp_core.nn.gradients import (
    Placement,
    clip_gradient_norm,
    place,
    reduce_gradients,
)
from sp_core.schemes.tp_sp import gather_linears, linear_scatter
from sp_core.testing import device, spmd

pytestmark = pytest.mark.usefixtures("short_slots")


def grid(comm: Any) -> sp.Mesh:
    """Make a mesh for any scheme. Axis `ulysses` has two ranks if the number of ranks is even."""
    fast = 2 - comm.size % 2
    return sp.Mesh(comm, device=device(), ring=comm.size // fast, ulysses=fast)


OTHER: dict[str, Any] = {
    "hidden": 32,
    "num_heads": 2,
    "num_kv_heads": 2,
    "head_dim": 8,
    "ffn_hidden": 8,
    "gated": True,
    "norm": "rms",
    "attention": sp.ring_attention,
    "mask": sp.Mask(causal=True),
    "rope": sp.Rope(4),
    "bias": False,
    "dropout": 0.5,
    "softcap": 2.0,
    "sinks": True,
    "alibi": (1.0, 0.5, 0.2, 0.1),
    "chunk": 1,
    "eps": 0.5,
    "dtype": torch.float64,
}
"""Other values than the defaults of all arguments of layers but `comm` and `device`."""
ROPES = [
    *(sp.Rope(4, base) for base in (10000.001, 10000.0)),
    *(sp.Rope(4, scaling={"rope_type": "linear", "factor": factor}) for factor in (2.0, 2.5)),
]
LAYERS = (sp.RMSNorm, sp.LayerNorm, sp.FeedForward, sp.SelfAttention, sp.TransformerBlock)


@pytest.mark.parametrize("made", LAYERS)
@spmd(2)
def test_layers_of_other_settings_on_one_rank_are_refused(
    comm: Any, made: Callable[..., nn.Module]
) -> None:
    names = {*inspect.signature(made).parameters} - {"comm", "device"}
    base = {name: value for name, value in (("hidden", 16), ("num_heads", 4)) if name in names}
    changes: list[Any] = [({}, {name: OTHER[name]}) for name in sorted(names)]
    if "rope" in names:
        changes += pairwise({"rope": rope} for rope in ROPES)
    x, given = torch.ones(1, 2, 16, device=device()), dict[str, Any]()
    if "num_heads" in names:
        given = {"sharding": sp.Sharding.contiguous(4, comm.size)}
    if made is sp.TransformerBlock:
        given |= {"seed": 1}
    for usual, other in changes:
        with grid(comm) as mesh:
            held = {"comm": mesh["ring", "ulysses"], "device": device()}
            layer = made(**(base | usual | (other if comm.rank else {})), **held)
            with pytest.raises((ValueError, TypeError, sp.RankError)) as caught:
                layer(x, **given)
            assert len(set(comm.allgather(repr(caught.value)))) == 1, other


def results(group: sp.Communicator, change: Callable[[Any], object]) -> list[Tensor]:
    """Return the whole result of a block that is changed first, and all gradients."""
    sharding = sp.Sharding.zigzag(8, group.size)
    block = sp.TransformerBlock(4, 2, comm=group, gated=True, chunk=2, dtype=torch.float64)
    change(block)
    for n, weight in enumerate(block.parameters()):
        if weight.dtype == torch.float64:
            weight.data = normal(n, weight.shape, "float64")
    x = sharding.shard(normal(99, (2, 8, 4), "float64"), group.rank, 1).requires_grad_()
    y = block(x, sharding=sharding)
    learning = [weight for weight in block.parameters() if weight.requires_grad]
    dx, *grads = torch.autograd.grad(y.square().sum(), [x, *learning])
    parts = [sp.all_gather(part, comm=group, dim=1, sizes=sharding.lengths) for part in (y, dx)]
    return [*(sharding.unshard(x.split(sharding.lengths, 1), 1) for x in parts), *grads]


def replace(names: Iterable[str], change: Callable[[nn.Linear], nn.Module], block: Any) -> None:
    """Change the parts of a block that have these names."""
    for name in names:
        block.set_submodule(name, change(block.get_submodule(name)))


@pytest.mark.parametrize("change", CHANGES)
@spmd(1, 2)
@meshed()
def test_a_changed_part_of_a_layer_computes_what_it_computes_on_one_device(
    mesh: sp.Mesh, change: str
) -> None:
    plain = results(mesh[()], partial(replace, (), nn.Identity))
    for names in (*((name,) for name in PARTS), PARTS):
        changed = partial(replace, names, CHANGES[change])
        found, wanted = (results(mesh[x], changed) for x in ("sp", ()))
        # The gradient of k's bias is zero: what is left are rounding errors of large terms.
        largest = max(part.abs().max().item() for part in wanted)
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-14 * largest)
        assert any(not torch.equal(a, b) for a, b in zip(found, plain, strict=False))


TIED = {"attention.k_proj": "attention.v_proj", "feed_forward.gate": "feed_forward.up"}


def tie(block: Any) -> None:
    """Give pairs of parts of a block the same weights."""
    for one, other in TIED.items():
        block.set_submodule(one, block.get_submodule(other))


@spmd(1, 2, 3)
@meshed()
def test_weights_that_are_tied_in_a_layer_have_the_gradient_of_one_device(mesh: sp.Mesh) -> None:
    found, wanted = (results(mesh[x], tie) for x in ("sp", ()))
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)


@spmd(1)
@meshed()
def test_weights_that_are_tied_in_a_layer_have_the_sum_of_the_gradients_of_both(
    mesh: sp.Mesh,
) -> None:
    tied, alone = (
        sp.TransformerBlock(4, 2, comm=mesh["sp"], gated=True, dtype=torch.float64) for _ in "ab"
    )
    tie(tied)
    alone.load_state_dict(tied.state_dict())
    for block in (tied, alone):
        out = block(normal(1, (1, 6, 4), "float64"), sharding=sp.Sharding.contiguous(6, 1))
        out.square().sum().backward()
    for pair in TIED.items():
        parts: Any = [alone.get_parameter(f"{name}.weight").grad for name in pair]
        shared = tied.get_parameter(f"{pair[0]}.weight").grad
        torch.testing.assert_close(shared, sum(parts))


@spmd(2)
@meshed(device=device)
def test_narrow_numbers_of_numpy_on_one_rank_make_the_same_layers(mesh: sp.Mesh) -> None:
    """Products of them would wrap, and their texts differ from those of Python's numbers."""
    number: Any = np.uint8 if mesh.rank else int
    heads = {"num_kv_heads": number(2), "head_dim": number(100)}
    one = mesh["sp"]
    more: dict[str, Any] = {"chunk": number(3), "dropout": 0.5, "comm": one, "device": device()}
    block = sp.TransformerBlock(number(200), number(4), **heads, **more)
    assert block.attention.q_proj.weight.shape == (400, 200)
    assert block.feed_forward.up.weight.shape == (800, 200)
    x, sharding = torch.ones(1, 4, 200, device=device()), sp.Sharding.contiguous(8, 2)
    assert sp.RMSNorm(number(4), comm=one).extra_repr() == "hidden=4, eps=1e-06"
    out, same, zero, one_more = (
        block(x, sharding=sharding, seed=seed) for seed in (number(200), 200, number(0), 1)
    )
    assert torch.equal(out, same)
    assert not torch.equal(zero, one_more)
    weight = place(nn.Parameter(torch.ones(2, device=device())), Placement.replicated((2,), 2))
    weight.grad = torch.tensor([6.0, 8.0], device=device())
    assert clip_gradient_norm([weight], number(5), tensor=one) == 10.0
    assert weight.grad.tolist() == [3.0, 4.0]


@spmd(1)
@meshed("tp", device=device)
def test_a_norm_is_compared_with_a_limit_of_a_short_dtype(mesh: sp.Mesh) -> None:
    """In float16 the norm 1.0003 would be 1."""
    weight = nn.Parameter(torch.ones(1, device=device()))
    place(weight, Placement.replicated((1,), 1)).grad = torch.full_like(weight, 1.0003)
    limit: Any = np.float16(1)
    clip_gradient_norm([weight], limit, tensor=mesh["tp"])
    assert weight.grad is not None
    assert weight.grad.item() == pytest.approx(1, rel=1e-6)


@pytest.mark.parametrize("kind", ["block", "hybrid", "column", "llama"])
@spmd(1, 2, 4)
def test_a_copy_of_a_layer_is_another_layer_over_the_same_ranks(comm: Any, kind: str) -> None:
    sharding = sp.Sharding.contiguous(8, comm.size)
    with grid(comm) as mesh:
        tokens = mesh["ring", "ulysses"]
        block = partial(sp.TransformerBlock, 8, 2, num_kv_heads=1, rope=sp.Rope(4), comm=tokens)
        column, hybrid = sp.ColumnParallelLinear, partial(sp.hybrid_attention, mesh=mesh)
        make: dict[str, Callable[[], Any]] = {
            "block": lambda: block(attention=sp.ring_attention),
            "hybrid": lambda: block(attention=hybrid),
            "column": lambda: column.from_linear(nn.Linear(8, 8), comm=tokens, sharding=sharding),
            "llama": lambda: create(LlamaConfig(9, 8, 8, 1, 2, 1, 4), mesh),
        }
        shape = (1, 8 // comm.size)
        x = torch.full(shape, 3) if kind == "llama" else torch.ones(*shape, 8)
        given = {} if kind == "column" else {"sharding": sharding}
        layer, x = make[kind]().to(mesh.device), x.to(mesh.device)
        other, before = copy.deepcopy(layer), layer(x, **given)
        pairs = [*zip(layer.parameters(), other.parameters(), strict=True)]
        assert torch.equal(other(x, **given), before)
        assert all(vars(a).get("placement") == vars(b).get("placement") for a, b in pairs)
        for _, parameter in pairs:
            parameter.data.zero_()
        assert torch.equal(layer(x, **given), before)
        with pytest.raises(TypeError, match="state_dict"):
            pickle.dumps(layer)
        for assign in (False, True):
            other.load_state_dict(layer.state_dict(), assign=assign)
            pairs = [*zip(layer.parameters(), other.parameters(), strict=True)]
            assert all(torch.equal(a, b) for a, b in pairs)
            assert all(vars(a).get("placement") == vars(b).get("placement") for a, b in pairs)


@spmd(2)
@meshed()
def test_layers_that_share_an_input_give_the_gradients_that_are_needed(mesh: sp.Mesh) -> None:
    """The backward gathers or sums only for the inputs that need a gradient.

    The input is kept only for gradients of weights.
    """
    shapes = [(1, 3, 4), (2, 4), (2,), (5, 4), (5,)]
    for needs in [*product((False, True), repeat=5)][1:]:
        x, w, b, v, c = leaves = [
            torch.rand(shape).requires_grad_(y) for shape, y in zip(shapes, needs, strict=True)
        ]
        outs: Any = gather_linears(x, [(w, b), (v, c)], comm=mesh["sp"], lengths=(3, 3))
        kept = [y for y in outs[0].grad_fn.saved_tensors if y is not None]
        assert len(kept) == 2 + (needs[1] or needs[3])
        mesh["sp"].counters.reset()
        torch.autograd.grad(torch.cat(outs, 2).sum(), [x for x in leaves if x.requires_grad])
        calls = [mesh["sp"].counters[op].calls for op in ("reduce_scatter", "all_gather")]
        assert calls == [3 * needs[0], 3 * (needs[1] or needs[3])]  # one token a call


@spmd(2)
@meshed()
def test_a_scatter_computes_and_keeps_what_its_needed_gradients_need(mesh: sp.Mesh) -> None:
    """The gradient of each input takes one matrix product, of 2 * 6 * 4 * 2 operations."""
    y, weight = torch.arange(12.0).view(1, 6, 2), torch.ones(4, 2)
    wanted = torch.full_like(y, 4.0), y.sum((0, 1)).expand(4, 2)

    for needs in ((False, True), (True, True), (True, False)):
        leaves = y.requires_grad_(needs[0]), weight.requires_grad_(needs[1])
        out: Any = linear_scatter(y, weight, comm=mesh["sp"], lengths=(3, 3))
        kept = [x.shape for x in out.grad_fn.saved_tensors if x is not None]
        with FlopCounterMode(display=False) as counter:
            grads = torch.autograd.grad(out.sum(), [*compress(leaves, needs)])
        assert counter.get_total_flops() == 96 * sum(needs)
        assert kept == [weight.shape, y.shape][: 1 + needs[1]]
        assert all(map(torch.equal, grads, compress(wanted, needs)))


@spmd(2)
@meshed("tp", device=device)
def test_chunks_of_tokens_may_add_up_beyond_float16_in_gradients_of_weights(mesh: sp.Mesh) -> None:
    """The chunks add 2^15, 2^15, -2^15 and 0."""
    half: Any = {"dtype": torch.float16, "device": device()}
    x, upstream = torch.full((1, 4, 1), 2**7, **half), torch.tensor([[[1], [1], [-1], [0]]], **half)
    weights = [torch.ones(1, 1, **half, requires_grad=True) for _ in "ab"]
    given: Any = {"comm": mesh["tp"], "lengths": (4, 4)}
    (y,) = gather_linears(x, [(weights[0], None)], **given)
    out = linear_scatter(y, weights[1], **given)
    grads = torch.autograd.grad(out, weights, 2**7 * upstream)
    assert [grad.tolist() for grad in grads] == [[[2**15]]] * 2


@spmd(1, 2)
@meshed("tp", device=device)
def test_a_parameter_that_is_given_twice_counts_once(mesh: sp.Mesh) -> None:
    """Without `tensor` it may have a placement, which is for a single rank."""
    x = nn.Parameter(torch.zeros(2, device=device()))
    x.grad = torch.tensor([3.0, 4.0], device=device())
    place(x, Placement.replicated((2,), mesh.size))
    assert clip_gradient_norm([x, x], 1.0, tensor=mesh["tp"]) == 5.0
    torch.testing.assert_close(x.grad.cpu(), torch.tensor([0.6, 0.8]))
    linear = nn.Linear(1, 2, bias=False, device=device())
    (y,) = sp.ColumnParallelLinear.from_linear(linear, comm=mesh[()]).parameters()
    y.grad = torch.ones((), device=device()).expand(2, 1)  # both share one number in memory
    reduce_gradients([y, y], data=mesh["tp"])
    assert y.grad.tolist() == [[mesh.size]] * 2


@spmd(2, 4)
@meshed("tp")
def test_ranks_sum_gradients_of_several_dtypes_in_one_order(mesh: sp.Mesh) -> None:
    dtypes = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    weights = [nn.Parameter(torch.ones(n, dtype=dtype)) for n, dtype in enumerate(dtypes, 1)]
    copies = sp.copy_all_to_group(weights, comm=mesh["tp"])
    torch.cat([x.double() for x in copies]).sum().backward()
    reduce_gradients(weights, data=mesh["tp"])
    grads = [x.grad for x in weights if x.grad is not None]
    assert [grad.unique().tolist() for grad in grads] == [[mesh.size**2]] * 4


@spmd(1)
@meshed("tp")
def test_a_joined_layer_draws_no_random_numbers(mesh: sp.Mesh) -> None:
    part = sp.ColumnParallelLinear.from_linear(nn.Linear(4, 4), comm=mesh["tp"])
    before = torch.get_rng_state()
    part.to_linear()
    assert torch.equal(torch.get_rng_state(), before)


def test_what_dropout_keeps_is_rounded_once() -> None:
    x = torch.arange(1.0, 65.0, dtype=torch.bfloat16).view(1, -1, 1)
    out = sp.dropout(x, 0.1, seed=0, positions=range(64))
    assert torch.equal(out[out != 0], (x.double() / 0.9).bfloat16()[out != 0])
    assert 0 < out.count_nonzero() < 64


@pytest.mark.parametrize(
    ("seed", "position", "p"), [(5, 3, float(uniform(5, [[0], [3], [0]]))), (0, 0, 1e-12)]
)
def test_an_element_stays_whose_number_is_the_chance(seed: int, position: int, p: float) -> None:
    """An element is dropped if its number in [0, 1) is below p, here that number or almost 0."""
    assert sp.dropout(torch.ones(1, 1, 1), p, seed=seed, positions=[position]).all()


@spmd(2)
@meshed(device=device)
def test_a_block_reads_no_seed_in_evaluation(mesh: sp.Mesh) -> None:
    block = sp.TransformerBlock(4, 2, comm=mesh["sp"], dropout=0.5, device=device()).eval()
    call = partial(block, normal(1, (1, 2, 4), "float32").to(device()))
    wanted, *found = (
        call(sharding=sp.Sharding.contiguous(4, 2), seed=seed if mesh.rank else None)
        for seed in (None, -1, 2**61, "1")
    )
    assert all(torch.equal(out, wanted) for out in found)


@spmd(2)
@meshed("dp")
def test_scalers_of_summed_gradients_skip_the_same_steps(mesh: sp.Mesh) -> None:
    weight = nn.Parameter(torch.ones(1))
    sgd, scaler = torch.optim.SGD([weight], 0.1), torch.amp.GradScaler("cpu")
    scaler.scale((weight * (torch.inf if mesh.rank else 1.0)).sum()).backward()
    reduce_gradients([weight], data=mesh["dp"])
    scaler.unscale_(sgd)
    scaler.step(sgd)
    scaler.update()
    assert (weight.item(), scaler.get_scale()) == (1.0, 2.0**15)


MORE = {
    "yarn, the usual turns": YARN | {"original_max_position_embeddings": 32768, "factor": 40.0},
    "yarn, one weight": YARN | {"mscale": 0.7},
    "yarn, not rounded because of a null": YARN | {"truncate": None},
    "yarn, shorter": YARN | {"factor": 0.25},
    "yarn, no pair between": YARN | {"original_max_position_embeddings": 7},
    "yarn, beyond the last pair": YARN | {"original_max_position_embeddings": 1 << 20},
    "yarn, the first pair": YARN | {"original_max_position_embeddings": 2 * math.pi},
}
TABLE = {name: x for name, x in SCALINGS.items() if x and "rope_type" in x and len(x) > 1} | MORE


@pytest.mark.parametrize("base", [1e4, 5e5])
@pytest.mark.parametrize("head_dim", [2, 6, 64, 128, 256])
@pytest.mark.parametrize("name", sorted(TABLE))
def test_the_frequencies_and_the_length_are_those_of_the_scaling(
    name: str, head_dim: int, base: float
) -> None:
    made = sp.Rope(head_dim, base, scaling := TABLE[name])
    exact = torch.tensor(reference.llama_frequencies(head_dim, base, scaling), dtype=torch.float64)
    torch.testing.assert_close(made.frequencies, exact, rtol=1e-12, atol=0)
    assert made.amplitude == pytest.approx(reference.llama_amplitude(scaling), rel=1e-14)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types_are_rotated_in_float32_by_angles_of_float64(dtype: torch.dtype) -> None:
    x, rope = torch.randn(1, 9, 2, 8, generator=torch.Generator().manual_seed(0)), sp.Rope(8)
    wanted = rope.apply(x.to(dtype).float(), range(9)).to(dtype)
    assert torch.equal(rope.apply(x.to(dtype), range(9)), wanted)
    far = (1 << 25) + 1  # no float32
    turned = rope.apply(torch.ones(1, 1, 1, 8), [far])[0, 0, 0, 0].item()
    assert turned == pytest.approx(math.cos(far) - math.sin(far), abs=1e-6)
