"""Test ranks that wait, or go backward, in different orders: all get results, or one error."""

import gc
import sys
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from random import Random
from threading import Event, Thread
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import MagicMock, Mock

import pytest
import torch
from hypothesis import strategies as st
from kit.carriers import CARRIERS, OVER_GLOO
from kit.case_leaving import loss_of_attention
from kit.meshed import meshed
from oracle.collective_cases import DEFINITIONS, Case, cases
from oracle.fake_device import DelayedStreams
from oracle.window_cases import use_window
from refusals.kinds import USES, attended
from torch import Tensor

import sp_core as sp
from sp_core import progress
from sp_core.programs import SCHEDULED, usable
from sp_core.progress import Progress
from sp_core.schemes import SCHEMES
from sp_core.testing import given, run_threads, spmd
from sp_core.transport import Window
from sp_core.transport.staged import PipelinedTransport

DTYPES = torch.float32, torch.bfloat16
STARTED = ["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "shift", "broadcast"]


def gradients(results: list[Tensor], leaves: list[Tensor]) -> list[Tensor]:
    """Return the gradients of a weighted sum of squared results, then those of their squares."""
    loss = sum(((place + 1) * y.square().sum() for place, y in enumerate(results)), torch.zeros(()))
    first = torch.autograd.grad(loss, leaves, create_graph=True)
    return [*first, *torch.autograd.grad([g.square().sum() for g in first], leaves)]


def carried(mesh: sp.Mesh, way: str, *, split: bool) -> list[sp.Communicator]:
    """Return one or two communicators of the mesh, after changing how they move data."""
    groups = [mesh["two"], mesh["one"]] if split else [mesh["one", "two"]]
    for group in groups:
        if way.endswith("window"):
            use_window(group, on_device=way == "device window")
        elif way in OVER_GLOO or hasattr(group._comm, "Allgatherv"):
            group.transport = CARRIERS[way](group)
    return groups


@st.composite
def started(draw: st.DrawFn) -> Case:
    """Draw a collective that can be started, by any algorithm of messages or the mesh's own."""
    op = draw(st.sampled_from(STARTED))
    algorithm = draw(st.sampled_from(("auto", *SCHEDULED[op])))
    return draw(cases(["float64"], [op], algorithm))


@given(
    max_ranks=5,
    max_examples=40,
    check=st.sampled_from(["agree", "off"]),
    drawn=st.lists(st.tuples(started(), st.booleans()), min_size=2, max_size=4),
    order=st.integers(0, 99),
    split=st.booleans(),
    way=st.sampled_from([*sorted({*CARRIERS} - {"link"}), "window", "device window"]),
)
def test_each_rank_polls_and_waits_in_an_order_of_its_own(
    comm: Any,
    check: Any,
    drawn: list[tuple[Case, bool]],
    order: int,
    split: bool,
    way: str,
) -> None:
    """All ranks start the collectives in one order, on one or on several communicators.

    In half of the examples ranks wait under `no_grad`. Some inputs need no gradient.
    """
    half = 2 if split and comm.size % 2 == 0 else 1
    random = Random(order * 31 + comm.rank)
    with sp.Mesh(comm, check=check, one=half, two=comm.size // half) as mesh:
        groups = (4 * carried(mesh, way, split=split))[: len(drawn)]
        leaves = [
            case.inputs(group.size)[group.rank].clone().requires_grad_(needs or place == 0)
            for place, (group, (case, needs)) in enumerate(zip(groups, drawn, strict=True))
        ]

        def called(suffix: str) -> list[Any]:
            """Call or start the collectives on the squares of the leaves, and poll now and then."""
            found = []
            for group, (case, _), x in zip(groups, drawn, leaves, strict=True):
                named = case.arguments(group.size)
                named |= {"algorithm": "window"} if way.endswith("window") else {}
                found.append(getattr(sp, case.op + suffix)(x * x, comm=group, **named))
                for _ in range(random.randrange(1 + order % 4)):
                    mesh["one"].poll()
            return found

        wanted, pending = called(""), called("_start")
        for place in random.sample(range(len(pending)), len(pending)):
            with torch.set_grad_enabled(order % 2 == 0):
                pending[place].wait()
        results = [waiting.wait() for waiting in pending]
        assert all(again.wait() is y for again, y in zip(pending, results, strict=True))
        assert [y.requires_grad for y in results] == [x.requires_grad for x in leaves]
        assert all(torch.equal(*both) for both in zip(results, wanted, strict=True))
        needed = [leaf for leaf in leaves if leaf.requires_grad]
        pairs = zip(gradients(results, needed), gradients(wanted, needed), strict=True)
        assert all(torch.equal(*both) for both in pairs)


def in_thread(call: Callable[[], object]) -> object:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result()


MEANWHILE: dict[str, Callable[[Any, sp.Communicator, sp.Communicator], Callable[[], object]]] = {
    "a call": lambda comm, one, two: lambda: sp.all_gather(torch.ones(2), comm=two),
    "a call there": lambda comm, one, two: lambda: sp.all_gather(torch.ones(2), comm=one),
    "a call of another thread": lambda comm, one, two: (
        lambda: in_thread(lambda: sp.all_gather(torch.ones(2), comm=two))
    ),
    "a mesh": lambda comm, one, two: lambda: sp.Mesh(comm, a=comm.size).free(),
    "the end": lambda comm, one, two: lambda: two.free(),
    "a fence": lambda comm, one, two: lambda: sp.fence(comm=two),
    "a plan": lambda comm, one, two: sp.plan("all_gather", torch.ones(2), comm=two).run,
    "a backward": lambda comm, one, two: (
        sp.all_reduce(torch.ones(2, requires_grad=True), comm=two).sum().backward
    ),
    "a backward in place": lambda comm, one, two: loss_of_attention(two).backward,
    "a weight": lambda comm, one, two: (
        sp.ColumnParallelLinear.from_linear(
            torch.nn.Linear(4, 4), comm=two, sharding=sp.Sharding.contiguous(comm.size, comm.size)
        ).to_linear
    ),
}


@pytest.mark.parametrize("meanwhile", sorted(MEANWHILE))
@spmd(3)
def test_one_rank_waits_before_a_call_and_the_others_after_it(comm: Any, meanwhile: str) -> None:
    """Rank 0 can complete its wait only if the other ranks make progress inside their call."""
    how: Any = {"check": "off", "transport": "window"} if "place" in meanwhile else {}
    with sp.Mesh(comm, sp=comm.size) as mesh, sp.Mesh(comm, sp=comm.size, **how) as other:
        call = MEANWHILE[meanwhile](comm, mesh["sp"], other["sp"])
        pending = sp.all_reduce_start(torch.ones(40), comm=mesh["sp"], algorithm="ring")
        for step in (pending.wait, call) if comm.rank == 0 else (call, pending.wait):
            step()
        assert torch.equal(pending.wait(), torch.full((40,), 3.0))


DIFFERENTIABLE: dict[str, Callable[[Tensor, sp.Mesh], Tensor]] = {
    **USES,
    **{
        f"{name}_attention": lambda x, mesh, name=name: attended(name, x, mesh)[0]  # type: ignore[misc]
        for name in SCHEMES
    },
    "all_gather_start": lambda x, mesh: sp.all_gather_start(x, comm=mesh["sp"]).wait(),
    "a norm": lambda x, mesh: sp.RMSNorm(4, comm=mesh["sp"])(x),
}


@pytest.mark.parametrize("name", sorted(DIFFERENTIABLE))
@spmd(2)
@meshed()
def test_ranks_that_go_backward_through_different_calls_are_told_so(
    mesh: sp.Mesh, name: str
) -> None:
    """Without the agreement each rank would get the gradient of the other call."""
    x = torch.ones(1, 2, 2, 4, requires_grad=True)
    first, second = (DIFFERENTIABLE[name](x, mesh) for _ in range(2))
    with pytest.raises(
        sp.CollectiveMismatch, match=r"rank 0: the backward of (?s:.*)rank 1.*: the backward of"
    ):
        (first if mesh.rank else second).sum().backward()
    # only rank 0 goes backward
    with pytest.raises(sp.CollectiveMismatch, match=r"the backward of (?s:.*)rank 1: all_reduce\("):
        sp.all_reduce(x.detach(), comm=mesh["sp"]) if mesh.rank else first.sum().backward()
    assert sp.all_reduce(torch.ones(1), comm=mesh["sp"]).item() == mesh.size


@pytest.mark.parametrize("graph", [False, True])
@spmd(1, 2)
@meshed()
def test_a_backward_without_messages_needs_no_other_rank(mesh: sp.Mesh, graph: bool) -> None:
    x = torch.ones(2, requires_grad=True)
    whole = sp.reduce_from_group(x, comm=mesh["sp"])
    parts = sp.gather_replicated(x, comm=mesh["sp"])
    if mesh.rank == 0:
        (grad,) = torch.autograd.grad(whole.sum() + parts.sum(), x, create_graph=graph)
        assert torch.equal(grad, torch.full((2,), 2.0))
    sp.all_reduce(x, comm=mesh["sp"]).sum().backward()  # the ranks still number alike


def test_a_failed_comparison_that_nobody_waits_for_is_no_error_of_another() -> None:
    """`Progress.keep` drops an agreement that has failed, raises nothing; `poll` tests open ones.

    Over gloo an agreement fails once other ranks have closed the connections of its mesh, and over
    MPI once the program has freed its communicator.
    """
    errors = sp.PeerFailed("Connection closed by peer"), RuntimeError("MPI_ERR_COMM")
    found, waits = Progress(), Mock(**{"test.return_value": False})
    found.keep([*(Mock(**{"test.side_effect": each}) for each in errors), Mock()])
    found.keep([waits])
    found.keep([])
    assert (found.kept, found.idle) == ([waits], False)
    waits.test.side_effect = [TimeoutError, True]
    with pytest.raises(TimeoutError):  # of a signal handler
        found.poll()
    assert found.kept == [waits]
    found.poll()
    assert (found.kept, found.idle) == ([], True)


@pytest.mark.parametrize(("lasts", "ends"), [(0.02, 0.02), (9.0, 0.05)])
def test_comparisons_are_completed_before_the_end_for_so_many_seconds(
    lasts: float, ends: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`Progress.settle` waits for open agreements, here for at most 0.05 s.

    Those still open then stay in memory, and so do transfers that an error has ended.
    """
    now, found = [0.0], Progress()

    def passes(seconds: float = 1e-6) -> float:
        now[0] += seconds
        return now[0]

    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=passes, sleep=passes))
    question = MagicMock(**{"test.side_effect": lambda: now[0] > lasts})
    found.keep([question])
    found.settle(0.05)
    assert found.kept == [question] * (lasts > ends)
    assert now[0] == pytest.approx(ends, abs=2e-3)
    assert question.test.call_count < 100  # it sleeps between tests
    # references: of `found`, of getrefcount's argument, and one that is never released
    assert (sys.getrefcount(found.kept), sys.getrefcount(found.lost)) == (3, 3)


@pytest.mark.parametrize("is_lost", [False, True])
def test_what_mpi_may_use_outlives_its_thread_and_is_settled_at_the_end(
    is_lost: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of a thread frees no agreement of which MPI has memory, nor an ended transfer."""
    monkeypatch.setattr(Progress, "held", None)
    monkeypatch.setattr(progress, "atexit", registry := Mock())
    progress.settle_at_exit(9.0)
    left: list[weakref.ref[Any]] = []

    def leave_something() -> None:
        held, mine = MagicMock(**{"test.side_effect": [False, True]}), progress.of_this_rank()
        mine.lose([held]) if is_lost else mine.keep([held])
        left.extend((weakref.ref(mine), weakref.ref(held)))

    for _ in range(3):
        thread = Thread(target=leave_something)
        thread.start()
        thread.join()
    gc.collect()
    assert [ref() is None for ref in left] == [False] * 6
    settle, *given = registry.register.call_args.args
    with monkeypatch.context() as patch:
        patch.setattr(Progress, "settle", settled := Mock())
        settle(*given)
    limits = [seconds for (seconds,), _ in settled.call_args_list]
    assert len(limits) == 3
    assert 9 >= limits[0] >= limits[-1] > 0
    settle(*given)
    gc.collect()
    assert [ref() is not None for ref in left] == [is_lost] * 6


@pytest.mark.parametrize("names", ["host mpi", "staged mpi", "pipelined mpi", "host window"])
@pytest.mark.parametrize("check", ["agree", "off"])
@spmd(2)
def test_a_call_of_inference_mode_ends_outside_of_it(comm: Any, names: str, check: Any) -> None:
    """Nothing else may write tensors of that mode; a poll or later call may come from anywhere."""
    x, (carrier, algorithm) = torch.ones(4), names.split()
    with sp.Mesh(comm, transport="window", check=check, sp=2) as mesh:
        group = mesh["sp"]
        group.transport = CARRIERS[carrier](group)
        with torch.inference_mode():
            begun = [
                sp.all_reduce_start(x, comm=group, algorithm="ring"),
                sp.all_reduce_start(2 * x, comm=group, op="max", algorithm=algorithm),
                sp.broadcast_start(2 * x, comm=group, algorithm=algorithm),
                sp.all_reduce_start(x, comm=group, algorithm=algorithm),
            ]
        comm.Barrier()  # now every rank has begun, and one has not yet received
        begun.append(sp.all_reduce_start(x, comm=group, algorithm=algorithm))
        assert [each.wait().sum().item() for each in begun] == [8.0] * 5


PLANNED: dict[str, dict[str, Any]] = {
    **{op: {} for op in ("all_reduce", "all_reduce_")},
    **{op: {"dim": 0} for op in ("all_gather", "reduce_scatter")},
    **{op: {"root": 1} for op in ("broadcast", "reduce")},
    "all_to_all": {"split_dim": 0, "concat_dim": 1},
    "shift": {"offset": 1, "dim": 0},
}


@pytest.mark.parametrize("transport", ["host", "window"])
@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("op", PLANNED)
@spmd(3)
@meshed()
def test_a_plan_runs_in_and_out_of_inference_mode(
    mesh: sp.Mesh, op: str, inside: bool, transport: str
) -> None:
    """Whether it was made in that mode or not."""
    base, more = op.removesuffix("_"), ({"op": "max"}, {"op": "min"}) if "all_reduce" in op else ()
    group = mesh["sp"]
    names = usable(group.nodes, base, window=group.window is not None)
    for number, (algorithm, further) in enumerate(product(names, ({}, *more))):
        given, dtype = PLANNED[op] | further, DTYPES[number % 2]
        inputs = [torch.arange(12).view(6, 2).to(dtype) + n for n in range(mesh.size)]
        wanted = DEFINITIONS[base](inputs, given)[mesh.rank]
        x = inputs[mesh.rank].clone()
        with torch.inference_mode(inside):
            plan = sp.plan(op, x, comm=group, algorithm=algorithm, **given)
        for mode, start in product((not inside, inside), (False, True)):
            x.copy_(inputs[mesh.rank])
            with torch.inference_mode(mode):
                found = plan.finish(plan.start()) if start else plan.run()
            assert torch.equal(found, wanted), (algorithm, dtype, further, mode, start)


class Held:
    """Stand in for an operation, a handle or a communicator: `test` waits until it may go on."""

    def __init__(self) -> None:
        self.entered, self.leave, self.count = Event(), Event(), 0

    def test(self) -> bool:
        self.count += 1
        self.entered.set()
        self.leave.wait(5)
        return True

    advance = test


def in_a_poll(held: Held) -> tuple[Callable[[], object], Callable[[], object]]:
    """Return two polls of one rank, of which the first one is held."""
    rank = Progress()
    rank.add(held)
    return rank.poll, rank.poll


def in_a_transfer(held: Held) -> tuple[Callable[[], object], Callable[[], object]]:
    """Return tests of two transfers in one queue, of which the first one is held."""
    host = SimpleNamespace(exchange=lambda *_: held)
    made = PipelinedTransport(cast("Any", host), DelayedStreams(), 2)
    first, second = (made.exchange([], []) for _ in range(2))
    return first.test, second.test


def in_a_window(held: Held) -> tuple[Callable[[], object], Callable[[], object]]:
    """Return two tests of one window, the first of which is held."""
    (window,) = run_threads(1, Window)
    window._under_way.append(held)
    return window.advance, window.advance


@pytest.mark.parametrize("place", [in_a_poll, in_a_transfer, in_a_window])
def test_no_thread_enters_or_waits_where_another_one_of_the_rank_polls(place: Any) -> None:
    held = Held()
    first, second = place(held)
    other = Thread(target=first)
    other.start()
    assert held.entered.wait(30)
    second()
    assert held.count == 1
    held.leave.set()
    other.join()


@spmd(1)
@meshed()
def test_a_wait_in_one_thread_and_a_poll_in_another_take_turns(mesh: sp.Mesh) -> None:
    held = Held()
    threads = [Thread(target=call) for call in (mesh["sp"].poll, mesh["sp"].track(held).test)]
    for thread in threads:
        thread.start()
        assert held.entered.wait(30)
    threads[1].join(0.05)
    assert held.count == 1
    held.leave.set()
    for thread in threads:
        thread.join()
    assert not mesh["sp"]._pending
