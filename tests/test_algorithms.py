"""Run every algorithm: its result is bitwise that of its schedule, and its traffic is its cost."""

import time
from dataclasses import replace
from functools import partial
from itertools import product
from threading import Thread
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from hypothesis import strategies as st
from kit.carriers import CARRIERS
from kit.meshed import meshed
from oracle.collective_cases import DTYPES, NEEDED, Case, cases, part_of
from oracle.proof import replay
from oracle.schedule_cases import FLOATS, SUMS, Vectors, pieces, vectors
from oracle.window_cases import in_rank_order, use_window

import sp_core as sp
from sp_core.collectives import combining
from sp_core.programs import ALGORITHMS, HALF, cost, table
from sp_core.schemes import SCHEMES
from sp_core.scratch import Scratch
from sp_core.testing import device, given, spmd

CALLS = [(op, name) for op, names in ALGORITHMS.items() for name in names if name != "auto"]
IN_PLACE = [("all_reduce_", "mpi"), ("all_reduce_", "ring")]
SEGMENT_BYTES = 24


@pytest.fixture(autouse=True)
def short_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten segments, and blocks of half types, so that the vectors here have several of them."""
    monkeypatch.setattr(table, "SEGMENT_BYTES", (SEGMENT_BYTES, SEGMENT_BYTES))
    monkeypatch.setattr(combining, "WIDE_BLOCK", 3)


def poison(comm: sp.Communicator) -> None:
    """Fill the scratch memory of a communicator with NaN for the calls that follow."""
    comm.scratch.clear()
    for _ in range(3):
        comm.scratch.give(torch.full((1 << 14,), 0xFF, dtype=torch.uint8, device=comm.device))


@st.composite
def cases_by_algorithm(draw: st.DrawFn) -> Case:
    op, algorithm = draw(st.sampled_from(CALLS))
    return draw(cases(DTYPES, [op], algorithm))


@pytest.mark.explore
@pytest.mark.parametrize("library", [True, False], ids=["of the library", "of any"])
@given(case=cases_by_algorithm(), transport=st.sampled_from([*CARRIERS]), late=st.integers(0, 8))
def test_an_algorithm_equals_the_definition(
    comm: Any, library: bool, transport: str, case: Case, late: int
) -> None:
    """Draw any dtype, uneven and empty pieces, views, late ranks and used scratch. Call twice."""
    case = replace(case, algorithm="mpi") if library else case
    with sp.Mesh(comm, sp=comm.size) as mesh:
        group = mesh["sp"]
        only_messages = (case.algorithm, transport) == ("mpi", "link")
        group.transport = CARRIERS["host" if only_messages else transport](group)
        poison(group)
        if case.algorithm == "window":
            use_window(group)
        inputs = case.inputs(comm.size)
        time.sleep(0.002 if comm.rank == late else 0)
        for _ in range(2):
            result = case.call(inputs[comm.rank], group)
            assert torch.equal(result, case.expected(case.inputs(comm.size), comm.rank, comm.size))
            assert torch.equal(inputs[comm.rank], case.inputs(comm.size)[comm.rank])
            new = (
                result.untyped_storage().data_ptr()
                != inputs[comm.rank].untyped_storage().data_ptr()
            )
            assert new or case.op == "copy_to_group" or not result.numel()
            assert len(group.scratch._free) >= 3  # scratch blocks were given back for the next call
    assert not group.scratch._free  # their memory does not wait for the program to drop `group`


def test_scratch_lends_the_smallest_block_that_fits_and_keeps_the_largest() -> None:
    scratch = Scratch(torch.device("cpu"))
    given = [torch.empty(length, dtype=torch.uint8) for length in (5, 0, 3, 9, 7, 4)]
    for block in given:
        scratch.give(block)
    lent = [scratch.take(length) for length in (5, 5, 1, 10, 9, 1)]
    assert [(block.numel(), block.dtype) for block in lent] == [
        (length, torch.uint8) for length in (5, 7, 4, 10, 9, 1)
    ]
    assert [any(block is one for one in given) for block in lent] == [1, 1, 1, 0, 1, 0]
    scratch.give(given[0])
    scratch.clear()
    assert scratch.take(1) is not given[0]


def test_a_signal_handler_may_give_scratch_back_in_the_middle_of_take() -> None:
    """A poll in the handler ends a collective. No thread waits, and the block need not be kept."""
    scratch: Any = Scratch(torch.device("cpu"))
    block = torch.empty(8, dtype=torch.uint8)
    held = Mock(**{"numel.side_effect": lambda: scratch.give(block) or 8})
    scratch._free = [(held, None)]
    taken = Thread(target=scratch.take, args=(8,), daemon=True)
    taken.start()
    taken.join(5)
    assert not taken.is_alive()


@pytest.mark.explore
@given(problem=vectors())
def test_an_execution_is_bitwise_a_replay_of_its_schedule_and_costs_as_much(
    comm: Any, problem: Vectors
) -> None:
    inputs = problem.inputs(comm.size)
    made = problem.schedule(comm.size, SEGMENT_BYTES // inputs[0].itemsize)
    with sp.Mesh(comm, nodes=problem.nodes(comm.size), device=device(), sp=comm.size) as mesh:
        poison(mesh["sp"])
        result = problem.call(inputs[comm.rank].to(mesh["sp"].device), mesh["sp"]).cpu()
        found = mesh["sp"].counters.total()
    told = cost(made.programs[comm.rank], inputs[0].dtype)
    figures = {"messages": found.messages, "bytes_sent": found.bytes_sent, "scratch": found.scratch}
    assert (found.calls, figures) == (1, told)
    if problem.op in SUMS:
        wanted = replay(made, inputs)[comm.rank]
        if problem.op == "reduce" and comm.rank != problem.place % comm.size:
            wanted = torch.zeros_like(inputs[0])
        assert torch.equal(result, wanted)


@given(max_examples=30, problem=vectors(SUMS))
@meshed()
def test_the_library_adds_half_types_in_float32(mesh: sp.Mesh, problem: Vectors) -> None:
    """Half types differ from the float64 sum by float32 rounding and one final rounding.

    Source: Higham, "Accuracy and stability of numerical algorithms", 2002, section 4.2: |error| <=
    gamma_d * sum |x_i|.
    """
    inputs = problem.inputs(mesh.size)
    found = replace(problem, algorithm="mpi").call(inputs[mesh.rank], mesh["sp"]).double()
    dtype, wide = inputs[0].dtype, torch.stack(inputs).double()
    exact, scale = wide.sum(0), wide.abs().sum(0)
    bound = (gamma(mesh.size, dtype) + gamma(mesh.size, torch.float64)) * scale
    if dtype in HALF:
        bound = 2 * gamma(mesh.size, torch.float32) * scale
        bound += exact.abs() * torch.finfo(dtype).eps / 2
    bound += torch.finfo(dtype).tiny  # an underflow
    if problem.op == "reduce_scatter":
        counts = pieces(mesh.size, problem.shape)
        exact, bound = (part_of(x, counts, 0, mesh.rank) for x in (exact, bound))
    is_kept = problem.op != "reduce" or mesh.rank == problem.place % mesh.size
    assert ((found - exact * is_kept).abs() <= bound).all()


def gamma(size: int, dtype: torch.dtype) -> float:
    """Bound the relative error of a sum over `size` ranks."""
    error = (size - 1) * torch.finfo(dtype).eps / 2
    return error / (1 - error)


@pytest.mark.explore
@given(
    max_examples=40,
    problem=vectors(("all_reduce", "reduce_scatter")),
    start=st.booleans(),
    shared=st.booleans(),
)
def test_deterministic_is_bitwise_the_sum_in_the_order_of_the_ranks(
    comm: Any, problem: Vectors, start: bool, shared: bool
) -> None:
    """This holds whatever algorithm the mesh was made with. Half types are added in float32."""
    inputs = problem.inputs(comm.size)
    total = in_rank_order(inputs)
    name = f"{problem.op}_start" if start else problem.op
    with sp.Mesh(
        comm,
        nodes=problem.nodes(comm.size),
        algorithm={problem.op: problem.algorithm},
        sp=comm.size,
    ) as mesh:
        if shared:
            use_window(mesh["sp"])
        counts = pieces(comm.size, problem.shape)
        arguments: dict[str, Any] = {"sizes": counts} if problem.op == "reduce_scatter" else {}
        result = getattr(sp, name)(
            inputs[comm.rank], comm=mesh["sp"], deterministic=True, **arguments
        )
        result = result.wait() if start else result
    assert torch.equal(result, part_of(total, counts, 0, comm.rank) if arguments else total)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("length", [1, 3, 7])
def test_a_sum_is_that_of_a_loop_wherever_it_is_written(length: int, dtype: torch.dtype) -> None:
    """The sum is written to its own memory or over an addend. The memory beside it stays."""
    for count, place in product(range(1, 5), range(5)):
        draws = torch.randn(5, length + 2, generator=torch.Generator().manual_seed(count))
        memory = (draws * torch.tensor([[1e6], [1], [-1e6], [10], [1]])).to(dtype)
        wanted, rooms = memory.clone(), torch.full((2 * length + 2,), torch.nan)
        parts, wide = [*memory[:count, 1:-1]], (rooms[1 : length + 1], rooms[length + 1 : -1])
        wanted[place, 1:-1] = in_rank_order(parts)
        work = combining.combination(
            memory[place, 1:-1], parts, wide, "sum", lambda into, part: partial(into.copy_, part)
        )
        assert bool([one() for one in work]) == (count > 1 or place > 0)
        first = int(2 <= place < count and dtype == torch.float32)  # row 0 is overwritten
        assert torch.equal(memory[first:], wanted[first:])
        assert rooms[[0, -1]].isnan().all()


@given(
    max_examples=20,
    dtype=st.sampled_from(FLOATS),
    algorithm=st.sampled_from(ALGORITHMS["all_reduce"]),
    seed=st.integers(0, 99),
)
@meshed()
def test_greatest_and_least_with_nan(mesh: sp.Mesh, dtype: str, algorithm: str, seed: int) -> None:
    """One rank's tensor lies in memory as torch's images do."""
    draws = torch.randn(mesh.size, 27, generator=torch.Generator().manual_seed(seed))
    draws[seed % mesh.size, seed % 27] = torch.nan
    every = draws.view(-1, 3, 3, 1, 3).to(getattr(torch, dtype))
    is_image = mesh.rank == seed % mesh.size
    layout = torch.channels_last if is_image else torch.contiguous_format
    own = every[mesh.rank].to(memory_format=layout)
    if algorithm == "window":
        use_window(mesh["sp"])
    for name, op in product((algorithm, "mpi"), ("max", "min")):
        found = sp.all_reduce(own, comm=mesh["sp"], op=op, algorithm=name)
        made = sp.plan("all_reduce", x := torch.zeros_like(own), comm=mesh["sp"], op=op)
        x.copy_(own)
        wanted = getattr(every, f"a{op}")(0)
        for result in (found, made.run()):
            torch.testing.assert_close(result, wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("op", "algorithm"), [*CALLS, *IN_PLACE])
@spmd(1, 2)
@meshed(transport="window")
def test_a_tensor_with_the_negative_bit_is_sent_with_its_sign(
    mesh: sp.Mesh, op: str, algorithm: str
) -> None:
    """Such a tensor, as of `x.conj().imag`, has the opposite sign in memory. A plan reads anew."""
    arguments = NEEDED.get(op, {})
    for rows in (mesh.size, 1):  # an all-to-all packs its pieces, but not a single row
        values = torch.arange(1.0, 1 + 2 * rows * mesh.size).view(mesh.size * 2, rows)
        given = partial(getattr(sp, op), comm=mesh["sp"], algorithm=algorithm, **arguments)
        wanted = given(-values)
        negative = torch._neg_view(values.clone())
        assert torch.equal(given(negative), wanted)
        negative.copy_(-values)
        plan = sp.plan(op, negative, comm=mesh["sp"], algorithm=algorithm, **arguments)
        negative.copy_(-values * 2)
        assert torch.equal(plan.run(), wanted * 2)


@spmd(1, 2)
@meshed(transport="window")
def test_keys_with_the_negative_bit_keep_their_sign(mesh: sp.Mesh) -> None:
    sharding = sp.Sharding.contiguous(2 * mesh.size, mesh.size)
    for scheme in SCHEMES.values():
        q = torch.rand(1, 2, mesh.size, 4)
        k, v = (sp.shared_empty(q.shape, comm=mesh["sp"]).copy_(q) for _ in "kv")
        attend: Any = partial(scheme, comm=mesh["sp"], sharding=sharding)
        assert torch.equal(attend(q, torch._neg_view(k), torch._neg_view(v)), attend(q, -k, -v))


@spmd(2)
def test_a_tensor_that_learns_is_summed_in_place_without_gradients(comm: Any) -> None:
    weight = torch.nn.Parameter(torch.ones(3) + comm.rank)
    with sp.Mesh(comm, sp=2) as mesh, torch.no_grad():
        assert sp.all_reduce(weight, comm=mesh["sp"], op="max").tolist() == [2.0] * 3
        assert sp.all_reduce_(weight, comm=mesh["sp"]).tolist() == [3.0] * 3
