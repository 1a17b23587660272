"""Test the choice of algorithms, runs of plans, and the memory of plans."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import MagicMock, Mock

import numpy as np
import pytest
import torch
from kit.meshed import meshed
from oracle.fake_device import DelayedMemory
from oracle.schedule_cases import NAMES, schedule
from torch.multiprocessing.reductions import StorageWeakRef

import sp_core as sp
from sp_core import measuring
from sp_core.collectives import maps
from sp_core.collectives.execution import BoundProgram, Running
from sp_core.programs import ALGORITHMS, SCHEDULED, SLOTS, WIDE_BLOCK, operation
from sp_core.scratch import Scratch
from sp_core.testing import run_threads, spmd
from sp_core.transport import Window, base
from sp_core.transport.host import HostTransport
from sp_core.tuning import Curve, Tuning


def test_a_run_on_a_device_stays_on_its_stream_and_its_user_waits_for_that(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its steps use the stream that was current at the start, though ranks poll on another one."""
    here = threading.local()

    @contextmanager
    def on_stream(stream: Any) -> Iterator[None]:
        before, here.stream = here.stream, stream
        yield
        here.stream = before

    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: here.stream)
    monkeypatch.setattr(base, "on_stream", on_stream)

    @meshed()
    def body(mesh: sp.Mesh) -> None:
        first, other = Mock(), Mock()
        here.stream = first
        plan = sp.plan("all_reduce", torch.ones(40), comm=mesh["sp"], algorithm="ring")
        bound, seen = plan._bound, list[Any]()
        assert isinstance(bound, BoundProgram)
        bound.device = torch.device("cuda", 0)
        bound.steps = [
            (sends, recvs, (lambda: seen.append(here.stream), *work), rewritten)
            for sends, recvs, work, rewritten in bound.steps
        ]
        running = bound.start()
        here.stream = other
        mesh["sp"].wait(running, "all_reduce")
        assert seen == [first] * len(bound.steps)
        first.record_event.assert_called_once_with()
        other.wait_event.assert_called_once_with(first.record_event())
        assert torch.equal(plan.run(), torch.full((40,), 2.0))

    run_threads(2, body)


@pytest.mark.parametrize(
    ("op", "algorithm", "in_place"),
    [(*name, False) for name in NAMES] + [(*name, True) for name in NAMES if "all_reduce" in name],
)
def test_a_rank_goes_on_before_its_sends_are_complete(
    op: str, algorithm: str, *, in_place: bool
) -> None:
    """Sends never complete here. A rank stops before a step that overwrites what they read."""
    comm, (x, other) = MagicMock(), torch.zeros(2, 16, dtype=torch.int64)
    recv = x if in_place else other
    comm.transport.bind, comm.transport.post = list, lambda *sent: Mock(test=lambda: not sent[0])
    for rank, made in enumerate(schedule(op, algorithm, (2,) * 4, segment=1).programs):
        task, scratch = operation(op, rank, 4, (2,) * 4), Scratch(torch.device("cpu"))
        running = BoundProgram(comm, task, x, recv, scratch, made).begin()
        assert isinstance(running, Running)
        told = [
            [(peer, len(x)) for peer, x in each] for each in comm.transport.announce.call_args[0]
        ]
        assert told == [
            [(each.peer, len(each.region)) for step in made.steps for each in getattr(step, kind)]
            for kind in ("sends", "receives")
        ]
        assert running._posted > 0
        running.test()  # adds what has arrived, and begins later steps
        firsts = made.rewritten_in_place if in_place else made.rewritten
        waits = [(firsts[n], n + 1) for n, step in enumerate(made.steps) if step.sends]
        assert running._posted == min(map(max, waits), default=len(made.steps))
        assert bool(running._under_way) == any(first < n <= running._posted for first, n in waits)


@pytest.mark.parametrize("op", ["all_gather", "reduce_scatter", "all_reduce", "shift"])
@pytest.mark.parametrize("lacking", [0, 1])
@spmd(2, 4)
@meshed(transport="window", tuning="off")
def test_auto_reads_in_place_what_lives_in_shared_memory_and_is_not_small(
    mesh: sp.Mesh, op: str, lacking: int
) -> None:
    """Vectors of 16 KiB or more are read in place, if every rank's tensor is in shared memory."""
    group, count = mesh["sp"], (1 << 12) // (mesh.size if op == "all_gather" else 1) - lacking
    values = torch.arange(float(count)) + mesh.rank
    shared = sp.shared_empty((count,), comm=group).copy_(values)
    mixed = shared if mesh.rank == 0 else values
    plans = [sp.plan(op, x, comm=group) for x in (shared, values, mixed)]
    assert [made.algorithm for made in plans] == [
        "mpi" if lacking else "window",
        "mpi",
        "mpi",
    ]
    usual, *others = [made.run().clone() for made in plans]
    assert all(torch.equal(usual, other) for other in others)
    if op in ("reduce_scatter", "all_reduce"):
        assert sp.plan(op, values, comm=group, deterministic=True).algorithm == "window"
    assert sp.plan(op, shared.view(torch.int32), comm=group).algorithm == "mpi"
    room = sp.shared_empty((2 * count,), comm=group)
    for start, algorithm in ((count, plans[0].algorithm), (mesh.rank, "mpi")):
        part = room[start : start + count].copy_(values)  # at one place or at several
        made = sp.plan(op, part, comm=group)
        assert made.algorithm == algorithm
        assert torch.equal(made.run(), usual)


@pytest.mark.parametrize("transport", ["host", "window"])
@spmd(2, 3)
def test_what_was_not_measured_is_left_to_the_library(comm: Any, transport: str) -> None:
    """A window can move ordinary tensors five times slower. A shift is never measured."""
    curve = Curve(((1, 1e-6),))
    known = Tuning({}, (0,), {"node": curve}, curve, curve, times={"all_reduce": {"window": curve}})
    for tuning in ("off", known):
        with sp.Mesh(comm, transport=transport, tuning=tuning, sp=comm.size) as mesh:
            group = mesh["sp"]
            assert (group.window is not None) == (transport == "window")
            for op in SCHEDULED if tuning == "off" else ("shift",):
                for nbytes in (0, 1 << 10, 1 << 16, 1 << 20):
                    x, how = measuring.vector(op, nbytes, group), measuring.arguments(op)
                    made = sp.plan(op, x, comm=group, **how)
                    assert made.algorithm == "mpi", (op, nbytes)
                    assert made._prepared.refresh is maps.nothing, "it is read where it is"


@spmd(2, 3)
@meshed()
def test_a_sum_in_place_does_not_mind_the_stride_of_a_dim_of_one(mesh: sp.Mesh) -> None:
    for strides in ((3, 0, 1), (3, 3, 1), (3, 7, 1)):
        x = torch.ones(6).as_strided((2, 1, 3), strides)
        assert sp.all_reduce_(x, comm=mesh["sp"]) is x
        assert torch.equal(x, torch.full((2, 1, 3), float(mesh.size)))


@pytest.mark.parametrize("op", sorted({*ALGORITHMS, "all_reduce_"} - {"all_to_all"}))
def test_every_rank_chooses_by_the_bytes_of_the_whole_vector(
    op: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This includes a rank that sends or receives no bytes."""
    seen: list[set[int]] = [set() for _ in range(3)]
    real = maps.Map.choose_algorithm

    def chosen(mapping: maps.Map, nbytes: int) -> str:
        seen[mapping.comm.rank].add(nbytes)
        return real(mapping, nbytes)

    @meshed()
    def body(mesh: sp.Mesh) -> None:
        getattr(sp, op)(torch.ones(6, 3), comm=mesh["sp"])

    monkeypatch.setattr(maps.Map, "choose_algorithm", chosen)
    run_threads(3, body)
    assert seen == [{72 * (3 if op == "all_gather" else 1)}] * 3


@spmd(2)
@meshed()
def test_scratch_of_a_started_collective_is_free_again_after_its_end(mesh: sp.Mesh) -> None:
    for _ in range(2):
        begun = sp.all_reduce_start(torch.ones(64), comm=mesh["sp"], algorithm="ring")
        assert not mesh["sp"].scratch._free
        assert begun.wait()[0].item() == 2.0
        assert len(mesh["sp"].scratch._free) == 1


@spmd(4)
@meshed(algorithm={"reduce_scatter": "pairwise"})
def test_the_gradient_goes_by_an_algorithm_of_that_name_or_by_the_default(mesh: sp.Mesh) -> None:
    """The scratch shows which one ran: two pieces for the ring, P - 1 pieces for pairwise.

    An all-to-all has no scratch, but pairwise P - 1 messages, and the library none.
    """
    x = torch.ones(3, requires_grad=True)
    for algorithm, pieces in (("ring", 2), ("bruck", 3), ("ring", 3)):  # the most of any call
        sp.all_gather(x, comm=mesh["sp"], algorithm=algorithm).sum().backward()
        assert mesh["sp"].counters["reduce_scatter"].scratch == pieces * x.nbytes
    x = torch.ones(4, 1, requires_grad=True)
    how: Any = {"split_dim": 0, "concat_dim": 1, "algorithm": "pairwise"}
    sp.all_to_all(x, comm=mesh["sp"], **how).sum().backward()
    assert mesh["sp"].counters["all_to_all"].messages == 2 * 3
    for algorithm in ("ring", "pairwise"):
        mesh["sp"].counters.reset()
        total = sp.all_reduce(x, comm=mesh["sp"], algorithm=algorithm)
        forward = mesh["sp"].counters["all_reduce"].messages
        total.sum().backward()
        assert mesh["sp"].counters["all_reduce"].messages == 2 * forward > 0


@pytest.mark.parametrize("algorithm", ["pairwise", "window"])
@spmd(3)
@meshed(transport="window")
def test_a_part_of_a_half_type_may_be_longer_than_a_block(mesh: sp.Mesh, algorithm: str) -> None:
    """Such types are added in blocks, in scratch memory for one of them."""
    x = torch.arange(3 * (WIDE_BLOCK + 1)).remainder(100).bfloat16()
    assert torch.equal(sp.all_reduce(x, comm=mesh["sp"], algorithm=algorithm), 3 * x)


@spmd(1)
@meshed()
def test_tags_never_run_out(mesh: sp.Mesh) -> None:
    """MPI 4.1, section 9.1.2, guarantees tags 0 to 32767.

    Tag 0 is for messages that all ranks post in the same order, 32767 says that a rank has left.
    """
    tags = [mesh["sp"].next_tag() for _ in range(70_000)]
    assert (min(tags), max(tags)) == (1, 32766)
    assert all(len(set(tags[start : start + 1000])) == 1000 for start in range(0, len(tags), 1000))


@pytest.mark.parametrize(("most", "calls"), [(1 << 12, (1, 0)), ((1 << 12) - 1, (0, 2))])
def test_a_vector_is_moved_by_one_call_that_does_not_block(
    most: int, calls: tuple[int, int]
) -> None:
    """Several calls are made only if the vector has more elements than one call can count."""
    comm, x = Mock(rank=0, size=3), torch.ones(1 << 12)
    task = operation("all_reduce", 0, 3, (len(x),), itemsize=4)
    HostTransport(comm, max_count=most).start(task, x, torch.empty_like(x))
    assert (comm.Iallreduce.call_count, comm.Allreduce.call_count) == calls


@pytest.mark.parametrize("op", ["all_gather", "reduce_scatter", "all_to_all"])
def test_a_call_counts_all_pieces_of_a_vector(op: str) -> None:
    """A piece may be short, but where the last one begins is a number that MPI must count, too."""
    comm, task = Mock(), operation(op, 0, 3, (3, 3, 3))
    memory = torch.ones(sum(task.send)), torch.ones(sum(task.recv))
    HostTransport(comm, max_count=4).prepare(task, *memory)()
    given = [x if isinstance(x, list) else [x] for call in comm.method_calls for x in call.args]
    assert max(np.size(x) for each in given for x in each) <= 4


@pytest.mark.parametrize("transport", ["host", "window"])
@spmd(1, 2)
@meshed()
def test_torch_notices_that_a_run_overwrites_a_saved_tensor(mesh: sp.Mesh, transport: str) -> None:
    weight, group = torch.ones(3, requires_grad=True), mesh["sp"]
    for op, algorithm in (("all_reduce", "auto"), ("all_reduce_", "auto"), NAMES[0]):
        plan = sp.plan(op, torch.ones(3), comm=group, algorithm=algorithm)
        for begin, finish in ((plan.run, lambda _: None), (plan.start, plan.finish)):
            saved = weight * plan.run().view(-1)[:3]
            under_way: Any = begin()
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                saved.sum().backward()
            finish(under_way)
    x = torch.ones(3)
    saved = weight * x
    sp.all_reduce_(x, comm=group)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        saved.sum().backward()


@pytest.mark.parametrize("check", ["agree", "off"])
@spmd(1, 2)
@meshed()
def test_a_plan_has_one_run_at_a_time(mesh: sp.Mesh, check: Any) -> None:
    plan = sp.plan("all_reduce", torch.ones(3), comm=mesh["sp"])
    handle = plan.start()
    for begin in (plan.start, plan.run):
        with pytest.raises(sp.RankError, match=r"is under way\. Call finish"):
            begin()
    for wrong in (None, sp.plan("all_reduce", torch.ones(3), comm=mesh["sp"]).start()):
        with pytest.raises(ValueError, match="Pass the handle"):
            plan.finish(wrong)  # type: ignore[arg-type]
    for _ in range(2):
        assert torch.equal(plan.finish(handle), torch.full((3,), float(mesh.size)))
        with pytest.raises(ValueError, match="Pass the handle"):
            plan.finish(handle)
        handle = plan.start()
    plan.finish(handle)
    for name in ("run", "start"):
        plan = sp.plan("all_reduce", torch.ones(3), comm=mesh["sp"])
        vars(plan._bound)[name] = Mock(side_effect=KeyError)
        for error in (KeyError, sp.RankError):  # the second run finds the first one unfinished
            with pytest.raises(error):
                getattr(plan, name)()


class ByAddress(DelayedMemory):
    """Make copies that keep no tensor alive, as those of a device. They move nothing."""

    def copying(self, into: torch.Tensor, part: torch.Tensor) -> Callable[[], object]:
        return lambda: None


@pytest.mark.parametrize("way", ["ring", "window"])
@spmd(2)
@meshed()
def test_the_memory_of_a_started_run_outlives_its_plan(mesh: sp.Mesh, way: str) -> None:
    """A program may lose a plan by an error. Copies that are under way still write its result."""
    group = mesh["sp"]
    group.window = Window(group._comm, 256, DelayedMemory())
    group.window.memory = ByAddress()
    plan = sp.plan("all_gather", torch.ones(3), comm=group, algorithm=way)
    memory, handle = StorageWeakRef(plan._prepared.out.untyped_storage()), plan.start()
    del plan
    assert not memory.expired()
    group.wait(handle, "all_gather")


CHANGES: dict[str, Callable[[torch.Tensor], object]] = {
    "data": lambda x: setattr(x, "data", torch.full((4, 4), 5.0)),
    "set_": lambda x: x.set_(torch.ones(16).untyped_storage(), 0, (4, 4), (4, 1)),
    "resize_": lambda x: x.resize_(8, 4),
    "freed storage": lambda x: x.untyped_storage().resize_(0),
    "shape": lambda x: setattr(x, "data", x[:2]),
    "transpose_": lambda x: x.transpose_(0, 1),
    "dtype": lambda x: setattr(x, "data", x.view(torch.int32)),
}
"""By description, a change of a tensor (4, 4) of ones that leaves a plan with other memory."""


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("check", ["agree", "off"])
@pytest.mark.parametrize("op", ["all_reduce", "all_reduce_", "all_gather"])
@spmd(1, 2)
@meshed()
def test_a_plan_refuses_an_input_that_got_other_memory(
    mesh: sp.Mesh, op: str, check: Any, change: str
) -> None:
    """With check="agree" every rank refuses, also if the input changed on one rank only."""
    for strided in (False, True):
        x = torch.ones(4, 8)[:, ::2] if strided and change != "resize_" else torch.ones(4, 4)
        plan = sp.plan(op, x, comm=mesh["sp"])
        before = mesh["sp"].counters[op.removesuffix("_")].bytes_sent
        if mesh.rank == 0 or check == "off":
            CHANGES[change](x)
        for begin in (plan.run, plan.start):
            with pytest.raises(sp.RankError, match=r"of the plan of all_.* Make a new plan on"):
                begin()
        assert mesh["sp"].counters[op.removesuffix("_")].bytes_sent == before


@pytest.mark.parametrize("transport", ["host", "window"])
@spmd(1, 2)
@meshed()
def test_a_plan_takes_new_values_in_the_memory_that_its_input_has(
    mesh: sp.Mesh, transport: str
) -> None:
    """This includes no elements, shared memory, and a gradient that the input requires later."""
    group = mesh["sp"]
    for x in (torch.ones(0, 3), torch.ones(3), sp.shared_empty((1 << 12,), comm=group)):
        plan = sp.plan("all_reduce", x, comm=group)
        x.fill_(2).requires_grad_()
        assert torch.equal(plan.run(), torch.full(x.shape, 2.0 * mesh.size))
        x.data = x.data
        assert torch.equal(plan.run(), torch.full(x.shape, 2.0 * mesh.size))


@spmd(3)
@meshed(transport="window")
def test_a_plan_whose_first_runs_were_in_inference_mode_runs_outside_of_it(mesh: sp.Mesh) -> None:
    """Sums are made in float32 scratch memory. Torch forbids later writes to inference tensors."""
    x = torch.ones(5, dtype=torch.bfloat16)
    plan = sp.plan("all_reduce", x, comm=mesh["sp"], algorithm="window")
    for mode in (True, False):
        with torch.inference_mode(mode):
            assert [plan.run().tolist() for _ in range(SLOTS)] == [[3.0] * 5] * SLOTS
