"""Test that public calls leave memory, mappings, descriptors, threads and caches as they were."""

import gc
import inspect
import itertools
import mmap
import os
import threading
from collections.abc import Callable
from functools import partial
from types import CodeType, FrameType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from domains import attention, collectives, meshes as made, plans, situations
from domains.declared import Subject
from domains.public import code_of, everything
from domains.subjects import SUBJECTS
from oracle.collective_cases import NEEDED
from resources.calls import Meshes, turns_of, use, use_others
from resources.held import COMMUNICATORS, MEMORY, caches, counts, left_behind, outside

import sp_core as sp
from sp_core.collectives import maps
from sp_core.communicator import MAX_TAG
from sp_core.observer import LEFT_TAG
from sp_core.programs import ALGORITHMS, SCHEDULED
from sp_core.testing import run_threads, spmd, tier
from sp_core.transport import NAMES

ROUNDS = 12  # memory use settles only after some rounds


pytestmark = pytest.mark.usefixtures("short_slots")


@pytest.fixture(autouse=True)
def few_objects() -> None:
    """Freeze the objects that exist before a test, so that they are not counted again each time."""
    torch.ones(1, requires_grad=True).backward(torch.ones(1))  # the first time, torch imports sympy
    gc.collect()
    gc.freeze()


BY_RANKS: dict[int, list[Subject]] = {2: [], 4: []}
"""Subjects by the number of ranks of their base row. Those for one rank are called on two."""

for _subject in SUBJECTS:
    BY_RANKS[max(2, _subject.ranks(_subject.draw(_subject.base, 1)))].append(_subject)

ON_MPI = [
    subject for family in (attention, collectives, plans, made) for subject in family.SUBJECTS
]
"""Subjects that hold memory and objects of MPI themselves. They run under mpiexec. All others are
built of them, and run on threads."""


def sized(size: int, parts: int) -> pytest.MarkDecorator:
    """Parametrize by this tier's subjects for `size` ranks, dealt into at most `parts` lists."""
    mine = [subject for subject in BY_RANKS[size] if (subject in ON_MPI) == (tier() == "mpi")]
    chosen = [mine[part::parts] for part in range(min(parts, len(mine)))]
    return pytest.mark.parametrize("subjects", chosen, ids=lambda x: x[0].name)


def used_once(subjects: list[Subject], comm: Any) -> None:
    for number, subject in enumerate(subjects):
        use(subject, comm, number)
    with sp.Mesh(comm, transport="window", sp=comm.size) as mesh:
        use_others(mesh["sp"], 4)
        group = mesh["sp"]
        with pytest.raises(sp.RankError, match="init_process_group"):  # works in test_torchrun.py
            mesh.to_device_mesh()
    group.abandon(KeyError("lost"))  # the mesh has been freed
    lost = sp.Mesh(comm, sp=comm.size)["sp"]
    lost.agree_on(str)
    lost.abandon(KeyError("lost"))


@pytest.fixture
def meshes(monkeypatch: pytest.MonkeyPatch) -> Meshes:
    """Let subjects be called on meshes that stay open. Return these meshes."""
    found = Meshes()
    monkeypatch.setattr(situations, "opened", found.opened)
    return found


def check_nothing_is_left(comm: Any, subjects: list[Subject], meshes: Meshes) -> None:
    """Check that nothing that a process holds (memory, objects, descriptors) grows in every round.

    A round calls all subjects. Its tensors have new sizes, so that a cache by sizes would grow.
    """
    rounds = itertools.count()

    def once_more() -> None:
        number = next(rounds)
        for subject in subjects:
            turns = turns_of(subject)
            for turn in range(turns):
                use(subject, comm, turns * number + turn)
        with meshes.opened(comm, {"(transport)": "window"}, {"sp": comm.size}) as mesh:
            use_others(mesh["sp"], number + 4)

    once_more()
    grown = left_behind(comm, once_more, ROUNDS)
    meshes.free(comm)
    assert grown == [], [subject.name for subject in subjects]


@sized(2, 8)
@spmd(2)
def test_calls_leave_nothing_behind(comm: Any, subjects: list[Subject], meshes: Meshes) -> None:
    check_nothing_is_left(comm, subjects, meshes)


@sized(4, 6)
@spmd(4)
def test_calls_of_four_leave_nothing_behind(
    comm: Any, subjects: list[Subject], meshes: Meshes
) -> None:
    check_nothing_is_left(comm, subjects, meshes)


def test_everything_public_is_called() -> None:
    called: set[CodeType] = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            called.add(frame.f_code)

    threading.setprofile(note)
    try:
        for size, subjects in BY_RANKS.items():
            run_threads(size, partial(used_once, subjects))
    finally:
        threading.setprofile(None)
    codes = {name: code_of(x) for name, x in everything().items()}
    assert len(codes) > 150
    wanted = {name: code for name, code in codes.items() if code is not None}
    assert sorted(name for name, code in wanted.items() if code not in called) == []


@spmd(2)
def test_the_thousandth_call_is_like_the_first(comm: Any) -> None:
    """Calls use messages (whose tags begin anew), shared memory, and MPI's collectives in turn.

    No tag is that of the notices of ranks that leave.
    """
    with sp.Mesh(comm, transport="window", check="off", sp=2) as mesh:
        mesh["sp"]._tags = itertools.count(MAX_TAG - 100)
        assert LEFT_TAG not in {mesh["sp"].next_tag() for _ in range(200)}
        mesh["sp"]._tags = itertools.count(MAX_TAG - 100)
        for number in range(1000):
            x = torch.full((number % 5 + 1,), float(comm.rank + number))
            algorithm = ("ring", "window", "mpi", "pairwise")[number % 4]
            total = sp.all_reduce(x, comm=mesh["sp"], algorithm=algorithm)
            assert torch.equal(total, torch.full_like(x, 2 * number + 1))
            assert not mesh["sp"]._pending  # an entry would keep tensors of this call


@spmd(2)
def test_ranks_may_make_more_than_2_to_the_31_steps_in_shared_memory(comm: Any) -> None:
    """At 10,000 steps a second that takes three days."""
    with sp.Mesh(comm, transport="window", algorithm="window", sp=2) as mesh:
        window: Any = mesh["sp"].window
        window.begun = window.made = window._launched = window._mine[0] = (1 << 31) - 2
        comm.Barrier()
        for _ in range(4):
            assert sp.all_reduce(torch.ones(3), comm=mesh["sp"]).tolist() == [2.0] * 3


@spmd(2)
def test_runs_of_one_plan_leave_nothing_behind(comm: Any) -> None:
    with sp.Mesh(comm, transport="window", sp=2) as mesh:
        made = [
            sp.plan(op, torch.ones(9, 9), comm=mesh["sp"], algorithm=name, **NEEDED.get(op, {}))
            for op in (*SCHEDULED, "all_reduce_")
            for name in ALGORITHMS[op.removesuffix("_")]
        ]

        def run_all() -> None:
            for plan in made:
                plan.run()

        assert left_behind(comm, run_all, ROUNDS) == []


def test_every_cache_has_a_bound() -> None:
    assert len(caches()) > 5
    unbounded = [name for name, cache in caches().items() if cache.cache_info().maxsize is None]
    assert [name for name in unbounded if inspect.signature(caches()[name]).parameters] == []


@pytest.mark.parametrize("transport", NAMES["cpu"])
@spmd(1, 2)
def test_a_freed_mesh_holds_nothing(comm: Any, transport: str) -> None:
    """This holds while the program still references the mesh, and so its communicators."""
    kept = [used_and_freed(comm, transport)]  # a library opens what it needs when it is first used
    grown = left_behind(comm, lambda: kept.append(used_and_freed(comm, transport)), 2)
    assert [line for line in grown if line.startswith(LENT)] == []


LENT = (COMMUNICATORS, *outside())
"""The kinds of resources that the system and MPI lend to this process."""


def used_and_freed(comm: Any, transport: str) -> sp.Mesh:
    sharding = sp.Sharding.contiguous(6 * comm.size, comm.size)
    with sp.Mesh(comm, transport=transport, a=comm.size, b=1) as mesh:
        q, k, v = (torch.ones(1, 6, 2, 4, requires_grad=True) for _ in range(3))
        out = sp.ring_attention(q, k, v, comm=mesh["b", "a"], sharding=sharding)
        assert isinstance(out, torch.Tensor)
        out.sum().backward()
        for axes in ("a", ()):
            sp.all_reduce(torch.ones(9), comm=mesh[axes])
        sp.shared_empty((3,), comm=mesh["a"])
    mesh.free()  # a second time
    return mesh


class Place(NamedTuple):
    """Hold mpi4py's communicator, a communicator of a mesh on it, and what ends planted leaks.

    Each planted leak adds to `kept` the function that releases it.
    """

    comm: Any
    group: sp.Communicator
    kept: list[Callable[[], object]]


def start_thread(place: Place) -> None:
    end = threading.Event()
    threading.Thread(target=end.wait, args=(60,), daemon=True).start()
    place.kept.append(end.set)


def keep_handle(place: Place) -> None:
    done = threading.Event()
    place.group.track(SimpleNamespace(test=done.is_set))
    place.kept.append(done.set)


def fill_cache(place: Place) -> None:
    """Add an entry to a cache without a bound, in a module of the product."""
    seen = vars(maps).setdefault("seen", {})
    seen[len(seen)] = place
    place.kept.append(partial(vars(maps).pop, "seen", None))


def keep(make: Callable[[Place], Any], give_back: str) -> Callable[[Place], None]:
    """Return a leak: it makes an object, and keeps the object's method that gives it back."""
    return lambda place: place.kept.append(getattr(make(place), give_back))


LEAKS: dict[str, Callable[[Place], object]] = {
    "file descriptors": keep(lambda place: os.fdopen(os.open("/dev/null", os.O_RDONLY)), "close"),
    "shared mappings": keep(lambda place: mmap.mmap(-1, 1), "close"),
    COMMUNICATORS: keep(lambda place: place.comm.Dup(), "Free"),
    "threads": start_thread,
    "torch.Tensor objects": keep(lambda place: torch.ones(1), "size"),
    "sp_core.mask.definition.Mask objects": keep(lambda place: sp.Mask(), "difference_range"),
    "sp_core.collectives.maps.seen entries": fill_cache,
    "Communicator._pending entries": keep_handle,
    MEMORY: keep(lambda place: bytearray(1 << 16), "clear"),
    "any dict objects": keep(lambda place: {"one": []}, "clear"),
}


@spmd(2)
def test_what_every_call_keeps_is_found(comm: Any) -> None:
    """This shows that the tests of this file can fail."""
    missed = []
    with sp.Mesh(comm, transport="window", sp=2) as mesh:
        place = Place(comm, mesh["sp"], [])
        for kind, leak in LEAKS.items():
            grown = left_behind(place.comm, partial(leak, place), 3)
            found = any(line.startswith(f"{kind}: ") for line in grown)
            missed += [kind] if counts(comm, kind) and not found else []
            while place.kept:
                place.kept.pop()()
    assert missed == []
