"""Test the checked group of torch.distributed.

It does the same as torch's group, but ranks that disagree get an error, not a deadlock.
"""

import atexit
import gc
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import example, strategies as st
from mpi4py import MPI
from resources.held import outside

from sp_core.errors import CollectiveMismatch, PeerFailed, RankError
from sp_core.testing import CheckedComm, CheckedGroup, given, spmd

# a process has one world of torch.distributed, so ranks cannot be threads
pytestmark = pytest.mark.mpi


@contextmanager
def world(comm: Any) -> Iterator[None]:
    """Make torch.distributed's default group over the ranks of a communicator, inside a `with`."""
    name = comm.bcast(tempfile.mkdtemp(prefix="sp_core-") if comm.rank == 0 else None)
    atexit.register(shutil.rmtree, name, ignore_errors=True)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(f"{name}/store", comm.size),  # type: ignore[attr-defined]
        rank=comm.rank,
        world_size=comm.size,
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.fixture(autouse=True)
def _on_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


@example(nprocs=3, n=2, dtype=torch.float64, left_out=1)
@given(
    nprocs=st.integers(1, 4),
    n=st.integers(0, 3),
    dtype=st.sampled_from([torch.float64, torch.int32]),
    left_out=st.integers(0, 1),
    max_examples=10,
)
def test_calls_do_what_torch_says(comm: Any, n: int, dtype: torch.dtype, left_out: int) -> None:
    """A group may leave out rank 0 of the world. Its calls name ranks as in the world."""
    start = left_out if comm.size > 2 else 0
    p, rank = comm.size - start, comm.rank - start

    def of(r: int, count: int = n) -> torch.Tensor:
        return (torch.arange(2 * count).view(count, 2) + 100 * (r + 1)).to(dtype)

    # rank i sends (i + j) % 3 rows to rank j
    sends, receives = [(rank + j) % 3 for j in range(p)], [(i + rank) % 3 for i in range(p)]
    parts = torch.cat([of(10 * rank + j, sends[j]) for j in range(p)])
    total, largest, at_all, mine = of(rank), of(rank), of(rank), of(rank)
    gathered, swapped = torch.empty(2, p * n, 2, dtype=dtype)
    came = torch.empty(sum(receives), 2, dtype=dtype)
    with world(comm):
        part = dist.new_group([*range(start, comm.size)]) if start else None
        if rank < 0:
            return
        with CheckedGroup(part) as group:
            assert (group.rank, group.size) == (rank, p)
            group.all_reduce(total)
            group.all_reduce(largest, dist.ReduceOp.MAX)
            group.broadcast(at_all, src=comm.size - 1)
            group.all_gather_into_tensor(gathered, of(rank))
            group.reduce_scatter_tensor(mine, gathered)
            group.all_to_all_single(swapped, torch.cat([of(10 * rank + j) for j in range(p)]))
            group.all_to_all_single(came, parts, receives, sends)
            group.barrier()
            if p > 1:
                pass_along(group, of(rank), of(0), start)
    everyone = [of(r) for r in range(p)]
    expected = [sum(everyone), of(p - 1), of(p - 1), torch.cat(everyone), of(rank) * p]
    to_me = torch.cat([of(10 * i + rank, receives[i]) for i in range(p)])
    expected += [torch.cat([of(10 * i + rank) for i in range(p)]), to_me]
    results = (total, largest, at_all, gathered, mine, swapped, came)
    for found, due in zip(results, expected, strict=True):
        assert torch.equal(found, due)


def pass_along(group: Any, mine: torch.Tensor, first: torch.Tensor, start: int = 0) -> None:
    """Send the first rank's tensor to the last rank, which expects `first`; others `stand_by`.

    `start`: the rank of the world that is the group's first.
    """
    last = group.size - 1
    if group.rank == 0:
        group.send(mine, dst=start + last)
    elif group.rank == last:
        came = torch.empty_like(first)
        group.recv(came, src=start)
        assert torch.equal(came, first)
    else:
        group.stand_by()


def fail(group: Any, odd: bool) -> None:
    """Raise an error on the odd rank, for which the others wait in a barrier."""
    if odd:
        raise LookupError("only here")
    group.barrier()


FAULTS: dict[str, tuple[Callable[..., Any], str]] = {
    "failed": (fail, "failed: LookupError"),
    "size": (
        lambda group, odd: group.all_reduce(torch.zeros(3 if odd else 2)),
        "all_reduce(3 x float32 on cpu, op=SUM) on group",
    ),
    "a share": (
        lambda group, odd: group.reduce_scatter_tensor(
            torch.zeros(1 + odd), torch.zeros((1 + odd) * group.size)
        ),
        "reduce_scatter_tensor(4 x float32 on cpu, op=SUM)",
    ),
    "a part": (
        lambda group, odd: group.all_gather_into_tensor(
            torch.zeros((2 + odd) * group.size), torch.zeros(2 + odd)
        ),
        "all_gather_into_tensor(3 x float32 on cpu)",
    ),
    "dtype of parts": (
        lambda group, odd: group.all_to_all_single(
            *(torch.zeros(2 * group.size, dtype=[torch.float, torch.int][odd]) for _ in "oi")
        ),
        "from them, torch.int32)",
    ),
    "dtype": (
        lambda group, odd: group.broadcast(torch.zeros(2, dtype=[torch.float, torch.int][odd]), 0),
        "2 x int32 on cpu, src=0",
    ),
    "root": (
        lambda group, odd: group.broadcast(torch.zeros(2), int(odd)),
        "broadcast(2 x float32 on cpu, src=1)",
    ),
    "reduction": (
        lambda group, odd: group.all_reduce(
            torch.zeros(2), [dist.ReduceOp.SUM, dist.ReduceOp.MAX][odd]
        ),
        "op=MAX",
    ),
    "call": (
        lambda group, odd: group.barrier() if odd else group.all_reduce(torch.zeros(2)),
        "barrier() on group",
    ),
    "left": (lambda group, odd: None if odd else group.barrier(), "finished"),
    "all send": (
        lambda group, odd: group.send(torch.zeros(2), (group.rank + 1) % group.size),
        "which does not expect them",
    ),
    "dtype of a message": (
        lambda group, odd: pass_along(group, torch.zeros(2), torch.zeros(2, dtype=torch.int)),
        "rank 0 sends 8 bytes of torch.float32 to rank",
    ),
    "split": (
        lambda group, odd: group.all_to_all_single(
            torch.zeros(2 * group.size),
            torch.zeros(2 * group.size + odd),
            None,
            [2 + odd, *[2] * (group.size - 1)],
        ),
        "sends 12 bytes to rank 0, which does not expect them",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
@spmd(2, 4)
def test_ranks_that_disagree_all_get_an_error_and_the_group_still_works(
    comm: Any, fault: str
) -> None:
    (call, said), odd = FAULTS[fault], comm.rank == comm.size - 1
    expected = LookupError if odd and call is fail else (CollectiveMismatch, PeerFailed)
    with world(comm):
        with pytest.raises(expected) as caught, CheckedGroup() as group:
            call(group, odd)
        texts = comm.allgather(str(caught.value))
        assert all(said in text for text in texts[:-1])
        alike = len({text.partition("\n")[0] for text in texts}) == 1
        assert alike == (fault not in ("left", "failed"))
        with CheckedGroup() as group:
            pass_along(group, torch.full((2,), float(comm.rank)), torch.zeros(2))


def some(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return a tensor of zeros."""
    return torch.zeros(shape, dtype=dtype)


INT, GAPS = torch.int32, some(2, 4).T
UNFIT: list[tuple[str, tuple[Any, ...], str]] = [
    ("all_gather_into_tensor", (some(3), some(2)), "output has 3 x float32 on cpu, the input 2 x"),
    ("all_gather_into_tensor", (some(4, dtype=INT), some(2)), "4 x int32 on cpu, the input 2 x f"),
    ("reduce_scatter_tensor", (some(2), some(3)), "output has 2 x float32 on cpu, the input 3 x"),
    ("reduce_scatter_tensor", (some(2, dtype=INT), some(4)), "2 x int32 on cpu, the input 4 x fl"),
    ("all_to_all_single", (some(2, dtype=INT), some(2)), "2 x int32 on cpu, the input 2 x float32"),
    ("all_to_all_single", (some(2), some()), "a tensor without dims has no rows"),
    ("all_to_all_single", (some(), some(2)), "a tensor without dims has no rows"),
    ("all_to_all_single", (some(4), some(3)), "3 rows cannot be split evenly over 2 ranks"),
    (
        "all_to_all_single",
        (some(4), some(4), None, [4]),
        r"sizes \[4\] are not 2 sizes that add up",
    ),
    ("all_to_all_single", (some(4), some(4), None, [1, 2]), r"\[1, 2\] are not .* up to 4 rows"),
    ("all_to_all_single", (some(4), some(4), [3, 2]), r"\[3, 2\] are not .* up to 4 rows"),
    *(
        (name, tensors, r"of shape \(4, 2\) and strides \(1, 4\) is not contiguous")
        for name, tensors in [
            ("all_reduce", (GAPS,)),
            ("broadcast", (GAPS, 0)),
            ("send", (GAPS, 1)),
            ("recv", (GAPS, 1)),
            ("all_gather_into_tensor", (some(8, 2), GAPS)),
            ("reduce_scatter_tensor", (some(2, 2), GAPS)),
            ("all_to_all_single", (GAPS, some(4, 2))),
            ("all_to_all_single", (some(4, 2), GAPS)),
        ]
    ),
]


@spmd(2)
def test_a_rank_whose_own_tensors_do_not_fit_says_so(comm: Any) -> None:
    with world(comm):
        for name, tensors, said in UNFIT:
            with pytest.raises(ValueError, match=said), CheckedGroup() as group:
                getattr(group, name)(*tensors)


@spmd(2)
def test_the_end_of_the_block_closes_the_connections(comm: Any) -> None:
    with world(comm):
        gc.collect()  # what earlier tests have left must not be closed in between
        before = outside()["file descriptors"]
        with CheckedGroup() as group:
            group.barrier()
            during = outside()["file descriptors"]
        assert before == outside()["file descriptors"] < during


def test_without_a_world_there_is_no_group() -> None:
    with pytest.raises(ValueError, match="init_process_group"):
        CheckedGroup()


def test_a_checked_communicator_of_ones_own_ends_with_its_block() -> None:
    world, last = MPI.COMM_WORLD, MPI.COMM_WORLD.size - 1
    expected = LookupError if world.rank == last else PeerFailed
    with pytest.raises(expected) as caught, CheckedComm(world) as comm:
        fail(comm.Dup(), odd=comm.rank == last)
    assert world.rank == last or f"rank {last}: failed: LookupError" in str(caught.value)
    with CheckedComm(world) as comm:
        assert comm.allgather(comm.rank) == list(range(comm.size))
        with pytest.raises(RankError, match="which the end of the body or block frees"):
            comm.Free()
    with pytest.raises(RankError, match="freed"):
        comm.Barrier()
