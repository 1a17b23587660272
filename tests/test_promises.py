"""Test laws that docstrings promise, each for every public function that promises it."""

import tempfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import llama_cases
import pytest
import torch
from domains import cost
from domains.declared import normal
from domains.public import documented, told_alike
from hypothesis import strategies as st
from kit.carriers import Passing
from kit.meshed import meshed
from oracle.collective_cases import NEEDED, OPS, Case, cases, part_of
from oracle.once import contents
from oracle.ways import Way, ways
from promises import alike
from promises.ledger import Scene
from promises.models import ROWS
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import sp_core as sp
from sp_core.agreement import agree
from sp_core.errors import CollectiveMismatch
from sp_core.llama import Decoder
from sp_core.nn.gradients import Placement, clip_gradient_norm, place, reduce_gradients
from sp_core.nn.loss import next_token_loss
from sp_core.programs import ALGORITHMS, SLOTS
from sp_core.sharding import split_sizes
from sp_core.testing import LiveBytes, given, spmd, tier
from sp_core.transport import NAMES

BY_FORMULA = {f"{x.name[5:]}_attention" for x in cost.SUBJECTS if "problem.shared" in x.factors}
"""`domains/cost.py` judges the bytes and messages of these functions."""


@pytest.mark.parametrize("check", ["agree", "off"])
@pytest.mark.parametrize("names", sorted(ROWS), ids=" ".join)
@spmd(1, 3)
def test_a_call_sends_what_its_docstring_says(
    comm: Any,
    names: tuple[str, ...],
    check: Any,
    tmp_path: Path,
) -> None:
    axis = names[0]
    folder = comm.bcast(tempfile.mkdtemp(dir=tmp_path) if comm.rank == 0 else None)
    for transport in ("host", "window") if "fence" in names else ("auto",):
        with sp.Mesh(comm, transport=transport, check=check, **{axis: comm.size}) as mesh:
            ROWS[names](Scene(mesh, axis, Path(folder)))


def test_every_function_that_communicates_has_a_row() -> None:
    stated = {name for names in ROWS for name in names} | {*OPS, "Mesh", "plan"} | BY_FORMULA
    what_to_do = "add a row to promises/models.py or ledger.py; for a scheme, to domains/cost.py"
    assert documented("Communication:") - stated == set(), what_to_do


@given(case=cases(["float64", "bfloat16", "bool", "int32"]))
@meshed()
def test_a_collective_and_its_backward_send_what_other_ranks_need(
    mesh: sp.Mesh, case: Case
) -> None:
    size, rank = mesh.size, mesh.rank
    group, inputs = mesh["sp"], case.inputs(size)
    x = inputs[rank].clone().requires_grad_(inputs[rank].is_floating_point())
    out = case.call(x, group)
    forward, backward = sent_by(case, inputs, rank)
    assert sent(group) == forward
    if x.requires_grad:
        out.square().sum().backward()
        assert sent(group) == backward
        assert x.grad is not None
        assert x.grad.untyped_storage().nbytes() <= x.nbytes, "it keeps more than a gradient"


Sent = tuple[str, int, int]
NOTHING: Sent = ("", 0, 0)


def sent(comm: sp.Communicator) -> Sent:
    """Return name, messages and bytes of the one operation since the last call (no agreements)."""
    every = comm.counters.snapshot()
    comm.counters.reset()
    ops = [op for op, count in every.items() if op != "control" and count["calls"]]
    if not ops:
        return NOTHING
    (op,) = ops
    assert every[op]["calls"] == 1
    return op, int(every[op]["messages"]), int(every[op]["bytes_sent"])


def sent_by(case: Case, inputs: list[torch.Tensor], rank: int) -> tuple[Sent, Sent]:
    """Return what `sent` must return after the forward, and after the backward."""
    size = len(inputs)
    mine, others, kept = inputs[rank].nbytes, size - 1, case.expected(inputs, rank, size).nbytes
    dealt = split_sizes(inputs[rank].shape[case.other_dim], size)
    part = part_of(inputs[rank], dealt, case.other_dim, rank).nbytes
    root, moves = rank == case.root(size), case.offset % size != 0
    back = inputs[(rank - case.offset) % size].nbytes
    whole = mine * (size > 1)
    gather, reduce_ = ("all_gather", 0, mine * others), ("all_reduce", 0, whole)
    return {
        "all_gather": (gather, ("reduce_scatter", 0, kept - mine)),
        "gather_replicated": (gather, NOTHING),
        "reduce_scatter": (("reduce_scatter", 0, mine - kept), ("all_gather", 0, kept * others)),
        "all_reduce": (reduce_, reduce_),
        "reduce_from_group": (reduce_, NOTHING),
        "copy_to_group": (NOTHING, reduce_),
        "reduce": (("reduce", 0, whole * (not root)), ("broadcast", 0, mine * others * root)),
        "broadcast": (("broadcast", 0, mine * others * root), ("reduce", 0, whole * (not root))),
        "all_to_all": (("all_to_all", 0, mine - part), ("all_to_all", 0, kept - part)),
        "shift": (("shift", moves, mine * moves), ("shift", moves, back * moves)),
    }[case.op]


def differing(comm: Any, results: Iterable[Any]) -> list[int]:
    """Return the indices of results that another rank does not have bit for bit."""
    mine = [contents(x) if isinstance(x, torch.Tensor) else x for x in results]
    every = comm.allgather(mine)
    return [place for place, x in enumerate(mine) if any(other[place] != x for other in every)]


NO_RESULTS = {"Communicator.agree_on", "copy_to_group"}
"""Functions whose docstrings speak of all ranks as callers or of arguments, not of a result."""


def test_every_function_whose_result_all_ranks_hold_alike_has_a_row() -> None:
    assert told_alike() - NO_RESULTS - {name for names in alike.ROWS for name in names} == set()
    assert NO_RESULTS - told_alike() == set()


EVERY_AXIS = [
    (names, axis)
    for names in sorted(alike.ROWS)
    for axis in names[0].split()
    if axis == "sp" or tier() == "threads"
]
"""Names and axes of rows. Under mpiexec only axis sp: collectives and layers, parts of models."""


@pytest.mark.parametrize(("names", "axis"), EVERY_AXIS)
@given(max_ranks=4, max_examples=3, way=ways(), half=st.booleans(), seed=st.integers(0, 99))
def test_what_all_ranks_hold_alike_has_the_same_bits(
    comm: Any,
    names: tuple[str, ...],
    axis: str,
    way: Way,
    half: bool,
    seed: int,
) -> None:
    dtype = torch.bfloat16 if half else torch.float32
    with sp.Mesh(comm, **way, **{axis: comm.size}) as mesh:
        assert differing(comm, alike.ROWS[names](alike.Place(mesh, mesh[axis], dtype, seed))) == []


@pytest.mark.parametrize("tp", [2, 3])
@spmd(6)
def test_groups_that_lie_differently_on_nodes_round_alike(comm: Any, tp: int) -> None:
    """A hierarchical all-reduce adds in an order that depends on the nodes of its ranks."""
    nodes = [0, 0, 0, 1, 1, 0]
    with sp.Mesh(comm, nodes=nodes, algorithm="hierarchical", tp=tp, dp=6 // tp) as mesh:
        tensor, data = mesh["tp"], mesh["dp"]
        copied, summed, cut = (nn.Parameter(torch.zeros(n)) for n in (64, 64, 1))
        for weight, rank in ((copied, 6 * data.rank), (summed, comm.rank)):
            placement = Placement.replicated((64,), tp, partial=weight is summed)
            place(weight, placement).grad = normal(rank, (64,), "float32")
        reduce_gradients([copied, summed], data=data, tensor=tensor)
        place(cut, Placement.split((tp,), 0, tp)).grad = normal(132 + tensor.rank, (1,), "float32")
        norm = clip_gradient_norm([cut], torch.inf, tensor=tensor)
        logits, labels = normal(132 + data.rank, (5, 2), "float32"), torch.tensor([0, 1, 0, 1, 0])
        loss = next_token_loss(logits, labels, tensor=tensor, data=data)
        assert differing(comm, [copied.grad, summed.grad, norm, loss]) == []


@spmd(6)
def test_decoding_gives_all_sequence_ranks_the_same_bits_on_any_nodes(comm: Any) -> None:
    nodes = [0, 0, 0, 1, 1, 0]
    with sp.Mesh(comm, nodes=nodes, algorithm="hierarchical", ring=2, tp=3) as mesh:
        decoder = Decoder(llama_cases.Case((6, 3), dtype="float32", hidden=24).model(mesh), [9])
        decoder.prefill([[1, 5, 3]])
        assert differing(comm, [decoder.decode([[4]]), decoder.decode([[2]])]) == []


ON_ALL_RANKS = ("all_gather", "all_reduce", "broadcast", "reduce_from_group", "gather_replicated")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("transport", NAMES["cpu"])
@spmd(3, 4)
def test_every_algorithm_gives_all_ranks_the_same_bits(
    comm: Any,
    transport: str,
    dtype: torch.dtype,
) -> None:
    """Sums of these numbers depend on the order of addition. The ranks are on two nodes."""
    nodes = [rank % 2 for rank in range(comm.size)]
    with sp.Mesh(comm, transport=transport, nodes=nodes, sp=comm.size) as mesh:
        x = alike.Place(mesh, mesh["sp"], dtype, 5).noise(401)
        for op in ON_ALL_RANKS:
            of = {"reduce_from_group": "all_reduce", "gather_replicated": "all_gather"}.get(op, op)
            usable = [a for a in ALGORITHMS[of] if a != "window" or mesh["sp"].window is not None]
            found = [getattr(sp, op)(x, comm=mesh["sp"], algorithm=name) for name in usable]
            assert [usable[place] for place in differing(comm, found)] == [], op


def tallied(comm: Any, calls: Counter[str]) -> Any:
    """Return a communicator that adds one to the number of calls of each method that is called."""
    return Passing(comm, lambda name, _: calls.update([name]))


@spmd(1, 2, 4)
def test_a_mesh_agrees_once_and_splits_once_for_each_set_of_axes(comm: Any) -> None:
    calls = Counter[str]()
    with sp.Mesh(tallied(comm, calls), a=comm.size, b=1, c=1, tuning="off") as mesh:
        assert {name: calls[name] for name in TOLD} == IN_ALL
        for axes in ("a", ("b", "a"), ("c", "b", "a"), ()):
            assert mesh[axes].size in (1, comm.size)
        assert {name: calls[name] for name in TOLD} == IN_ALL


TOLD = ("Split", "Iallreduce", "Iallgather", "bcast")
IN_ALL = {"Split": 7, "Iallreduce": 1, "Iallgather": 0, "bcast": 0}


CALLS = st.sampled_from(["a"] * 9 + ["b"])


@given(
    drawn=st.lists(st.tuples(CALLS, st.booleans(), CALLS), min_size=8, max_size=8),
    same=st.booleans(),
)
def test_an_agreement_gathers_only_if_ranks_differ(
    comm: Any, drawn: list[tuple[str, bool, str]], same: bool
) -> None:
    """All ranks get the same answer, whatever call, value and error each of them passes."""
    told = drawn[:1] * comm.size if same else drawn[: comm.size]
    wrong = [error == "b" for *_, error in told]
    call, value = told[comm.rank][0], -(1 << 62) if told[comm.rank][1] else 7
    counted, error = Counter[str](), ValueError("no") if wrong[comm.rank] else None
    try:
        found: Any = agree(tallied(comm, counted), call, value, error)
    except ValueError as raised:
        found = str(raised)
    except CollectiveMismatch:
        found = "differ"
    values = tuple(-(1 << 62) if large else 7 for _, large, _ in told)
    differ = "differ" if len({call for call, *_ in told}) > 1 else values
    assert found == (f"rank {wrong.index(True)}: no" if any(wrong) else differ)
    assert counted["Iallreduce"] == 1
    assert counted["Iallgather"] == (found != values[:1] * comm.size)


@pytest.mark.parametrize("check", ["agree", "off"])
@pytest.mark.parametrize("transport", ["host", "window"])
@spmd(2, 3)
@meshed()
def test_a_plan_agrees_when_it_is_made(mesh: sp.Mesh, transport: str, check: Any) -> None:
    """Each run makes an agreement as well, unless the mesh was made with `check="off"`."""
    for op in PLANS:
        x, control = torch.ones(99 * mesh.size, 99), mesh["sp"].counters["control"]
        before = control.calls
        plan = sp.plan(op, x, comm=mesh["sp"], **NEEDED.get(op, {}))
        asks = op in ("all_gather", "all_to_all", "shift")  # ranks exchange their lengths
        resident = transport == "window" and op != "all_to_all"
        made = (check == "agree" or asks) + resident
        assert control.calls - before == made, op
        plan.run()
        plan.finish(plan.start())
        assert control.calls - before == made + 2 * (check == "agree"), op


PLANS = (*OPS[:7], "all_reduce_")
PLANNED = [
    (op, {"algorithm": name, **named})
    for op in PLANS
    for name in ALGORITHMS[op.removesuffix("_")]
    for named in ([{}, {"op": "max"}, {"op": "min"}] if "all_reduce" in op else [{}])
]
"""Collectives, and arguments of their plans."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("transport", ["host", "window"])
@spmd(3)
@meshed()
def test_a_run_of_a_plan_makes_no_tensor(mesh: sp.Mesh, transport: str, dtype: torch.dtype) -> None:
    for op, named in PLANNED:
        if named["algorithm"] == "window" and mesh["sp"].window is None:
            continue
        x = torch.ones(30, 60, dtype=dtype)[:, ::2]
        plan = sp.plan(op, x, comm=mesh["sp"], **named, **NEEDED.get(op, {}))
        with LiveBytes() as live:
            for _ in range(2 * SLOTS if plan.algorithm == "window" else 1):
                plan.run()  # by now the plan has made all tensors that it keeps
            before = live.peak = live.now
            plan.run()
            assert live.peak == before, (op, named)


@pytest.mark.parametrize(("op", "copies"), [("sum", 1), ("max", 5)])
@spmd(2)
def test_a_reduction_in_place_by_mpi_needs_so_many_copies(comm: Any, op: str, copies: int) -> None:
    x = torch.ones(5000)
    with sp.Mesh(comm, check="off", sp=comm.size) as mesh, LiveBytes((x,)) as live:
        sp.all_reduce_(x, comm=mesh["sp"], op=op, algorithm="mpi")
    assert copies * x.nbytes <= live.peak - x.nbytes < (copies + 0.5) * x.nbytes


@pytest.mark.parametrize("algorithm", ["auto", "mpi"], ids="by {}".format)
@spmd(1, 2)
def test_what_is_under_way_keeps_what_it_reads_and_no_longer(comm: Any, algorithm: str) -> None:
    """The caller deletes the input at once, and new tensors could take its memory."""
    with sp.Mesh(comm, transport="window", sp=comm.size) as mesh:
        for op in [op for op in OPS if hasattr(sp, f"{op}_start")]:
            named: dict[str, Any] = {"algorithm": algorithm, **NEEDED.get(op, {})}
            x = torch.full((50, 50), float(comm.rank + 1))
            wanted = getattr(sp, op)(x, comm=mesh["sp"], **named)
            memory = StorageWeakRef(x.untyped_storage())
            pending = getattr(sp, f"{op}_start")(x, comm=mesh["sp"], **named)
            del x
            others = [torch.full((50, 50), torch.nan) for _ in range(9)]
            assert torch.equal(pending.wait(), wanted), (op, len(others))
            comm.Barrier()
            mesh["sp"].poll()
            assert memory.expired(), op
