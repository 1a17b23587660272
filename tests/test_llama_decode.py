"""Test decoding with a cache that is split over ranks.

`domains/decoding.py` judges what decoders compute.
"""

import math
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kit.meshed import meshed
from llama_cases import Case, Wrapped
from oracle.dispatched import Calls
from test_llama_checkpoint import shared
from tokenizers import Tokenizer, models
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

import sp_core as sp
from sp_core.llama import Decoder, Sampling, byte_tokenizer, create, generate, load, save
from sp_core.llama.config import read_json
from sp_core.llama.train import backward
from sp_core.testing import LiveBytes, spmd

pytestmark = pytest.mark.usefixtures("short_slots")
GREEDY = Case((6, 3), layers=1, scaling="llama3", vocab=31, seed=11)
DEEP = Case((6, 3), layers=2, vocab=31, seed=11)


@spmd(1, 3)
@meshed("ring")
def test_each_rank_keeps_its_share_of_the_tokens(mesh: sp.Mesh) -> None:
    """After each step of the decoder, the numbers of tokens on the ranks differ by at most one."""
    decoder = Decoder(GREEDY.model(mesh), [9, 4])
    shares = decoder.caches[0].shares(4 * mesh.size)
    assert len({sum(share) for share in shares}) == 1  # equal work under a causal mask
    for step, new in ((decoder.prefill, [[1] * 5, [2]]), (decoder.decode, [[3], [4, 5]])):
        step(new)
        (cache,) = decoder.caches
        kept = [len(owned) for owned in cache.owned]
        assert sum(kept) == sum(cache.lengths)
        assert max(kept) - min(kept) <= 1


@spmd(2, 3)
@meshed("pp")
def test_each_stage_has_a_micro_batch_by_default(mesh: sp.Mesh) -> None:
    decoder = Decoder(replace(DEEP, layers=mesh.size).model(mesh), [3] * 7)
    decoder.prefill([[1]] * 7)
    assert len(decoder.caches) == mesh.size
    sent = mesh["pp"].counters["pipeline"].messages
    assert sent == mesh.size * (mesh.rank < mesh.size - 1)


@spmd(1, 2)
@meshed("ring")
def test_sequences_are_decoded_as_if_each_was_alone(mesh: sp.Mesh) -> None:
    """They have unequal lengths, and get no, one or several tokens."""
    old, more = ([[1 + n % step] * (n % step) for n in range(19)] for step in (7, 3))
    model, found = GREEDY.model(mesh), []
    for parts in (1, 19):
        decoder = Decoder(model, [12] * 19, micro_batches=parts)
        decoder.prefill(old)
        found.append([decoder.decode(new) for new in (more, [[3]] * 19)])
    torch.testing.assert_close(*found)


@spmd(1)
@meshed("tp")
def test_a_layer_inside_another_module_decodes_the_same(mesh: sp.Mesh) -> None:
    model = GREEDY.model(mesh)
    expected = generate(model, [[1, 2]], max_tokens=5)
    model.layers[0] = Wrapped(model.layers[0])
    assert generate(model, [[1, 2]], max_tokens=5) == expected


@spmd(1, 2)
@meshed("ring")
def test_a_layer_that_runs_its_block_twice_is_refused(mesh: sp.Mesh) -> None:
    """The keys of its second run would stand in the place of the first run's."""
    model = GREEDY.model(mesh)
    once = model.layers[0].forward
    model.layers[0].forward = lambda x, *given: once(once(x, *given), *given)
    decoder = Decoder(model, [3])
    for step in (decoder.prefill, decoder.decode):
        with pytest.raises(TypeError, match=r"layers\.0 runs blocks twice or more"):
            step([[1, 2]])


@spmd(1, 2)
@meshed("ring")
def test_one_long_room_puts_no_sequence_beyond_the_numbers_of_the_cache(mesh: sp.Mesh) -> None:
    """All sequences have positions as far apart as the longest room: here above 2**31."""
    room, count = 1_000_000, 2150
    one = replace(GREEDY, heads=(1, 1), head_dim=2)
    model = create(replace(one.config, max_position_embeddings=room), mesh)
    found = []
    for rooms in ([3], [room, *[3] * (count - 1)]):
        decoder, others = Decoder(model, rooms), [list[int]()] * (len(rooms) - 1)
        found.append([decoder.prefill([*others, [1, 2]]), decoder.decode([*others, [3]])])
    torch.testing.assert_close(*found)


@spmd(1, 2)
@meshed("ring")
def test_the_memory_of_a_step_of_decoding_grows_with_the_tokens(mesh: sp.Mesh) -> None:
    """If each query had its scores for all sequences, 4 times as many would need 16 times it."""
    peaks = []
    model = GREEDY.model(mesh)
    for count in (16, 64):
        decoder = Decoder(model, [62] * count)
        decoder.prefill([[1] * 60] * count)
        with LiveBytes() as live:
            decoder.decode([[2]] * count)
        peaks.append(live.peak)
    assert peaks[1] <= 5 * peaks[0]


@spmd(2)
@meshed("ring")
def test_narrow_numbers_of_numpy_make_the_same_decoder(mesh: sp.Mesh) -> None:
    """Room, beginnings of sequences and micro-batches of NumPy's narrowest type would wrap."""
    rooms: Any = [np.uint8(100)] * 4, [100] * 4
    model, new = GREEDY.model(mesh), [[1] * 60, [2], [3] * 50, [4]]
    one, same = (
        Decoder(model, room if mesh.rank else rooms[1], micro_batches=room[0] // 50)
        for room in rooms
    )
    assert torch.equal(one.prefill(new), same.prefill(new))
    assert torch.equal(one.decode([[1], [2], [], [3]]), same.decode([[1], [2], [], [3]]))
    assert [cache.room for cache in one.caches] == [(100, 100)] * 2


@pytest.mark.parametrize("axes", [{"tp": 2}, {"ring": 2}, {"pp": 2}])
@spmd(2)
@meshed()
def test_a_token_costs_one_comparison(mesh: sp.Mesh, axes: dict[str, Any]) -> None:
    """A decoder's step makes one agreement. Later calls make their own, even if the step failed."""
    decoder = Decoder(DEEP.model(mesh), [9])
    decoder.prefill([[1] * 5])
    (group,) = (mesh[axis] for axis in axes)
    group.counters.reset()
    decoder.decode([[3]])
    assert group.counters["control"].calls == 1
    with pytest.raises(ValueError, match="vocabulary"):
        decoder.decode([[31]])
    sp.all_reduce(torch.zeros(1), comm=group)
    assert group.counters["control"].calls == 3


@pytest.mark.parametrize("axes", [{"tp": 2}, {"ring": 2}, {"pp": 2}])
@pytest.mark.parametrize("learns", [False, True])
@spmd(2)
@meshed()
def test_each_part_of_decoding_may_be_in_inference_mode(
    mesh: sp.Mesh, axes: dict[str, Any], learns: bool
) -> None:
    """Nothing that one part leaves for the next, such as the cache, is only for that mode."""
    found = []
    for modes in product((False, True), repeat=4):
        make, decoder, prefill, decode = map(torch.inference_mode, modes)
        with make:
            model = DEEP.model(mesh).requires_grad_(learns)
        with decoder:
            made = Decoder(model, [9, 4])
        with prefill:
            first = made.prefill([[1] * 5, [2]])
        with decode:
            found.append(torch.cat([first, made.decode([[3], [4, 5]])]))
    assert all(torch.equal(logits, found[0]) for logits in found)


@pytest.mark.parametrize("axes", [{"tp": 2}, {"pp": 2}, {"ring": 2}])
@spmd(2)
def test_a_converted_model_is_one_of_its_new_dtype(
    comm: Any, axes: dict[str, Any], tmp_path: Path
) -> None:
    folder = shared(comm, tmp_path)
    with sp.Mesh(comm, **axes) as mesh:
        case = Case((4, 2), dtype="float32")
        models = case.model(mesh), create(case.config, mesh, dtype=torch.float64)
        models[1].load_state_dict(models[0].state_dict())
        models[1].to(torch.float32)
        assert models[1].dtype == torch.float32
        logits = [Decoder(model, [3]).prefill([[1, 2]]) for model in models]
        torch.testing.assert_close(*logits, rtol=0, atol=0)
        if "pp" not in axes:
            save(models[1], folder / "model")
            assert load(folder / "model", mesh).dtype == torch.float32
            assert read_json(folder / "model" / "config.json")["dtype"] == "float32"


@pytest.mark.parametrize("axes", [{"tp": 2}, {"ring": 2}, {"pp": 2}])
@pytest.mark.parametrize("tp_sp", [False, True])
@spmd(2)
@meshed()
def test_a_decoder_computes_products_in_the_dtype_of_autocast(
    mesh: sp.Mesh, axes: dict[str, Any], tp_sp: bool
) -> None:
    """Keys, values and logits stay in the dtype of the model."""
    case = Case((6, 2), layers=2, vocab=31, dtype="float32")
    model, found = case.model(mesh, tp_sp=tp_sp), []
    for enabled in (True, False):
        decoder = Decoder(model, [9, 4])
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            found.append((decoder.prefill([[1] * 5, [2]]), decoder.decode([[3], [4, 5]])))
    for lower, exact in zip(*found, strict=True):
        assert lower.dtype == torch.float32
        assert not torch.equal(lower, exact)
        torch.testing.assert_close(lower, exact, rtol=0, atol=0.05 * float(exact.abs().max()))


@spmd(1, 2)
def test_a_half_model_computes_under_autocast_to_its_type(
    comm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RMS norm returns float32, as under autocast on a GPU with torch 2.12."""
    norm = F.rms_norm
    monkeypatch.setattr(F, "rms_norm", lambda *given: norm(*given).float())
    with sp.Mesh(comm, tp=comm.size) as mesh, torch.autocast("cpu", torch.bfloat16):
        model = Case((6, 2), dtype="bfloat16").model(mesh)
        assert math.isfinite(backward(model, [[1, 2, 3]]))
        assert Decoder(model, [3]).prefill([[1, 2]]).dtype == torch.bfloat16


@pytest.mark.parametrize("axes", [{"tp": 2}, {"ring": 2}])
@pytest.mark.parametrize("what", ["prefill", "decode"])
@pytest.mark.parametrize("layer", [0, -1])
@spmd(2)
@meshed()
def test_a_call_that_fails_on_all_ranks_adds_no_tokens(
    mesh: sp.Mesh, layer: int, what: str, axes: dict[str, Any]
) -> None:
    """The error comes from a layer, as with too little memory or Ctrl-C."""

    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    model = replace(DEEP, layers=4).model(mesh)
    wanted, found = Decoder(model, [9, 9]), Decoder(model, [9, 9])
    for decoder in (wanted, found):
        decoder.prefill([[1] * 3, [2]])
    hook = model.layers[layer].register_forward_pre_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        getattr(found, what)([[3, 4], [5]])
    hook.remove()
    for tokens in ([[6], []], [[7], [8, 9, 10]]):
        again = [getattr(decoder, what)(tokens) for decoder in (wanted, found)]
        assert torch.equal(*again)
    assert found.caches[0].lengths == wanted.caches[0].lengths


@spmd(1, 2)
@meshed("ring")
def test_a_mask_is_searched_once_a_step(mesh: sp.Mesh) -> None:
    """Not in each layer: the host would wait for a GPU's answer."""
    answers, found = ("aten::_local_scalar_dense", "aten::nonzero"), []
    for layers in (1, 2, 5):
        decoder = Decoder(replace(DEEP, layers=layers).model(mesh), [20, 20])
        decoder.prefill([[1, 2, 3, 4, 5], [6, 7, 8]])
        with Calls() as calls:
            decoder.decode([[1], [2]])
        found.append(sum(name.startswith(answers) for name, *_ in calls.made))
    assert found == [found[0]] * 3


@pytest.mark.parametrize("axes", [{"dp": 2, "tp": 2}, {"pp": 2, "ring": 2}])
@spmd(4)
@meshed()
def test_the_tokenizer_of_the_first_rank_of_a_replica_decides(
    mesh: sp.Mesh, axes: dict[str, Any]
) -> None:
    """That tokenizer finds stop strings, also in special tokens. Other ranks have an empty one."""
    model = DEEP.model(mesh)
    call = partial(generate, model, [[5, 1, 4], [2]], max_tokens=40, sampling=Sampling(1.5))
    free = call()
    tokenizer = Tokenizer(models.BPE())
    if model.grid.model.rank == 0:
        tokenizer = byte_tokenizer()
        tokenizer.add_special_tokens([tokenizer.id_to_token(token) for token in free[0]])
    for start, stop in ((1, 3), (0, 39)):
        found = call(stop_strings=[bytes(free[0][start:stop]).decode()], tokenizer=tokenizer)
        assert found == [free[0][:stop], free[1]]


class Products(TorchFunctionMode):
    """Record the shape and the strides of the matrices by which `F.linear` multiplies."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[tuple[int, ...], tuple[int, ...]]] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is F.linear:
            self.found.append((tuple(args[1].shape), args[1].stride()))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("learns", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
@spmd(2)
@meshed("tp")
def test_weights_of_one_input_are_multiplied_at_once(
    mesh: sp.Mesh, dtype: str, learns: bool
) -> None:
    """The first decoder of a model moves its weights in memory. They remain the same parameters."""
    case, ffn, vocab = Case((8, 2), ffn=9, vocab=31, dtype=dtype), 5 - mesh.rank, 16 - mesh.rank
    model = case.model(mesh).requires_grad_(learns)
    before = {name: (x, x.detach().clone()) for name, x in model.named_parameters()}
    places = []
    for _ in range(2):
        decoder = Decoder(model, [9])
        decoder.prefill([[1] * 5])
        places.append([x.data_ptr() for x in model.parameters()])
    assert places[0] == places[1]
    for name, x in model.named_parameters():
        assert x is before[name][0]
        assert torch.equal(x, before[name][1])
    with Products() as products:
        decoder.decode([[3]])
    by_columns = dtype in ("float32", "float64") and not learns
    layer = [
        ((24, 10), (1, 24) if by_columns else (10, 1)),
        ((10, 16), (16, 1)),
        ((2 * ffn, 10), (1, 2 * ffn) if by_columns and not mesh.rank else (10, 1)),
        ((10, ffn), (ffn, 1)),
    ]
    assert products.found == [*2 * layer, ((vocab, 10), (1, vocab) if by_columns else (10, 1))]
