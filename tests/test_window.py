"""Test collectives in shared memory, tensors read in place, and machines without such memory."""

import errno
import math
import mmap
import os
import re
import threading
from collections.abc import Collection
from contextlib import suppress
from functools import partial
from itertools import accumulate, chain, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from hypothesis import example, given as plain_given, strategies as st
from kit.meshed import meshed
from oracle.proof import possible
from oracle.window_cases import OPS, Node, Problem, inputs_of, use_window

import sp_core as sp
from sp_core import measuring
from sp_core.collectives.execution import BoundWindow
from sp_core.programs import WIDE_BLOCK, Buffer, cost, operation, program_of
from sp_core.programs.window import SLOTS
from sp_core.testing import given, run_threads, spmd
from sp_core.testing.comm import LockstepComm
from sp_core.testing.outcome import RankFailure
from sp_core.transport import Window, shared

lengths = st.integers(0, 30) | st.integers(0, 2)
problems = st.builds(
    Problem,
    st.sampled_from(OPS),
    lengths,
    st.integers(0, 7),
    st.booleans(),
    st.booleans(),
    st.sampled_from([1, 1, 40]),
)


SUMS: dict[str, Any] = {
    "problems": [Problem("all_reduce", 5, 0, False, False, n) for n in (10, 10, 10, 1, 1, 1)],
    "size": 3,
    "slot": 15,
    "dtype": torch.float32,
}
"""With one slot fewer, a rank overwrites what others still read in about half of the orders."""


@example(**SUMS, seed=3)
@example(**SUMS, seed=4)
@example(**SUMS, seed=6)
@example(**SUMS, seed=9)
@example(**SUMS | {"problems": [Problem("reduce", 5, 1, False, False, 1)]}, seed=0)
@plain_given(
    problems=st.lists(problems, min_size=1, max_size=4),
    size=st.integers(1, 5),
    slot=st.integers(5, 40),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 999),
)
def test_no_order_of_the_ranks_changes_a_result(
    problems: list[Problem], size: int, slot: int, dtype: torch.dtype, seed: int
) -> None:
    """Sums are those in rank order, whichever rank is first to make a step."""
    inputs = [
        inputs_of(problem, size, slot, dtype, seed + turn) for turn, problem in enumerate(problems)
    ]
    results = Node(size, slot, dtype, seed).play(problems, inputs)
    for problem, given_, found in zip(problems, inputs, results, strict=True):
        tasks = [problem.task(rank, size, slot) for rank in range(size)]
        for rank, x in enumerate(found):
            assert torch.equal(x, problem.expected(tasks, given_, rank)), (problem, rank)


@spmd(2)
def test_a_step_waits_for_the_other_ranks(comm: Any) -> None:
    """A step begins when the other ranks have made all steps before it.

    An operation's first step begins when they have made all but one of these.
    """
    for lengths in product((1, 2, 3), repeat=3):
        window = Window(comm)
        window._announce = lambda what: None  # else the kit raises: rank 1 begins nothing
        firsts = {0, *accumulate(lengths)}
        for length in lengths if comm.rank == 0 else ():
            window.start([[]] * length, "steps")
        for made in range(sum(lengths)):
            if comm.rank:
                window._mine[0] = made
            comm.Barrier()
            if comm.rank == 0:
                window.advance()
                may = (t for t in range(sum(lengths)) if made < t - (t in firsts))
                assert window.made == next(may, sum(lengths)), (lengths, made)
            comm.Barrier()
        window.close(together=True)


@spmd(2, 3)
def test_a_slot_has_8_bytes_for_each_rank_or_more(comm: Any) -> None:
    least = 8 * comm.size
    for asked, given_ in ((1, least), (least + 15, least + 8), (None, 1 << 19)):
        window = Window(comm, asked)
        assert window.slot_bytes == given_
    if comm.rank == 0:
        window.close(together=False)  # waits for nobody


@pytest.mark.explore
@given(
    max_examples=25,
    problem=problems,
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    slot_bytes=st.sampled_from([40, 200]),
    on_device=st.booleans(),
    seed=st.integers(0, 99),
)
@meshed()
def test_what_is_read_and_used_is_what_the_program_says(
    mesh: sp.Mesh, problem: Problem, dtype: torch.dtype, slot_bytes: int, on_device: bool, seed: int
) -> None:
    """Bits, messages, bytes and scratch are right in three runs. Some inputs are read in place."""
    size, rank = mesh.size, mesh.rank
    group = mesh["sp"]
    use_window(group, slot_bytes, on_device=on_device)
    assert group.window is not None
    slot = group.window.slot_bytes // dtype.itemsize
    tasks = [problem.task(other, size, slot) for other in range(size)]
    task, inputs = tasks[rank], inputs_of(problem, size, slot, dtype, seed)
    x = (
        sp.shared_empty(inputs[rank].shape, dtype=dtype, comm=group)
        if task.resident
        else inputs[rank].clone()
    )
    recv = x if task.in_place else torch.empty(sum(task.recv), dtype=dtype)
    bound = BoundWindow(group, task._replace(itemsize=dtype.itemsize), x, recv, group.scratch)
    for _ in range(3):
        x.copy_(inputs[rank])
        sp.fence(comm=group)
        now = task._replace(itemsize=dtype.itemsize, first=group.window.begun % SLOTS)
        figures = cost(program_of(now, "window"), dtype)
        group.counters.reset()
        group.wait(bound.start(), problem.op)
        found = group.counters[problem.op]
        assert torch.equal(recv, problem.expected(tasks, inputs, rank))
        assert (found.calls, found.messages, found.bytes_sent) == (
            1,
            figures["messages"],
            figures["bytes_sent"],
        )
        assert found.scratch == figures["scratch"]
        assert found.scratch <= SLOTS * group.window.slot_bytes + 8 * WIDE_BLOCK


@spmd(3)
@meshed(transport="window")
def test_a_plan_in_a_window_takes_scratch_once_and_only_for_half_types(mesh: sp.Mesh) -> None:
    """Scratch has two numbers of 4 bytes for each element that is added up in float32."""
    for dtype, taken in ((torch.bfloat16, 40), (torch.float32, 0)):
        plan = sp.plan(
            "all_reduce", torch.ones(5, dtype=dtype), comm=mesh["sp"], algorithm="window"
        )
        plan._bound._scratch = scratch = Mock(wraps=mesh["sp"].scratch)
        for _ in range(SLOTS):
            plan.run()
        assert sum(call.args[0] for call in scratch.take.call_args_list) == taken


def provided(part: torch.Tensor) -> int:
    """Return the bytes of a window's pages that the system has provided, used by any rank."""
    lines = (line.split() for line in Path("/proc/self/maps").read_text().splitlines())
    inode = next(int(at[4]) for at in lines if at[0].startswith(f"{part.data_ptr():x}-"))
    for each in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # another rank, a thread, has closed it
            if (found := each.stat()).st_ino == inode:
                return 512 * found.st_blocks
    raise AssertionError("no descriptor of this memory")


@spmd(4)
@meshed(transport="window")
def test_memory_of_a_window_grows_with_what_passes_through_it(mesh: sp.Mesh) -> None:
    """Each slot takes the pages of the longest vector so far, at most its length, and one page."""
    page, most = mmap.PAGESIZE, 0
    group = mesh["sp"]
    assert group.window is not None
    slots = group.window.slots[mesh.rank]
    assert provided(slots) <= page
    for count, op in product((4, 1 << 13, 1 << 18), OPS):
        x, how = torch.ones(4, count // 4), measuring.arguments(op)
        for _ in range(SLOTS):
            getattr(sp, op)(x, comm=group, algorithm="window", **how)
        most = min(max(most, x.nbytes), group.window.slot_bytes)
        assert provided(slots) <= page + SLOTS * (-(-most // page) + 1) * page, (op, count)
    assert provided(slots) >= SLOTS * group.window.slot_bytes


STEPS: list[tuple[int, Collection[str], tuple[int, ...], int, dict[str, bool]]] = [
    *((2, OPS, (count,) * 3, 12, {}) for count in (0, 1, 4)),
    (4, ["all_gather", "broadcast", "reduce", "shift"], (33, 0, 0), 12, {}),
    (4, ["all_to_all", "reduce_scatter"], (9, 1, 1), 12, {}),
    *((3, {*OPS} - {"all_to_all"}, (count, 5, 0), 12, {"resident": True}) for count in (0, 33)),
    (2, ["all_reduce"], (4096, 0, 0), 4096, {}),
    (3, ["all_reduce"], (4097, 0, 0), 4097, {}),
    (4, ["all_reduce"], (8, 0, 0), 7, {}),
    (3, ["all_reduce"], (4096, 0, 0), 7, {"resident": True}),
    (4, ["all_reduce"], (4097, 0, 0), 4097, {"resident": True}),
    (3, ["all_reduce"], (4097, 4097), 7, {"resident": True}),
    (4, ["all_reduce"], (8, 0, 0), 8, {"resident": True, "in_place": True}),
    (5, ["all_reduce"], (8, 0, 0), 7, {"resident": True, "in_place": True}),
    (4, ["all_reduce"], (1 << 18, 0), 7, {"resident": True, "in_place": True}),
    (5, ["all_reduce"], (1 << 18, 1), 7, {"resident": True, "in_place": True}),
    (4, ["all_reduce"], (1 << 18, 1), 1 << 19, {"resident": True, "in_place": True}),
]
"""Number of steps, counted by hand; operations on float32; elements of each rank's piece, and of a
slot; options. Up to 32 KiB are read in one shot; two ranks that sum in place read 1 MiB at once."""


@pytest.mark.parametrize(("steps", "ops", "counts", "slot", "how"), STEPS)
def test_ranks_wait_for_each_other_no_more_often_than_needed(
    steps: int, ops: Collection[str], counts: tuple[int, ...], slot: int, how: dict[str, bool]
) -> None:
    """No rank adds up in the memory of another rank."""
    for op, rank in product(ops, range(len(counts))):
        task = operation(op, rank, len(counts), counts, 1, itemsize=4, slot=slot, **how)
        made = program_of(task, "window")
        assert len(made.steps) == steps, (op, rank)
        written = [0]
        for combine in chain(*(step.then for step in made.steps)):
            possible(combine, op, task.in_place)
            assert rank not in [part.rank for part in combine.parts], "its own memory is `OWN`"
            written.append(len(combine.into) * (combine.into.buffer is Buffer.TMP))
        assert max(written) <= made.scratch <= (steps - 1) * min(slot, len(counts) * task.longest)


@spmd()
def test_tensors_of_the_others_outlive_the_communicator_and_others_are_refused(comm: Any) -> None:
    with (
        sp.Mesh(comm, transport="window", sp=comm.size) as mesh,
        sp.Mesh(comm, transport="host", sp=comm.size) as other,
    ):
        group, freed = mesh["sp"], other[()]
        empty = partial(sp.shared_empty, comm=group)
        freed.free()
        x = empty((2, 2)).fill_(comm.rank)
        assert sp.peer(x, comm.rank, comm=group) is x
        assert group.window is not None
        assert group.window.number(x.view(-1)[1:]) == -1
        moved = empty((2,)).share_memory_().fill_(comm.rank)
        total = sp.plan("all_reduce", moved, comm=group, algorithm="window").run()
        assert total.tolist() == [sum(range(comm.size))] * 2
        wrong: Any = (moved, x[1:], x[:1], x.t(), x.view(torch.int32), x.to_sparse(), torch.ones(2))
        for kind, text, call in (
            *(
                (sp.RankError, r"\(it has shared memory\)", partial(sp.peer, part, 0, comm=group))
                for part in wrong
            ),
            (sp.RankError, "='host'", partial(sp.peer, x, 0, comm=other["sp"])),
            *((sp.RankError, f"rank {n} ", partial(sp.peer, x, n, comm=group)) for n in (99, -1)),
            (TypeError, "Pass what shared_empty gave", partial(sp.peer, 3, 0, comm=group)),  # type: ignore[arg-type]
            (sp.RankError, "has been freed", partial(sp.peer, x, 0, comm=freed)),
            (sp.DtypeError, "rank 0: .*use x.view", partial(empty, (1,), dtype=torch.complex64)),
            (sp.ShapeError, "rank 0: .*pass lengths >= 0", partial(empty, (-1,))),
        ):
            with pytest.raises(kind, match=text):
                call()
        assert empty((0, 2)).shape == (0, 2)
    assert x[0, 0].item() == comm.rank


@spmd(2)
def test_ranks_that_do_not_do_the_same_in_a_window_are_told(comm: Any) -> None:
    """With check="off" no agreement is made. The testing kit finds the different lengths."""
    with sp.Mesh(comm, transport="window", check="off", sp=comm.size) as mesh:
        group, x = mesh["sp"], torch.ones(5 + comm.rank)
        if isinstance(comm, LockstepComm):
            with pytest.raises(sp.CollectiveMismatch, match="in a window"):
                sp.all_reduce(x, comm=group, algorithm="window")


@pytest.mark.parametrize(
    ("check", "algorithm", "length"), [("agree", "auto", 5), ("off", "window", 4096)]
)
@pytest.mark.usefixtures("short_slots")
def test_a_rank_that_leaves_ends_the_waits_of_others(
    check: Any, algorithm: Any, length: int
) -> None:
    """Starting does not wait. A rank that waits later gets the error of the rank that left.

    That rank may have begun to write its vector, which is longer than a slot.
    """

    @meshed(transport="window", check=check)
    def body(mesh: sp.Mesh) -> None:
        x = torch.ones(length)
        under_way = sp.all_reduce_start(x, comm=mesh["sp"], algorithm=algorithm)
        if mesh.rank == 1:
            raise LookupError("lost")
        under_way.wait()

    with pytest.raises(RankFailure, match=r"rank 1: failed: LookupError at .*: lost") as caught:
        run_threads(3, body, timeout=20)
    assert {*re.findall(r"  rank (\d): \w+: PeerFailed", str(caught.value))} == {"0", "2"}


class Without:
    """Stand in for `os` or the C library. On one rank or on all, a call fails, or is `instead`."""

    def __init__(self, name: str, rank: int | None = None, instead: Any = None) -> None:
        self._lacking, self._rank, self._instead = name, rank, instead

    def __getattr__(self, name: str) -> Any:
        elsewhere = (
            self._rank is not None and threading.current_thread().name != f"rank {self._rank}"
        )
        if name != self._lacking or elsewhere:
            return getattr(os, name)
        if self._instead:
            return self._instead
        if name == "memfd_create":
            raise AttributeError(name)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@spmd(2)
def test_pythons_of_conda_and_uv_share_memory(comm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """They lack `os.memfd_create`."""
    monkeypatch.delattr(os, "memfd_create", raising=False)
    with sp.Mesh(comm, transport="window", sp=comm.size) as mesh:
        assert mesh["sp"].window is not None


def misread(file: int, nbytes: int) -> torch.Tensor:
    """Map the file, but on rank 1 return different memory."""
    if threading.current_thread().name == "rank 1":
        return torch.ones(nbytes, dtype=torch.uint8)
    return MAPPED(file, nbytes)


MAPPED = shared._mapped
WITHOUT: dict[str, Any] = {
    "rank [02] finds something else in the memory of rank 1": ("_mapped", misread),
    "on 2 machines": ("node_number", lambda: int(threading.current_thread().name == "rank 1")),
    "on 2 machines, or in containers": ("os", Without("readlink", rank=1)),
    "rank 1 cannot map .* No space left": ("os", Without("open", rank=1)),
    "rank 1 cannot map .* greater than file size": (
        "os",
        Without("open", 1, lambda *_: os.open("/proc/version", os.O_RDONLY)),
    ),
    "a processor of type aarch64": ("platform", SimpleNamespace(machine=lambda: "aarch64")),
    "rank 0 cannot allocate .* memfd_create": ("_LIBC", Without("memfd_create")),
    "rank 2 cannot allocate .* No space left": ("os", Without("posix_fallocate", rank=2)),
}


@pytest.mark.mpi_skip
@pytest.mark.parametrize("reason", sorted(WITHOUT))
@spmd(3)
def test_without_common_memory_the_others_carry_on_and_the_reason_is_known(
    comm: Any, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If one rank cannot share memory, all ranks use messages.

    To ask for the window is then an error on all ranks, before anything is sent.
    """
    monkeypatch.setattr(shared, *WITHOUT[reason])
    with sp.Mesh(comm, transport="window", sp=comm.size) as mesh:
        group = mesh["sp"]
        assert group.window is None
        assert re.search(reason, group.no_window)
        assert sp.all_reduce(torch.ones(3), comm=group).tolist() == [comm.size] * 3
        with pytest.raises(ValueError, match=reason):
            sp.all_reduce(torch.ones(3), comm=group, algorithm="window")
        x = sp.shared_empty((2,), comm=group)
        sp.fence(comm=group)
        with pytest.raises(sp.RankError, match=reason):
            sp.peer(x, 0, comm=group)


@pytest.mark.parametrize("shape", [(10**14,), (10**30,), (2**70, 0), (2**62, 4), (0, 2**62, 2**62)])
@pytest.mark.parametrize("transport", ["host", "window"])
@spmd(1, 3)
@meshed()
def test_no_memory_for_a_shared_tensor_is_an_error_on_all_ranks(
    mesh: sp.Mesh, transport: str, shape: tuple[int, ...]
) -> None:
    """The shape may be too much for one rank only, or have no number of bytes in int64."""
    for is_asked in (True, mesh.rank == 0):
        with pytest.raises(sp.RankError, match="rank 0 cannot allocate") as caught:
            sp.shared_empty(shape if is_asked else (3,), comm=mesh["sp"])
        assert f"{4 * math.prod(shape):,} bytes" in str(caught.value)
    assert sp.shared_empty((3,), comm=mesh["sp"]).tolist() == [0, 0, 0]
