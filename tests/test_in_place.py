"""Test keys, values and gradient sums in shared memory: no message, no early read or write."""

import errno
import functools
import os
import resource
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from kit.meshed import meshed
from oracle.attention_check import Results, Shards, check_attention, compare
from oracle.strategies import AttentionProblem
from torch.autograd.graph import saved_tensors_hooks

import sp_core as sp
from sp_core.schemes import SCHEMES, problem
from sp_core.schemes.in_place import SharedSums, reads_in_place
from sp_core.testing import given, run_threads, spmd
from sp_core.transport import Window, shared
from sp_core.transport.shared import HostMemory, Offer, Regions

pytestmark = pytest.mark.usefixtures("short_slots", "dawdling")
PLAIN = AttentionProblem(
    *(2, 13, 13, 2, 2, 4, "float64", "zigzag", "zigzag", sp.Mask(), None, 1.0),
    *("normal", "normal", (True, True, True), "plain", 7),
    late=True,
)
IN_RANK_ORDER = {"reduce_scatter": "pairwise"}
SECONDS = 2e-3
ARRIVED, ALLOCATE = SharedSums.arrived, HostMemory.allocate


@pytest.fixture
def dawdling(substitute: Any) -> None:
    """Delay ranks at random just before they write or read a block."""
    random = Random(os.getpid())  # processes get different delays

    def late(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def dawdle(*args: Any, **kwargs: Any) -> Any:
            time.sleep(SECONDS * (random.randrange(3) == 0))
            return function(*args, **kwargs)

        return dawdle

    substitute(Regions, enter=late(Regions.enter))
    plain = vars(problem)
    substitute(problem, **{name: late(plain[name]) for name in ("attend", "attend_backward")})


@pytest.mark.parametrize("name", ["allgather_kv", "ring"])
@spmd(2)
@meshed(transport="window")
def test_attention_learns_after_an_evaluation_in_inference_mode(mesh: sp.Mesh, name: str) -> None:
    """The shared memory of an evaluation serves later calls, too."""
    shards = Shards(PLAIN, mesh.rank, mesh.size, mesh.device)
    scheme = functools.partial(SCHEMES[name], comm=mesh["sp"])
    with torch.inference_mode():
        shards.run(scheme)
        shards.run(scheme)
    compare(name, shards, shards.results(scheme), mesh["sp"])


class NoMessages:
    """A transport that fails when it is used. Ranks that share memory must not use it."""

    name = "window"

    def __getattr__(self, what: str) -> Any:
        raise AssertionError(f"{what} was asked for, where ranks share memory")


def leave_alone(comm: sp.Communicator) -> Window:
    """Turn off the kit's check of window operations, which makes ranks wait; return the window."""
    assert comm.window is not None
    comm.window._announce = lambda what: None
    return comm.window


def several(mesh: sp.Mesh, name: str, problems: list[AttentionProblem]) -> list[Results]:
    """Run several attentions, then all of their backwards; return the results of each."""
    under_way = []
    for one in problems:
        shards = Shards(one, mesh["sp"].rank, mesh["sp"].size, mesh.device)
        under_way.append((shards, *shards.run(functools.partial(SCHEMES[name], comm=mesh["sp"]))))
    return [
        {"out": out.detach(), "lse": lse.detach(), **shards.gradients(out, lse)}
        for shards, out, lse in under_way
    ]


@pytest.mark.parametrize("name", ["allgather_kv", "ring"])
@given(
    max_examples=6,
    seed=st.integers(0, 999),
    lengths=st.lists(st.integers(1, 40), min_size=3, max_size=3),
    check=st.sampled_from(["agree", "off"]),
)
def test_ranks_that_fall_behind_change_no_bit(
    comm: Any, name: str, seed: int, lengths: list[int], check: Any
) -> None:
    """Several attentions in a row have the same bits as with messages.

    With `check="off"` the ranks do not wait for each other before a backward.
    """
    changes: list[dict[str, Any]] = [
        {},
        {"mask": sp.Mask(causal=True), "storage": "transposed"},
        # some ranks see the keys of others but not their own
        {"mask": sp.Mask(window=1), "layout": "contiguous"},
    ]
    problems = [
        replace(PLAIN, seq_len=length, kv_len=length, seed=seed + turn, **changes[turn])
        for turn, length in enumerate(lengths)
    ]
    with sp.Mesh(comm, algorithm=IN_RANK_ORDER, sp=comm.size) as mesh:
        wanted = several(mesh, name, problems)
    with sp.Mesh(comm, transport="window", check=check, sp=comm.size) as mesh:
        carries, mesh["sp"].transport = mesh["sp"].transport, NoMessages()
        leave_alone(mesh["sp"])
        found = several(mesh, name, problems)
        mesh["sp"].transport = carries
    for mine, other in zip(found, wanted, strict=True):
        assert all(torch.equal(mine[what], other[what]) for what in other)


@pytest.mark.mpi_skip
@spmd(2)
def test_sums_are_read_before_another_rank_writes_its_next(comm: Any) -> None:
    """Rank 0 reads its sums late. The other rank may not write the sums of the next backward yet.

    The next sequence is shorter, so its sums lie at other places in the same memory.
    """
    changes: dict[str, Any] = {"needs_grad": (False, True, True)}
    problems = [replace(PLAIN, seq_len=n, kv_len=n, **changes) for n in (13, 3)]

    def late(wait: Callable[..., None], *args: Any) -> None:
        wait(*args)
        time.sleep(0.05)

    with sp.Mesh(comm, transport="window", check="off", sp=comm.size) as mesh:
        leave_alone(mesh["sp"])
        if comm.rank == 0:
            mesh["sp"].wait = functools.partial(late, mesh["sp"].wait)  # type: ignore[method-assign]
        found = several(mesh, "ring", problems)
    with sp.Mesh(comm, sp=comm.size) as mesh:
        wanted = several(mesh, "ring", problems)
    for mine, other in zip(found, wanted, strict=True):
        assert all(torch.equal(mine[what], x) for what, x in other.items())


@pytest.mark.parametrize("storage", ["transposed", "padded", "tokens last"])
@spmd(2)
def test_keys_that_lie_otherwise_in_memory_change_no_bit(comm: Any, storage: str) -> None:
    """A ring with shared memory has the same bits as with messages, for both layouts of keys."""
    changes: Any = {"seq_len": 37, "kv_len": 37, "head_dim": 5, "mask": sp.Mask(causal=True)}
    changes |= {"layout": "contiguous", "kv_layout": "contiguous", "storage": storage}
    results = list[Results]()
    for transport in ("host", "window"):
        with sp.Mesh(comm, transport=transport, sp=comm.size) as mesh:
            shards = Shards(replace(PLAIN, **changes), comm.rank, comm.size, mesh.device)
            results.append(shards.results(functools.partial(sp.ring_attention, comm=mesh["sp"])))
    assert all(torch.equal(x, results[1][what]) for what, x in results[0].items())


@pytest.mark.mpi_skip
@spmd(2)
@meshed(transport="window", check="off")
def test_a_backward_leaves_nothing_under_way(
    mesh: sp.Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This holds even for a rank whose last two window operations end at the same time."""

    def last(sums: SharedSums) -> Any:
        comm = sums._problem.comm
        window = comm.window
        assert window is not None
        while comm.rank == 0 and min(flag[0] for flag in window._others) <= window.begun:
            window.advance()
        return ARRIVED(sums)

    monkeypatch.setattr(SharedSums, "arrived", last)
    leave_alone(mesh["sp"])
    shards = Shards(PLAIN, mesh.rank, mesh.size, mesh.device)
    shards.results(functools.partial(sp.ring_attention, comm=mesh["sp"]))
    assert not mesh["sp"]._pending


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@spmd(3)
def test_shared_keys_may_be_overwritten_when_attention_has_returned(comm: Any, mode: Any) -> None:
    with sp.Mesh(comm, transport="window", check="off", sp=3) as mesh, mode():
        leave_alone(group := mesh["sp"])
        q, k, v = (sp.shared_empty((1, 4, 1, 2), comm=group).fill_(1.0) for _ in "qkv")
        for turn in range(6):
            v.fill_(turn)
            time.sleep(0.01 * ((comm.rank + turn) % 3))
            found = sp.ring_attention(q, k, v, comm=group, sharding=sp.Sharding.contiguous(12, 3))
            torch.testing.assert_close(found, torch.full_like(q, turn))


HOMES = ("the first", "the second", "the third", "a part of one", "plain memory")


def of_k_and_v(homes: list[list[str]], alike: str) -> list[list[str]]:
    """Return where each rank's k and v lie. Those named in `alike` lie where rank 0 has them.

    With "swapped", k of each rank lies where the next rank has v.
    """
    if alike == "swapped":
        return [homes[0][:2][:: (-1) ** rank] for rank in range(len(homes))]
    common = {x: homes[0][place] for place, x in enumerate("kv") if x in alike}
    found = []
    for own in homes:
        others = (home for home in own if home not in common.values())
        found.append([common[x] if x in common else next(others) for x in "kv"])
    return found


@pytest.mark.parametrize("name", ["allgather_kv", "ring"])
@given(
    max_ranks=3,
    max_examples=20,
    homes=st.sampled_from((HOMES, HOMES[:3])).flatmap(
        lambda some: st.lists(st.permutations(some), min_size=3, max_size=3)
    ),
    alike=st.sampled_from(("k v", "k", "v", "", "swapped")),
    needs=st.sampled_from([(False,) * 3, (True, False, False), (True,) * 3]),
)
def test_keys_and_values_may_live_elsewhere_on_every_rank(
    comm: Any, name: str, homes: list[list[str]], alike: str, needs: tuple[bool, bool, bool]
) -> None:
    """The results have the same bits as with plain memory. The tensors may then be overwritten.

    A ring does not copy k and v if they lie in the same allocations on every rank.
    """
    with sp.Mesh(comm, transport="window", sp=comm.size) as mesh:
        shards = Shards(replace(PLAIN, needs_grad=needs), comm.rank, comm.size, mesh.device)
        scheme = functools.partial(SCHEMES[name], comm=mesh["sp"])
        wanted, given_ = shards.results(scheme), [x.detach() for x in shards.local[1:]]
        made = {
            home: sp.shared_empty((300 + place,), comm=mesh["sp"], dtype=torch.float64)
            for place, home in enumerate(HOMES[:4])
        }
        of_ranks = of_k_and_v(homes[: comm.size], alike)
        chosen, same = of_ranks[comm.rank], of_ranks == [of_ranks[0]] * comm.size
        reads = name == "ring" and same and {*chosen} <= {*HOMES[:3]}
        window = leave_alone(mesh["sp"])
        times = 1 + needs[0] + (name == "ring" and needs[1])
        others = 2 * shards.whole[1].to(given_[0]).nbytes - 2 * given_[0].nbytes
        for turn in range(2):
            comm.Barrier()
            rooms = [
                made[home][home == HOMES[3] :] if home in made else torch.empty(300)
                for home in chosen
            ]
            moved = [
                room.to(x)[: x.numel()].view(x.shape).copy_(x)
                for room, x in zip(rooms, given_, strict=True)
            ]
            shards.local[1:] = [mine.requires_grad_(needs[1]) for mine in moved]
            counters, uses = mesh["sp"].counters, repr(window.blocks._uses)
            counters.reset()
            found = shards.results(scheme)
            counted = counters["ring" if name == "ring" else "all_gather"]
            summed = needs[1] and name != "ring" and comm.size > 1
            told = (times * (comm.size - 1), times * others, summed)
            sums = counters["reduce_scatter"].calls > 0
            assert (counted.messages, counted.bytes_sent, sums) == told
            assert (repr(window.blocks._uses) == uses) == (reads or comm.size == 1)
            for mine in moved:
                mine.data.fill_(torch.nan)
            assert all(torch.equal(x, wanted[what]) for what, x in found.items()), turn


@spmd(3)
@meshed(transport="window")
def test_keys_in_shared_memory_count_as_those_elsewhere(mesh: sp.Mesh) -> None:
    x, counts = torch.ones(1, 4, 1, 2), list[int]()
    given: Any = {"sharding": sp.Sharding.contiguous(12, 3), "mask": sp.Mask(True, window=3)}
    home = [sp.shared_empty(x.shape, comm=mesh["sp"]).copy_(x) for _ in "kv"]
    for k, v in ((x, x), home):
        mesh["sp"].counters.reset()
        sp.ring_attention(x, k, v, comm=mesh["sp"], **given)
        counts.append(mesh["sp"].counters["ring"].bytes_sent)
    assert counts == [2 * 2 * 2 * x.itemsize * (mesh.rank > 0)] * 2  # two tokens of k and of v


@spmd(3)
@meshed(transport="window")
def test_hooks_may_copy_the_saved_keys_and_values(mesh: sp.Mesh) -> None:
    copies = saved_tensors_hooks(lambda x: x.detach().clone(), lambda x: x)
    sharding, found = sp.Sharding.contiguous(6, 3), list[torch.Tensor]()
    q = torch.ones(1, 2, 1, 2, requires_grad=True)
    k, v = (sp.shared_empty(q.shape, comm=mesh["sp"]).fill_(mesh.rank) for _ in "kv")
    for where in (range(0), range(1), range(3)):
        with copies if mesh.rank in where else nullcontext():
            out: Any = sp.ring_attention(q, k, v, comm=mesh["sp"], sharding=sharding)
        found.extend(torch.autograd.grad(out.sum(), q))
    assert found[0].abs().min() > 0
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


MESSAGES: dict[str, tuple[str, Any, Any]] = {
    "mpi": ("ring", sp.ring_attention, lambda window: window.__dict__.update(exchange=None)),
    "bruck": (
        "allgather_kv",
        sp.allgather_kv_attention,
        lambda window: window.blocks.__dict__.update(enter=None),
    ),
}
"""By algorithm a scheme that then sends messages, and what it does not use of a window."""


@spmd(3)
def test_another_algorithm_is_respected_and_other_transports_have_messages(comm: Any) -> None:
    for transport, algorithm, in_place in (
        ("window", "auto", (True, True)),
        ("window", "window", (True, True)),
        ("window", "mpi", (False, False)),
        ("window", "bruck", (False, True)),  # a shift has no algorithm "bruck"
        ("host", "window", (False, False)),
    ):
        with sp.Mesh(comm, transport=transport, algorithm=algorithm, sp=comm.size, one=1) as mesh:
            assert (
                reads_in_place(mesh["sp"], "all_gather"),
                reads_in_place(mesh["sp"], "shift"),
            ) == in_place
            assert not reads_in_place(mesh["one"], "shift")
            if algorithm in MESSAGES:
                name, scheme, break_unused = MESSAGES[algorithm]
                break_unused(mesh["sp"].window)
                check_attention(name, functools.partial(scheme, comm=mesh["sp"]), PLAIN, mesh["sp"])


def test_memory_leaves_no_file_in_a_program_without_standard_input() -> None:
    """There the descriptor of a new file is 0."""
    kept = os.dup(0)
    os.close(0)
    try:
        run_threads(1, lambda comm: shared.share(comm, shared.HOST, 8))
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(0)
    finally:
        os.dup2(kept, 0)
        os.close(kept)


def test_memory_that_a_container_does_not_have_is_not_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The system would end the process that takes it."""
    monkeypatch.setattr(shared, "memory", lambda: 1000)
    x, offer = shared.HOST.allocate(1000)
    os.close(offer.file)
    assert x.numel() == 1000
    with pytest.raises(OSError, match="Cannot allocate memory"):
        shared.HOST.allocate(1001)


@pytest.mark.mpi_skip
@spmd(3)
@meshed(transport="window")
def test_no_memory_for_a_room_is_an_error_on_all_ranks(
    mesh: sp.Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    def small(memory: HostMemory, nbytes: int) -> tuple[torch.Tensor, Offer]:
        if nbytes > 1 << 16:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return ALLOCATE(memory, nbytes)

    monkeypatch.setattr(HostMemory, "allocate", small)
    shards = Shards(replace(PLAIN, seq_len=300, kv_len=300), mesh.rank, mesh.size, mesh.device)
    for scheme in (sp.ring_attention, sp.allgather_kv_attention):
        with pytest.raises(
            sp.RankError,
            match=r"bytes of shared memory were asked for.*No space left.*transport='host'",
        ):
            shards.run(functools.partial(scheme, comm=mesh["sp"]))
    assert sp.all_reduce(torch.ones(2), comm=mesh["sp"]).tolist() == [mesh.size] * 2


def test_the_reason_why_the_system_makes_no_memory_is_told() -> None:
    usual = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, usual[1]))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            shared.HOST.allocate(8)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, usual)
