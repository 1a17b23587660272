"""Test how layers are split over stages, gradients of tied weights, and passes over sequences.

`domains/` judges what pipelines and plans compute.
"""

from collections.abc import Callable
from contextlib import nullcontext
from fractions import Fraction
from functools import partial
from itertools import count, pairwise
from typing import Any, cast

import numpy as np
import pytest
import torch
from domains.declared import normal
from hypothesis import example, given, strategies as st
from kit.meshed import meshed
from llama_cases import Case
from oracle.collective_cases import in_memory
from oracle.link import LinkModel
from torch import Tensor

import sp_core as sp
from sp_core.llama import Decoder, config as llama_config
from sp_core.llama.pipeline import MicroBatch, forward, loss_and_gradients, sum_tied_gradients
from sp_core.llama.unequal import compute
from sp_core.nn.gradients import reduce_gradients
from sp_core.nn.memory import KEEP_ALL
from sp_core.scheduling import (
    POLICIES,
    Assignment,
    Work,
    balanced,
    dynamic,
    gpipe,
    picture,
    prefill_only,
    split_stages,
    timeline,
)
from sp_core.segments import grouped
from sp_core.testing import LiveBytes, spmd

TOKENS = torch.ones(1, 5, dtype=torch.int64)
BATCH = MicroBatch(TOKENS, TOKENS, sp.Sharding.contiguous(5, 1))
LENGTHS = st.lists(st.one_of(st.integers(0, 12), st.integers(0, 5000)), max_size=40)


def test_stages_are_split_by_the_number_of_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case((6, 2), layers=3, head_dim=4, hidden=10, ffn=7, vocab=13)
    monkeypatch.setattr(
        llama_config, "split_stages", lambda costs, stages, last: (costs, stages, last)
    )
    sizes = {name: x.numel() for name, x in case.weights().items() if x.dim() == 2}
    layers: Any = [
        sum(size for name, size in sizes.items() if f"layers.{number}." in name)
        for number in range(3)
    ]
    assert [*llama_config.stage_layers(case.config, 2)] == [layers, 2, sizes["lm_head.weight"]]


@pytest.mark.parametrize("cost", [1, 0.1, Fraction(1, 3), np.float16(0.1), np.float16(40000)])
def test_costs_are_added_without_rounding_in_any_unit(cost: Any) -> None:
    """A float16 holds no number above 65504, and an int32 no square above 46340**2."""
    for n in range(2, 12):
        assert split_stages([cost] * n, 2)[0] == range(n // 2)
        assert split_stages([cost] * n, 2, first=cost, last=cost)[0] == range(n // 2)
    assert timeline(gpipe(1, 40), lambda *_: cost).end == pytest.approx(80 * float(cost))
    length: Any = np.int32(100_000)
    assert Work(cost, cost).of(length) == pytest.approx(5_000_150_000 * float(cost))


def test_the_operations_of_a_long_sequence_are_counted_without_rounding() -> None:
    assert Work(0, 1).of(3**20) == 3**20 * (3**20 + 1) // 2


def test_stages_before_the_last_one_are_split_as_their_layers_alone() -> None:
    """The split 0 | 1-3 | 4 | 5 is as good, but the first two stages would be uneven."""
    costs = [1, 1, 1, 1, 10, 10]
    for stages, end in ((2, 4), (3, 5), (4, 6)):
        parts = (range(2), range(2, 4), range(4, 5), range(5, 6))[:stages]
        for unit in (1, 2.0**-60, 2.0**60):
            assert split_stages([unit * cost for cost in costs[:end]], stages) == parts


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("without", ["neither", "first", "last"])
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "float64", "expanded", "transposed"])
@spmd(2, 3)
@meshed("pp")
def test_a_tied_weight_without_a_gradient_on_one_stage_gets_the_other_stages(
    mesh: sp.Mesh, kind: str, without: str, tied: bool
) -> None:
    """If untied, the embedding is on the first stage only, and the head on the last stage only.

    `kind` is the dtype of the gradients, or how they lie in memory. The weights are in float32.
    """
    stage = {0: "first", mesh.size - 1: "last"}.get(mesh.rank, "middle")
    ends = {"norm", "embed_tokens" if tied else "lm_head"}
    model = Case((4, 2), layers=4, tied=tied, dtype="float32").model(mesh)
    names = {name.split(".")[0] for name, _ in model.named_parameters()} - {"layers"}
    assert names == {"first": {"embed_tokens"}, "middle": set(), "last": ends}[stage]
    weight = model.embed_tokens.weight if "embed_tokens" in names else None
    dtype = getattr(torch, kind, torch.float32)
    if weight is not None:
        weight.grad_dtype = dtype
        numbers = torch.arange(weight.numel(), device=weight.device).remainder(64)
        numbers = in_memory(numbers.view_as(weight).to(dtype), kind)
    if weight is not None and stage != without:
        own = numbers * (1.0 if stage == "first" else 2.0)
        other = (stage, kind) == ("last", "transposed")  # the two may lie differently
        weight.grad = in_memory(own, "contiguous" if other else kind)
    sum_tied_gradients(model)
    if tied and weight is not None:
        wanted = {"neither": 3.0, "first": 2.0, "last": 1.0}[without]
        assert torch.equal(cast("Tensor", weight.grad), numbers * wanted)


@pytest.mark.parametrize("given", [False, True])
@spmd(2, 3)
@meshed("pp")
def test_copies_of_a_tied_weight_need_gradients_of_one_dtype(mesh: sp.Mesh, given: bool) -> None:
    model = Case((4, 2), layers=4, tied=True).model(mesh)
    if model.is_last:
        weight = model.embed_tokens.weight
        weight.grad_dtype = torch.float32
        weight.grad = torch.ones_like(weight, dtype=torch.float32) if given else None
    error = r"of torch.float64 .* first .* of torch.float32 .* last\. Set `grad_dtype` alike"
    with pytest.raises(sp.DtypeError, match=error):
        sum_tied_gradients(model)


@pytest.mark.parametrize("frozen", ["everywhere", "first", "last"])
@spmd(2, 3)
@meshed("pp")
def test_a_frozen_tied_weight_gets_no_gradient(mesh: sp.Mesh, frozen: str) -> None:
    """Weights that learn on one stage only would become different, so they are refused."""
    model = Case((4, 2), layers=4, tied=True).model(mesh)
    stage = {0: "first", mesh.size - 1: "last"}.get(mesh.rank)
    for weight in model.embed_tokens.parameters() if stage else ():
        weight.requires_grad_(frozen not in ("everywhere", stage))
    error = pytest.raises(ValueError, match="requires_grad=True on one of the two stages")
    with nullcontext() if frozen == "everywhere" else error:
        sum_tied_gradients(model)
    assert not any(weight.grad is not None for weight in model.parameters())


HELD_TWICE = {
    "pp": (Case((4, 2), layers=3, tied=True, vocab=99, dtype="bfloat16"), "embed_tokens"),
    "tp": (Case((3, 3), 4, 8, hidden=24, ffn=90, vocab=33, dtype="bfloat16"), "norm"),
}
"""By axis, a model whose ranks along it have unequal parts, and weights that they hold alike."""


@pytest.mark.parametrize("axis", HELD_TWICE)
@spmd(6)
def test_copies_of_a_weight_get_equal_gradients_whatever_the_order_of_sums(
    comm: Any, axis: str
) -> None:
    """A ring adds an element in an order that depends on its place among all gradients."""
    axes: Any = {axis: 2, "dp": 3}
    case, name = HELD_TWICE[axis]
    with sp.Mesh(comm, algorithm="ring", **axes) as mesh:
        model = case.model(mesh)
        for number, weight in enumerate(model.parameters()):
            weight.grad = normal(1000 * model.grid.data.rank + number, weight.shape, "bfloat16")
        reduce_gradients(model.parameters(), data=model.grid.data, tensor=model.grid.tensor)
        sum_tied_gradients(model)
        named = model.named_parameters()
        own = torch.cat([cast("Tensor", x.grad).flatten() for key, x in named if name in key])
        assert torch.equal(own, sp.broadcast(own, comm=mesh[axis], root=0))


@spmd(2, 3)
@meshed("pp")
def test_a_frozen_first_stage_trains_the_others(mesh: sp.Mesh) -> None:
    """The other weights get the gradients that they have if all weights learn."""
    found = []
    for is_frozen in (False, True):
        model = Case((4, 2), layers=4).model(mesh)
        for weight in model.parameters():
            weight.requires_grad_(not (is_frozen and mesh.rank == 0))
        loss_and_gradients(model, [BATCH] * 2)
        found.append([weight.grad for weight in model.parameters()])
    assert all(
        x is None if mesh.rank == 0 else torch.equal(x, y) for y, x in zip(*found, strict=True)
    )


@spmd(1, 2, 3)
@meshed("pp")
def test_without_gradients_a_pipeline_returns_the_same_loss(mesh: sp.Mesh) -> None:
    """No stage waits for a gradient, and none is made."""
    model = Case((4, 2), layers=4).model(mesh)
    compute = partial(loss_and_gradients, model, [BATCH] * 2)
    losses = [compute(recompute=recompute) for recompute in (False, True)]
    model.zero_grad()
    with torch.no_grad():
        losses += [compute(recompute=recompute) for recompute in (False, True)]
        losses.append(compute(ordering=prefill_only))
    assert all(torch.equal(loss, losses[0]) for loss in losses)
    assert all(x.grad is None for x in model.parameters())


@pytest.mark.parametrize("learns", [False, True])
@spmd(2, 3)
def test_the_last_stage_keeps_no_micro_batch_that_it_has_computed(comm: Any, learns: bool) -> None:
    with sp.Mesh(comm, pp=comm.size) as mesh, torch.set_grad_enabled(learns):
        model, peaks = Case((4, 2), layers=4).model(mesh), []
        for number in (1, 3, 12):
            with LiveBytes() as live:
                loss_and_gradients(model, [BATCH] * number)
            peaks.append(live.peak)
        # positions are made for all micro-batches first; stages keep what they send
        sent = learns * 5 * model.config.hidden_size * 8
        if comm.rank == comm.size - 1:
            assert peaks[2] - peaks[1] <= 9 * (TOKENS.nbytes + sent)


@spmd(3)
def test_a_pipeline_returns_when_its_messages_have_left(comm: Any) -> None:
    link = LinkModel(0.0, 2000.0)
    with sp.Mesh(comm, pp=3, transport=link, algorithm={"all_reduce": "ring"}) as mesh:
        model = Case((2, 2), layers=3).model(mesh)
        forward(model, [model.one_pass(TOKENS, BATCH.sharding, sp.Mask(causal=True), KEEP_ALL)])
        assert link.clock() >= link._out


@pytest.mark.parametrize(
    "call",
    [
        lambda model: Decoder(model, [1] * 3, micro_batches=3).decode([[1]] * 3),
        lambda model: loss_and_gradients(model, [BATCH] * 3),
    ],
    ids=["decode", "train"],
)
@pytest.mark.parametrize("again", [False, True], ids=["", "and again"])
@spmd(2, 3)
@meshed("pp")
def test_stages_that_fail_at_different_micro_batches_go_on(
    mesh: sp.Mesh, call: Callable[[Any], Tensor], again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every rank catches its error, as after Ctrl-C. A later call gets its own messages.

    An error of a message after that (`again`) neither replaces it nor stops others.
    """
    passes = count()

    def fail(*_: object) -> None:
        if next(passes) == mesh.size - 1 - mesh.rank:
            if again:
                monkeypatch.setattr(mesh["pp"], "track", track)
            raise KeyboardInterrupt

    def track(handle: Any) -> None:
        tracked(handle)
        raise MemoryError

    model = Case((4, 2), layers=4).model(mesh)
    wanted, tracked = call(model), mesh["pp"].track
    hook = model.layers[model.own_layers[0]].register_forward_pre_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        call(model)
    monkeypatch.setattr(mesh["pp"], "track", tracked)
    hook.remove()
    assert torch.equal(call(model), wanted)


@given(lengths=LENGTHS, size=st.integers(1, 8), most=st.integers(1, 200))
@example(lengths=[1, 1, 1], size=1, most=1)
@example(lengths=[3, 1, 1, 1], size=1, most=3)
def test_passes_keep_the_order_and_their_limit(lengths: list[int], size: int, most: int) -> None:
    plan = POLICIES["contiguous"](lengths, size, Work(1, 1))
    for numbers in plan.packed:
        cut = list(grouped(numbers, plan.tokens, most))
        assert [number for part in cut for number in part] == list(numbers)
        assert all(len(part) == 1 or sum(lengths[n] for n in part) <= most for part in cut)
        assert all(sum(lengths[n] for n in (*a, b[0])) > most for a, b in pairwise(cut))


@spmd(1, 2)
@meshed("ring")
def test_of_a_packed_row_only_the_last_tokens_are_kept(mesh: sp.Mesh) -> None:
    texts = [[1] * 20] * 6
    plan = POLICIES["contiguous"]([*map(len, texts)], mesh.size, Work(1, 1))
    rows = compute(Case((4, 2)).model(mesh), texts, plan, pass_tokens=40).values()
    assert all(row.untyped_storage().nbytes() == row.nbytes for row in rows)


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_lengths_in_an_unsigned_array_have_the_plan_of_a_list(name: str) -> None:
    lengths = np.array([0, 3, 200], dtype=np.uint8)
    plans = [POLICIES[name](cast("Any", given), 2, Work(1, 1)) for given in (lengths, [0, 3, 200])]
    assert plans[0] == plans[1]


def test_numbers_of_a_short_dtype_do_not_overflow() -> None:
    """A float16 holds no number above 65504."""
    short: Any = np.float16
    tolerance, unit = short(0.02), short(1000)
    for plan in (balanced, dynamic):
        found = [plan([4096, 8, 8, 8], 4, Work(1, 1), x) for x in (tolerance, float(tolerance))]
        assert found[0] == found[1]
    shown = timeline(gpipe(1, 1), lambda *_: short(40000))
    assert shown == timeline(gpipe(1, 1), lambda *_: 40000.0)
    assert picture(shown, unit) == picture(shown, 1000.0)


def test_plans_given_in_arrays_and_lists_are_those_given_in_tuples() -> None:
    lists: Any = np.array([3, 2, 1], np.uint8), [0], [[1], range(0)], [np.int64(2)], np.int64(4)
    plans = [Assignment(*given) for given in (lists, ((3, 2, 1), (0,), ((1,), ()), (2,), 4))]
    first, second = ((plan, hash(plan), repr(plan)) for plan in plans)
    assert first == second
