"""Test which of torch's CUDA attention kernels is called, and with which arguments.

No GPU is needed: tensors are on the meta device.
"""

from itertools import product
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from hypothesis import example, given, strategies as st
from torch.nn.attention import SDPBackend
from torch.utils._python_dispatch import TorchDispatchMode

from sp_core.attention import (
    Logits,
    attend,
    attend_backward,
    backend_for,
    block_attention,
    block_attention_backward,
    cuda,
    kernels,
)
from sp_core.mask import Mask


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every device have the compute capability of an H100, whose kernels take the most."""
    monkeypatch.setattr(cuda, "capability", lambda device: (9, 0))


def tensor_on(device: str, dtype: torch.dtype, head_dim: int) -> Any:
    """Return a stand-in with the attributes that `backend_for` reads; no such device is needed."""
    return SimpleNamespace(device=torch.device(device), dtype=dtype, shape=(head_dim,))


@example(head_dim=256, dtype=torch.bfloat16)
@example(head_dim=264, dtype=torch.bfloat16)
@given(
    head_dim=st.integers(1, 300) | st.integers(1, 38).map(lambda n: 8 * n),
    dtype=st.sampled_from(kernels.FLOATS),
)
def test_a_tensor_on_a_gpu_gets_the_fastest_kernel_that_takes_it(
    head_dim: int, dtype: torch.dtype
) -> None:
    """The fused kernels need rows of a multiple of 16 bytes, and none takes float64.

    Flash takes head dims up to 256. Only the efficient kernel takes a mask.
    """
    fused = "flash_cuda" if dtype.itemsize == 2 and head_dim <= 256 else "efficient_cuda"
    fits = head_dim * dtype.itemsize % 16 == 0 and dtype != torch.float64
    cuda, meta, cpu = (tensor_on(device, dtype, head_dim) for device in ("cuda", "meta", "cpu"))
    assert {backend_for(cuda, kind, Logits(0.3)) for kind in ("causal", "full")} == {
        fused if fits else "plain"
    }
    assert backend_for(cuda, "partial", Logits(0.3)) == ("efficient_cuda" if fits else "plain")
    unfit = backend_for(cuda, "causal", Logits(0.0)), backend_for(meta, "full", Logits(0.3))
    assert unfit == ("plain", "plain")
    assert backend_for(cpu, "partial", Logits(0.3)) == "flash_cpu"


FLASH, EFFICIENT, PLAIN = "flash_cuda", "efficient_cuda", "plain"
HEADS = {64: FLASH, 128: FLASH, 192: FLASH, 200: EFFICIENT, 224: EFFICIENT, 232: FLASH, 256: FLASH}
"""Head dim -> the kernel of a half type on a GPU whose flash backward lacks some head dims."""


@pytest.mark.parametrize(
    ("capabilities", "kernels_of"),
    [
        (
            [(7, 0), (7, 5)],
            {
                torch.float16: dict.fromkeys(HEADS, EFFICIENT),
                torch.bfloat16: dict.fromkeys(HEADS, PLAIN),
            },
        ),
        (
            [(8, 0), (9, 0), (10, 0)],
            dict.fromkeys((torch.float16, torch.bfloat16), dict.fromkeys(HEADS, FLASH)),
        ),
        (
            [(8, 6), (8, 7), (8, 9), (12, 0), (12, 1)],
            dict.fromkeys((torch.float16, torch.bfloat16), HEADS),
        ),
    ],
    ids=["before Ampere", "data centre", "small shared memory"],
)
def test_a_gpu_gets_only_kernels_that_it_can_run(
    capabilities: list[tuple[int, int]],
    kernels_of: dict[torch.dtype, dict[int, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As in torch, flash and bfloat16 need capability 8.0, and some backwards a large chip."""
    for capability in capabilities:
        monkeypatch.setattr(cuda, "capability", lambda device, at=capability: at)
        for dtype, wanted in {**kernels_of, torch.float32: dict.fromkeys(HEADS, EFFICIENT)}.items():
            tensors = [tensor_on("cuda", dtype, head_dim) for head_dim in wanted]
            for kind in ("causal", "full"):
                found = [backend_for(x, kind, Logits(0.3)) for x in tensors]
                assert found == list(wanted.values()), (capability, dtype)
            masked = {backend_for(x, "partial", Logits(0.3)) for x in tensors}
            assert masked == {PLAIN if wanted[64] == PLAIN else EFFICIENT}


def test_a_gpu_is_asked_once_for_its_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = MagicMock(return_value=(7, 5))
    monkeypatch.undo()
    monkeypatch.setattr(torch.cuda, "get_device_capability", asked)
    x = tensor_on("cuda:77", torch.bfloat16, 64)
    assert [backend_for(x, "full", Logits(0.3)) for _ in range(2)] == [PLAIN] * 2
    asked.assert_called_once_with(x.device)


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use a GPU's kernels on the meta device, which checks schemas and shapes."""
    monkeypatch.setattr(kernels, "FUSED", {"meta"})


KERNELS = {"flash": torch.bfloat16, "cudnn": torch.bfloat16, "efficient": torch.float32}


class Passed(TorchDispatchMode):
    """A mode that records the kernels' arguments by name, and of which tensor each was made."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[tuple[str, dict[str, Any], Any]] = []
        self._made: list[tuple[Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if "scaled_dot_product" in func.name():
            schema = func._schema.arguments
            given = {a.name: a.default_value for a in schema if a.has_default_value()}
            given |= {**dict(zip((a.name for a in schema), args, strict=False)), **(kwargs or {})}
            self.calls.append((func.name(), given, result))
        elif isinstance(result, torch.Tensor) and args and isinstance(args[0], torch.Tensor):
            self._made.append((result, self.source(args[0])))
        return result

    def source(self, x: Any) -> Any:
        return next((source for made, source in self._made if made is x), x)


@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize("kind", ["causal", "full"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_the_cuda_kernels_get_each_argument_under_its_own_name(
    kernel: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every row begins at a multiple of 16 bytes, even if the caller's rows do not."""
    monkeypatch.setattr(cuda, "prefers_cudnn", asked := MagicMock(return_value=kernel == "cudnn"))
    sq, sk = (40, 40) if kind == "causal" else (40, 33)
    is_flash, dtype = kernel != "efficient", KERNELS[kernel]
    shapes = (3, 4, sq, 16), (3, 4 if is_flash else 2, sk, 16)
    wide = [torch.empty(*shapes[n][:3], 17, dtype=dtype, device="meta") for n in (0, 1, 1, 0, 0)]
    q, k, v, do, given_out = (x[..., :16] for x in wide)
    call: dict[str, Any] = {"kind": kind, "logits": Logits(0.3)}
    with Passed() as passed:
        out, lse = block_attention(q, k, v, **call)
        grads = block_attention_backward(do, q, k, v, given_out, lse, **call)
    assert [x.shape for x in (out, *grads)] == [x.shape for x in (q, q, k, v)]
    assert lse.shape == (3, 4, sq)
    assert {one.args[3:] for one in asked.mock_calls} <= {(kind == "causal", 0.3)}
    (forward_name, forward, (_, made, *others)), (backward_name, backward, _) = passed.calls
    assert kernel in forward_name
    assert backward_name.partition("_attention")[0] == forward_name.partition("_attention")[0]
    grad_out = "grad_out" if is_flash else "grad_out_"
    for given_, named in (
        (forward, {"query": q, "key": k, "value": v}),
        (backward, {"query": q, "key": k, "value": v, grad_out: do, "out": given_out}),
    ):
        assert [name for name, x in named.items() if passed.source(given_[name]) is not x] == []
        assert given_["key"].shape == given_["value"].shape == (3, 4, sk, 16)
        assert given_["is_causal"] == (kind == "causal")
        assert (given_["scale"], given_["dropout_p"]) == (0.3, 0.0)
        strides = [step for name in named for step in given_[name].stride()[:-1]]
        assert not any(step * dtype.itemsize % 16 for step in strides)
    assert is_flash or backward["out"].transpose(1, 2).is_contiguous()
    assert passed.source(backward["logsumexp"]) is passed.source(lse)
    assert backward["logsumexp"].shape == made.shape
    assert (backward.get("max_q", sq), backward.get("max_k", sk)) == (sq, sk)
    states = others[:2] if kernel == "efficient" else others[4:6]
    assert [(x.shape, x.dtype) for x in states] == [
        (backward[name].shape, backward[name].dtype) for name in ("philox_seed", "philox_offset")
    ]


@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize("head_dim", [192, 224])
def test_the_backward_may_run_another_kernel_than_the_forward(
    head_dim: int, substitute: Any
) -> None:
    """A gradient of the lse widens the heads, and flash's backward lacks 200 to 224 here."""
    substitute(cuda, capability=lambda device: (8, 6), prefers_cudnn=lambda *given: False)
    q, k = (
        torch.empty(2, heads, 40, head_dim, dtype=torch.bfloat16, device="meta") for heads in (4, 2)
    )
    here: dict[str, Any] = {"q_positions": range(40), "kv_positions": range(40)}
    with Passed() as passed:
        out, lse = attend(q, k, k, **here, logits=Logits(0.3))
        grads = attend_backward(q, q, k, k, out, lse, **here, logits=Logits(0.3), grad_lse=lse)
    assert [x.shape for x in grads] == [q.shape, k.shape, k.shape]
    (forward, _, _), (backward, given_, _) = passed.calls
    assert ("flash" in forward, "flash" in backward) == (head_dim == 192, head_dim == 224)
    assert given_["query"].shape[-1] == head_dim + 8
    assert given_["logsumexp"].shape == (2, 4, 64 if "efficient" in backward else 40)


@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_cuda_kernel_of_a_partial_block_gets_its_mask(dtype: torch.dtype) -> None:
    """The mask is a bias of q's dtype for all heads, with rows at multiples of 16 bytes."""
    q, k = (torch.empty(2, 4, length, 16, dtype=dtype, device="meta") for length in (40, 33))
    allowed = torch.ones(40, 33, dtype=torch.bool).tril_()
    call: dict[str, Any] = {"kind": "partial", "allowed": allowed, "logits": Logits(0.3)}
    with Passed() as passed:
        out, lse = block_attention(q, k, k, **call)
        block_attention_backward(q, q, k, k, out, lse, **call)
    (forward_name, forward, _), (backward_name, backward, _) = passed.calls
    assert "efficient_attention" in forward_name
    assert "efficient_attention_backward" in backward_name
    for given_ in (forward, backward):
        bias = given_["attn_bias"]
        assert (bias.shape, bias.dtype, given_["is_causal"]) == ((2, 4, 40, 33), dtype, False)
        assert (bias.stride(-1), bias.stride(2) * dtype.itemsize % 16) == (1, 0)


@given(
    rows=st.integers(1, 9), columns=st.integers(1, 40), dtype=st.sampled_from(kernels.FLOATS[1:])
)
def test_the_mask_that_a_cuda_kernel_adds(rows: int, columns: int, dtype: torch.dtype) -> None:
    allowed = torch.rand(rows, columns) < 0.5
    bias = cuda.added(allowed, torch.empty(2, 3, rows, 8, dtype=dtype))
    assert bias is not None
    assert (bias.shape, bias.dtype) == ((2, 3, rows, columns), dtype)
    assert torch.equal(bias == 0, allowed.expand_as(bias))
    assert torch.equal(bias == -torch.inf, ~allowed.expand_as(bias))
    assert rows_at(bias) == {0}
    assert bias.stride(2) < columns + 16
    assert cuda.added(None, bias) is None


class Sequences(TorchDispatchMode):
    """A mode that computes torch's flash kernel for packed sequences by the kernel for CPUs."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[list[list[int]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "_flash_attention" not in func.name() or func.name().endswith("cpu_backward"):
            return func(*args, **(kwargs or {}))
        is_forward = func.name().endswith("forward")
        tensors = args[:3] if is_forward else (*args[:5], args[5].T)
        ends, (longest, _, _, causal) = args[len(tensors) :][:2], args[len(tensors) + 2 :][:4]
        lengths = [end.diff().tolist() for end in ends]
        assert (ends[0].dtype, longest) == (torch.int32, max(lengths[0]))
        self.calls.append(lengths)
        sides = [0, 1, 1] if is_forward else [0, 0, 1, 1, 0, 0]
        cut = [x.split(lengths[side]) for x, side in zip(tensors, sides, strict=True)]
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        found = []
        for parts in zip(*cut, strict=True):
            part = [x.unsqueeze(0).transpose(1, 2).contiguous() for x in parts]
            if is_forward:
                out, lse = kernel(*part, 0.0, causal, scale=kwargs["scale"])
                found.append((out.transpose(1, 2)[0], lse[0].T))
            else:
                back = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
                grads = back(*(x.float() for x in part), 0.0, causal, scale=kwargs["scale"])
                found.append(tuple(x.transpose(1, 2)[0] for x in grads))
        whole = tuple(map(torch.cat, zip(*found, strict=True)))
        return (whole[0], whole[1].T.contiguous(), None, None, None) if is_forward else whole


@pytest.mark.parametrize(
    ("causal", "keys", "lengths", "most"),
    [
        (True, range(40), ([5, 2, 13, 2, 7, 11],) * 2, 6),
        (True, range(40), ([5, 2, 13, 2, 7, 11],) * 2, 3),
        (False, range(7, 43), ([13, 2, 7, 11], [13, 2, 7, 14]), 4),
    ],
)
def test_packed_documents_are_one_call_of_the_flash_kernel(
    causal: bool, keys: range, lengths: list[list[int]], most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The result is bitwise that of a call for each document, even if some queries see nothing."""
    monkeypatch.setattr("sp_core.attention.packs.MOST_SEQUENCES", 2 * most + 1)
    random = torch.Generator().manual_seed(3)
    q, do = (torch.randn(2, 4, 40, 16, generator=random).bfloat16() for _ in range(2))
    k, v = (torch.randn(2, 2, len(keys), 16, generator=random).bfloat16() for _ in range(2))
    mask = Mask(causal=causal, documents=(0, 5, 7, 20, 22, 29, 44))
    here: dict[str, Any] = {"q_positions": range(40), "kv_positions": keys, "mask": mask}
    wanted = attend(q, k, v, **here, logits=Logits(0.3))
    grads = attend_backward(do, q, k, v, *wanted, **here, logits=Logits(0.3))

    def as_on_gpu(x: torch.Tensor, kind: str, logits: Logits) -> str:
        return backend_for(tensor_on("cuda", x.dtype, x.shape[-1]), kind, logits)

    monkeypatch.setattr(kernels, "backend_for", as_on_gpu)
    with Sequences() as sequences:
        found = attend(q, k, v, **here, logits=Logits(0.3))
        found_grads = attend_backward(do, q, k, v, *wanted, **here, logits=Logits(0.3))
    parts = [slice(start, start + most) for start in range(0, len(lengths[0]), most)]
    assert sequences.calls == [[each[part] * 2 for each in lengths] for part in parts] * 2
    assert all(map(torch.equal, (*found, *found_grads), (*wanted, *grads)))


def rows_at(x: torch.Tensor) -> set[int]:
    """Return the remainders of the addresses of all rows, divided by 16 bytes."""
    return {x[index].data_ptr() % 16 for index in product(*map(range, x.shape[:-1]))}


@example(dims=(2, 2, 2, 8), order=[0, 1, 2], cut=(0, 0, 0, 1), step=1, dtype=torch.float32)
@example(dims=(2, 2, 2, 8), order=[0, 1, 2], cut=(0, 0, 0, 4), step=1, dtype=torch.bfloat16)
@given(
    dims=st.tuples(*[st.integers(1, 3)] * 3, st.sampled_from([8, 16])),
    order=st.permutations(range(3)),
    cut=st.tuples(*[st.integers(0, 2)] * 3, st.integers(0, 9)),
    step=st.integers(1, 2),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_the_cuda_kernels_get_rows_that_begin_at_multiples_of_16_bytes(
    dims: tuple[int, ...], order: list[int], cut: tuple[int, ...], step: int, dtype: torch.dtype
) -> None:
    """A tensor whose rows already do so is not copied."""
    room = (
        torch.arange(10_000, dtype=torch.float32)
        .to(dtype)[: (dims[3] + cut[3]) * step * 125]
        .view(5, 5, 5, -1)
    )
    x = room.permute(*order, 3)[
        tuple(slice(c, c + n) for c, n in zip(cut[:3], dims[:3], strict=True))
    ]
    x = x[..., cut[3] * step : (cut[3] + dims[3]) * step : step]
    made = cuda.aligned(x)
    assert torch.equal(made, x)
    assert (made.stride(-1), rows_at(made)) == (1, {0})
    assert (made is x) == (step == 1 and rows_at(x) == {0})


def test_cudnn_is_asked_where_torch_itself_asks_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ...]] = []

    def choose(*given: Any, **named: Any) -> int:
        asked.append((*map(id, given[:3]), *given[3:], named))
        return int(SDPBackend.CUDNN_ATTENTION.value)

    monkeypatch.setattr(torch, "_fused_sdp_choice", choose)
    for heads in (2, 4):
        q, k, v = (torch.empty(1, n, 2, 128) for n in (4, heads, heads))
        assert cuda.prefers_cudnn(q, k, v, True, 0.3)
        named = {"scale": 0.3, "enable_gqa": heads == 2}
        assert asked.pop() == (id(q), id(k), id(v), None, 0.0, True, named)
    wide = torch.empty(1, 4, 2, 136)
    answers = [1, RuntimeError("No available kernel."), RuntimeError("out of memory")]
    monkeypatch.setattr(torch, "_fused_sdp_choice", MagicMock(side_effect=answers))
    assert [cuda.prefers_cudnn(x, x, x, False, 0.3) for x in (wide, q, q)] == [False] * 3
    with pytest.raises(RuntimeError, match="out of memory"):
        cuda.prefers_cudnn(q, q, q, False, 0.3)


def test_the_lse_of_the_cuda_kernels_is_padded() -> None:
    lse = torch.randn(2, 3, 40)
    padded = cuda.padded_lse(lse)
    assert padded.shape == (2, 3, 64)
    assert (padded[..., 40:] == torch.inf).all()
    assert torch.equal(padded[..., :40], lse)
    assert torch.equal(cuda.padded_lse(padded), padded)


def test_repeated_keys_are_gathered_again() -> None:
    k = torch.randn(2, 3, 5, 4, dtype=torch.bfloat16)
    wide = cuda.repeated(k, 6)
    assert all(torch.equal(wide[:, head], k[:, head // 2]) for head in range(6))
    assert torch.equal(cuda.gathered(wide, 3), 2 * k.float())
    assert cuda.repeated(k, 3) is cuda.gathered(k, 3) is k
    assert (row := torch.empty(1, 1, 1, 9)[..., :8]) is cuda.aligned(row)


@pytest.mark.parametrize("in_order", [True, False])
@pytest.mark.parametrize(
    "mask", [Mask(window=3), Mask(causal=True, documents=(0, 5, 40)), Mask(causal=True, window=7)]
)
def test_a_gpu_is_not_asked_what_a_mask_leaves(mask: Mask, in_order: bool) -> None:
    """Tensors on the meta device have no values, so the plan cannot depend on them."""
    q, k, v = (torch.empty(2, 4, 40, 16, device="meta") for _ in range(3))
    here: dict[str, Any] = {
        "q_positions": range(40) if in_order else torch.arange(40) * 7 % 40,
        "kv_positions": range(20, 60) if mask.documents is None else range(40),
    }
    out, lse = attend(q, k, v, **here, mask=mask, logits=Logits(0.3))
    grads = attend_backward(out, q, k, v, out, lse, **here, mask=mask, logits=Logits(0.3))
    assert [x.shape for x in (out, lse, *grads)] == [q.shape, q.shape[:3], *[q.shape] * 3]
