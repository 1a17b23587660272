"""Test that the memory of a backward and of a ring grows with a rank's tokens, not with all."""

import copy
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from random import Random
from typing import Any, cast

import pytest
import torch
from domains.declared import normal
from kit.meshed import meshed
from llama_cases import Case
from refusals.kinds import kept as of_inference_mode
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils._python_dispatch import TorchDispatchMode

import sp_core as sp
from sp_core.attention import Logits, kernels
from sp_core.llama.train import backward
from sp_core.nn import memory
from sp_core.nn.block import ParallelBlock
from sp_core.nn.loss import next_token_loss
from sp_core.schemes import SCHEMES
from sp_core.testing import LiveBytes, bound, check_close, device, run_threads, spmd

HIDDEN, HEADS, FFN = 16, 4, 24


def saved_elements(block: sp.TransformerBlock, x: Tensor, sharding: sp.Sharding) -> int:
    """Count the elements that autograd keeps for the backward, weights aside, each storage once."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in block.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes() // tensor.itemsize
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = block(x, sharding=sharding)
    assert out.requires_grad
    return sum(kept.values())


@pytest.mark.parametrize("name", sorted(SCHEMES))
@pytest.mark.parametrize("tokens", [4, 12])
@spmd(1, 2, 4)
def test_a_block_keeps_what_its_own_tokens_need(comm: Any, name: str, tokens: int) -> None:
    """For each token it keeps q, k, v, out, lse, and the input and result of GELU.

    Of both norms it keeps the input, the result, the mean and the deviation.
    """
    sharding = sp.Sharding.contiguous(tokens * comm.size, comm.size)
    with sp.Mesh(comm, sp=comm.size) as mesh:
        given: Any = {"attention": SCHEMES[name], "comm": mesh["sp"], "dtype": torch.float64}
        block = sp.TransformerBlock(HIDDEN, HEADS, ffn_hidden=FFN, **given)
        kept = saved_elements(
            block, torch.ones(1, tokens, HIDDEN, dtype=torch.float64, requires_grad=True), sharding
        )
    if name == "ulysses" and comm.size > 1:  # out is kept by heads and by tokens
        kept -= tokens * HIDDEN
    assert kept == tokens * (8 * HIDDEN + 2 * FFN + HEADS + 4)


@pytest.mark.mpi_skip
def test_live_bytes_are_those_of_the_tensors_that_are_kept() -> None:
    """Tensors grow, and many die at once; views and results in place need no more memory."""
    chance, kept, peak = Random(1), [torch.ones(3)], 12
    with LiveBytes(kept) as live:
        for _ in range(3000):
            kept.append(torch.empty(1))
            kept[-1].resize_(chance.randrange(1, 99)).zero_().view(-1)
            peak = max(peak, sum(x.nbytes for x in kept))
            assert live.peak == peak
            del kept[chance.randrange(len(kept)) :: chance.choice([2, 5, 999])]
        assert live.now == sum(x.nbytes for x in kept)
    assert LiveBytes().peak == 0
    one = torch.zeros(1, dtype=torch.uint8)
    with LiveBytes((one,)) as live:
        assert live.peak == 1
        assert torch.zeros(6, dtype=torch.uint8).sum().item() == 0  # the sum has 8 bytes
    assert (live.peak, live.now) == (15, 1)


def held_by(scheme: str, comm: Any, tokens: int, learns: bool = True) -> float:
    """Return the most bytes that any rank holds in forward and backward, over those of its q."""
    sharding, mask = sp.Sharding.zigzag(tokens * comm.size, comm.size), sp.Mask(causal=True)
    x = [torch.ones(1, tokens, 4, 32, requires_grad=learns and n < 3) for n in range(4)]
    with sp.Mesh(comm, check="off", sp=comm.size) as mesh, LiveBytes(x) as live:
        out: Any = SCHEMES[scheme](*x[:3], comm=mesh["sp"], sharding=sharding, mask=mask)
        _ = torch.autograd.grad(out, x[:3], x[3]) if learns else None
    return float(max(comm.allgather(live.peak / x[0].nbytes)))


@spmd(3, 4, 6, 8)
def test_what_a_ring_holds_does_not_grow_with_the_number_of_ranks(comm: Any) -> None:
    """A rank holds at most 22 times the bytes of its own q; without gradients 10 times as many."""
    assert held_by("ring", comm, 64) <= 22
    assert held_by("ring", comm, 64, learns=False) <= 10


@spmd(3, 4, 6, 8)
def test_allgather_kv_holds_two_of_four_groups_of_heads_at_a_time(comm: Any) -> None:
    """Those of all ranks have P times the bytes of q, as received and, once more, as sorted."""
    assert held_by("allgather_kv", comm, 64, learns=False) <= 6.5 + 2 * comm.size


@spmd(4)
def test_what_a_ring_holds_is_proportional_to_the_tokens_of_a_rank(comm: Any) -> None:
    """If a rank held the scores of all pairs, it would need four times the bytes per token."""
    assert held_by("ring", comm, 1024) <= 1.15 * held_by("ring", comm, 256)


@spmd(1, 2)
@meshed("ring")
def test_a_layer_that_is_computed_again_keeps_its_input_only(mesh: sp.Mesh) -> None:
    """Two more layers keep two more inputs. Kept activations would take over 20 inputs' bytes."""
    tokens = 512
    case, peaks = Case((2, 1), head_dim=8, hidden=16, ffn=32, vocab=7, dtype="float32"), {}
    for layers, recompute in ((1, True), (3, True), (3, False)):
        model = replace(case, layers=layers).model(mesh)
        weights = [*model.parameters()]
        with LiveBytes(weights) as live:
            backward(model, [[1] * tokens], recompute=recompute)
        peaks[layers, recompute] = live.peak - 2 * sum(w.nbytes for w in weights)
    own = tokens // mesh.size * 16 * 4
    assert peaks[3, True] - peaks[1, True] <= 2.1 * own
    assert peaks[3, False] - peaks[1, True] > 20 * own


@spmd(1)
def test_offload_moves_the_input_of_each_layer_and_nothing_else(comm: Any) -> None:
    """On a CPU torch would copy nothing, so hooks of this test copy and count what is saved."""
    moved, found = list[tuple[object, ...]](), list[Tensor]()
    case = Case((2, 1), layers=3, hidden=16)

    def spy(pin: bool, kind: str) -> torch.autograd.graph.saved_tensors_hooks:
        def pack(x: Tensor) -> Tensor:
            if x.numel():  # torch 2.11 also saves a tensor without elements
                moved.append((pin, kind, *x.shape))
            return x.clone()

        return torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x)

    with sp.Mesh(comm, device=device(), ring=1) as mesh, pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "save_on_cpu", spy)
        for offload in (False, True):
            model = case.model(mesh)
            backward(model, [[1, 2, 3] * 3], offload=offload)
            grads = [x.grad.flatten() for x in model.parameters() if x.grad is not None]
            found.append(torch.cat(grads))
        kind = mesh.device.type
    assert moved == [(kind != "cpu", kind, 1, 9, 16)] * 3
    assert torch.equal(*found)


class PinsAsCuda(TorchDispatchMode):
    """Refuse to make page-locked memory on a device, as torch does on CUDA."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        given = kwargs or {}
        if given.get("pin_memory") and given["device"].type != "cpu":
            raise RuntimeError("Only dense CPU tensors can be pinned")
        return func(*args, **given)


@spmd(1)
@meshed("ring", device=device)
def test_offload_works_with_any_default_device(mesh: sp.Mesh) -> None:
    """Without a device of its own, torch's `save_on_cpu` makes its copies on the default device."""
    model, losses = Case((2, 1), layers=2, hidden=16).model(mesh), list[float]()
    for default in ("cpu", mesh.device):
        with torch.device(default), PinsAsCuda():  # type: ignore[no-untyped-call]
            losses.append(backward(model, [[1, 2, 3] * 3], offload=True))
    assert losses[0] == losses[1]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@spmd(1, 2)
def test_the_loss_from_hidden_states_holds_the_logits_of_one_chunk(comm: Any, dtype: str) -> None:
    """Forward and backward need a few copies of a chunk, and never the logits of all tokens."""
    tokens, hidden, chunk, vocabulary = 1024, 8, 32, 512
    given: Any = {"dtype": getattr(torch, dtype), "requires_grad": True}
    x, labels = torch.ones(tokens, hidden, **given), torch.zeros(tokens, dtype=torch.int64)
    with sp.Mesh(comm, tp=comm.size, dp=1) as mesh:
        head = torch.ones(vocabulary // comm.size, hidden, **given)
        groups: dict[str, Any] = {"tensor": mesh["tp"], "data": mesh["dp"]}
        with LiveBytes((x, head, labels)) as live:
            loss = next_token_loss(x, labels, **groups, head=head, chunk=chunk)
            torch.autograd.grad(loss, (x, head))
        logits, states = chunk * len(head) * 4, (x.numel() + head.numel()) * 4
        assert live.peak <= 6 * logits + 4 * states < logits * tokens // chunk


@pytest.mark.parametrize("dtype", kernels.HALF)
@spmd(1)
@meshed("all")
def test_a_head_of_a_half_type_has_its_gradient_however_many_chunks(
    mesh: sp.Mesh, dtype: torch.dtype
) -> None:
    """No token has a label other than 0, so the summands of all other rows have one sign."""
    states = (normal(0, (4096, 8), "float64").abs() + 1).to(dtype)
    head = normal(1, (16, 8), "float64").mul(0.1).to(dtype).requires_grad_()
    labels = torch.zeros(4096, dtype=torch.int64)
    groups: dict[str, Any] = {"tensor": mesh["all"], "data": mesh["all"], "head": head}
    loss = next_token_loss(states, labels, **groups, count=1, chunk=4)
    (found,) = torch.autograd.grad(loss, head)
    p = (states.double() @ head.detach().double().T).softmax(-1)
    target = F.one_hot(labels, 16)
    wanted, terms = ((grad.T @ states.double()) for grad in (p - target, p + target))
    check_close("head", found, wanted, bound(terms, dtype, growth=4096.0))


def test_the_plain_kernel_holds_the_scores_of_one_strip() -> None:
    q = torch.ones(1, 2, 2048, 4)
    strip = 2**20 * q.itemsize
    with LiveBytes((q,)) as live:
        out, lse = kernels.block_attention(q, q, q, logits=Logits(0.3, 5.0))
        assert 2 * strip < live.peak <= 2 * strip + 8 * q.nbytes  # and of the next strip
        kernels.block_attention_backward(q, q, q, q, out, lse, logits=Logits(0.3, 5.0))
    assert live.peak <= 5 * strip + 12 * q.nbytes < 2 * 2048 * 2048 * q.itemsize


@pytest.mark.parametrize("scale", [-0.5, 0.0])
def test_a_causal_block_holds_no_mask_of_all_pairs(scale: float) -> None:
    q = torch.ones(1, 2, 512, 8, dtype=torch.bfloat16)
    with LiveBytes((q,)) as live:
        kernels.block_attention(q, q, q, kind="causal", logits=Logits(scale))
    assert live.peak < 8 * q.nbytes < 512 * 512


def feed_forward(mesh: sp.Mesh, chunk: int, ffn: int = 8) -> tuple[Sequence[Tensor], Any]:
    layer = sp.FeedForward(4, ffn, comm=mesh["sp"], gated=True, chunk=chunk)
    return [*layer.parameters()], layer


def split_block(mesh: sp.Mesh, chunk: int, ffn: int = 8) -> tuple[Sequence[Tensor], Any]:
    heads: Any = (mesh.size, mesh.size)
    block = ParallelBlock(4, ffn, heads, 1, 1e-6, comm=mesh["sp"], dtype=torch.float32, tp_sp=False)
    given: Any = (lambda q: q, lambda q, k, v: q + k + v, None, chunk)
    return [*block.parameters()], lambda x: block(x, *given)


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("made", [feed_forward, split_block])
@spmd(1, 2)
@meshed()
def test_a_feed_forward_holds_the_features_of_one_chunk(
    mesh: sp.Mesh, made: Callable[..., Any], batch: int
) -> None:
    tokens, ffn, chunk = 1024, 256, 32
    x = torch.ones(batch, tokens // batch, 4, requires_grad=True)
    weights, layer = made(mesh, chunk, ffn)
    for weight in weights:  # some are uninitialised
        torch.nn.init.ones_(weight)
    with LiveBytes((x,)) as live:
        layer(x).sum().backward()
    features = x.itemsize * (ffn if made is feed_forward else ffn // mesh.size)
    three = 3 * 4 * features  # the bytes of the three weights of a feed-forward
    assert live.peak <= 8 * chunk * features + 40 * x.nbytes + 4 * three
    assert live.peak < tokens * features


def loss_of_hidden_states(mesh: sp.Mesh, chunk: int) -> tuple[Sequence[Tensor], Any]:
    head = torch.empty(5, 4, requires_grad=True)
    labels = of_inference_mode(torch.arange(6)[None] % 5)  # a loader may have made them so
    given: Any = {"tensor": mesh["sp"], "data": mesh[()], "head": head, "chunk": chunk}
    return [head], lambda x: next_token_loss(x, labels, **given)


CHUNKED = (feed_forward, split_block, loss_of_hidden_states)
"""Functions that return the weights of a chunked computation, and the computation."""


@pytest.mark.parametrize("chunk", [6, 2])
@pytest.mark.parametrize("made", CHUNKED)
@spmd(1, 2)
@meshed()
def test_a_weight_that_changes_before_the_backward_has_no_part_in_it(
    mesh: sp.Mesh, made: Callable[[sp.Mesh, int], Any], chunk: int
) -> None:
    """The gradients are those of the weights in the forward, or torch raises an error."""
    weights, function = made(mesh, chunk)
    leaves = [*weights, torch.ones(1, 6, 4, requires_grad=True)]
    wanted: tuple[Tensor, ...] = ()
    for changed in (None, *weights):
        for number, leaf in enumerate(leaves):
            leaf.data = normal(number, leaf.shape, "float32")
        total = function(leaves[-1]).square().sum()
        if changed is not None:
            with torch.no_grad():
                changed.mul_(2)
        found, told = wanted, "modified"
        try:
            found = torch.autograd.grad(total, leaves)
        except RuntimeError as error:
            told = str(error)
        assert "modified" in told
        wanted = wanted or found
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    assert wanted


class Scaled(torch.nn.Linear):
    """Multiply by a buffer that becomes another tensor in every call."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__(4, 8)
        self.register_buffer("scale", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        self.scale = self.scale + 1
        return F.linear(x, self.weight, self.bias) * self.scale


STATEFUL: dict[str, Callable[[sp.FeedForward], object]] = {
    "a buffer changed in place": lambda layer: spectral_norm(layer.up),
    "a buffer replaced": lambda layer: setattr(layer, "up", Scaled()),
    "a buffer that does not change": lambda layer: spectral_norm(layer.eval().up),
}


@pytest.mark.parametrize("lent", [False, True])
@pytest.mark.parametrize("change", STATEFUL)
@spmd(1, 2)
@meshed()
def test_a_feed_forward_with_buffers_computes_all_tokens_at_once(
    mesh: sp.Mesh, change: str, lent: bool
) -> None:
    """A call for each chunk would change buffers more often on ranks with more chunks.

    If lent, `functional_call` gives the buffers and takes them back before the backward.
    """
    torch.manual_seed(0)
    chunked = sp.FeedForward(4, 8, comm=mesh["sp"], chunk=2)
    STATEFUL[change](chunked)
    whole, x = copy.deepcopy(chunked), normal(0, (1, 6, 4), "float32")
    whole.chunk = None
    outs, states = [], []
    for layer in (chunked, whole):
        state = {name: buffer * 3 for name, buffer in layer.named_buffers()} if lent else {}
        outs.append(functional_call(layer, state, (x,)))
        states.append([*state.values(), *layer.buffers()])
    assert torch.equal(*outs)
    for out in outs * 2:
        out.square().sum().backward(retain_graph=True)
    for a, b in zip(chunked.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)
    assert all(torch.equal(a, b) for a, b in zip(*states, strict=True))


def test_hooks_of_all_modules_run_for_linear_sub_layers() -> None:
    def body(comm: Any) -> list[float]:
        with sp.Mesh(comm, sp=comm.size) as mesh:
            layer, x = sp.FeedForward(4, 8, comm=mesh["sp"]), torch.ones(1, 2, 4)
            return [float(y.detach().abs().sum()) for y in (layer(x), layer.up(x))]

    def zeros(part: torch.nn.Module, given: Any, out: Tensor) -> Any:
        return out * 0 if type(part) is torch.nn.Linear else out

    with register_module_forward_hook(cast("Any", zeros)):
        assert run_threads(2, body) == [[0.0, 0.0]] * 2


@pytest.mark.parametrize("hooked", [False, True], ids=["a part", "a hook"])
@spmd(1)
def test_dropout_put_into_a_layer_draws_its_numbers_again(comm: Any, *, hooked: bool) -> None:
    """The result is linear in a weight W. So it is the product of W and the gradient of W."""

    def drop(part: torch.nn.Module, given: Any, out: Tensor) -> Any:
        return F.dropout(out) if type(part) is torch.nn.Linear else out

    hook: Any = register_module_forward_hook(cast("Any", drop)) if hooked else nullcontext()
    with hook, sp.Mesh(comm, sp=1) as mesh:
        layer = sp.FeedForward(4, comm=mesh["sp"], bias=False, chunk=2)
        weight = layer.down.weight
        if not hooked:
            layer.set_submodule("down", torch.nn.Sequential(layer.down, torch.nn.Dropout(0.5)))
        total = layer(normal(1, (1, 8, 4), "float32")).sum()
        (grad,) = torch.autograd.grad(total, weight)
        torch.testing.assert_close((grad * weight).sum(), total)


@spmd(3)
@meshed()
def test_long_sums_of_half_types_are_made_in_rank_order(mesh: sp.Mesh) -> None:
    """Blocks that are added in float32 have their usual length, unlike in test_algorithms."""
    x = torch.ones(1 << 16, dtype=torch.bfloat16)
    assert sp.all_reduce(x, comm=mesh["sp"], deterministic=True).eq(3).all()
