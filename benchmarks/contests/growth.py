"""Fit how costs grow with ranks or documents: time to plan, messages, bytes, memory. Check results.

Time, messages and sizes of data structures are computed for one rank of many, without the others.
Results and live bytes are those of 16, 32 and 64 ranks. Exponents are fitted by least squares on
logarithms. Exit code: 0 if every exponent and bound is met, 1 if one is not or a launch failed, 2
for options that cannot be run.
"""

import argparse
import math
import random
import statistics
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, patch

import torch

import sp_core as sp
from benchmarks.contests.contest import Contest, Entry, Part, at_least, unmet
from benchmarks.launching import Record, about, numbers_of_ranks
from benchmarks.reporting.tables import make, significant
from benchmarks.sample import Span, peak_memory, race
from benchmarks.statistics import FEWEST, WITHIN, Requirement, certain, exact_interval
from benchmarks.worker import Rank
from sp_core import agreement, cost
from sp_core.mask import blocks
from sp_core.programs import program, table
from sp_core.schemes import SCHEMES, reach
from sp_core.transport import base

FITTED = 16
"""Exponents are fitted to sizes of at least the greatest divided by this: constants rule below."""

TIMED, COMPUTED = (64, 256, 1024, 4096), (256, 1024, 4096, 16384)
"""Ranks whose plans are timed, and ranks for which the rest is computed."""

TOKENS, TOGETHER, HEADS = 1024, 1024, 64
"""Tokens of a rank, tokens of all ranks of a launch, and heads."""

LINEAR, LOG, FLAT, TENTH = 1.1, 0.2, 0.01, math.log(1.1) / math.log(4)
"""Greatest exponents of costs that are linear, logarithmic and constant in P.

TENTH allows a growth of a tenth from 16 to 64 ranks.
"""

REST_SECONDS = 5e-3
"""Seconds that a rank sleeps between two looks for a message, in a launch of many ranks."""

Plan = Callable[[sp.Sharding, sp.Mask], object]


def exponent(sizes: Sequence[float], values: Sequence[float]) -> float:
    """Fit value = c * size^e by least squares on logarithms, and return e."""
    fitted = [i for i, size in enumerate(sizes) if size * FITTED >= sizes[-1]]
    x, y = ([math.log(numbers[i]) for i in fitted] for numbers in (sizes, values))
    return statistics.linear_regression(x, y).slope


def line(what: str, sizes: Sequence[int], *rounds: Sequence[float], **more: Any) -> Record:
    """Return a line of the table: values at growing sizes, one list of values for each round.

    More fields: `over`, the name of the size; `allowed`, the greatest exponent; `bound` of the
    value at the greatest size.
    """
    return {"what": what, "over": "P", "sizes": sizes, "rounds": rounds, "bound": None, **more}


def requirements(row: Record) -> Iterator[Requirement]:
    """Yield the requirement on the exponent of a line, and on its last value if it has a bound."""
    judge = exact_interval if "(ms)" in row["what"] else lambda values: certain(*values)
    found = judge([exponent(row["sizes"], values) for values in row["rounds"]])
    yield Requirement("exponent", "<=", row["allowed"], found)
    if row["bound"] is not None:
        last = judge([values[-1] for values in row["rounds"]])
        yield Requirement(f"at {row['sizes'][-1]}", "<=", row["bound"], last)


def documents(count: int, length: int) -> sp.Mask:
    """Return a causal mask over documents of random lengths."""
    bounds = sorted(random.Random(count).sample(range(1, length), count - 1))
    return sp.Mask(causal=True, documents=(0, *bounds, length))


def plan_ring(sharding: sp.Sharding, mask: sp.Mask) -> object:
    """Plan which keys travel how far, and which blocks the middle rank sees."""
    both = (sharding, sharding, mask)
    seen = reach.seen_blocks(*both, sharding.size // 2)
    return reach.hops(*both), reach.shown_keys(*both), seen


def plan_visits(sharding: sp.Sharding, mask: sp.Mask) -> object:
    """Plan the attention of the middle rank to every block that it sees."""
    rank, shown = sharding.size // 2, reach.shown_keys(sharding, sharding, mask)
    seen = enumerate(reach.seen_blocks(sharding, sharding, mask, rank))
    shards = [
        sharding.positions(other)[slice(None) if other == rank else shown.of(other)]
        for other, is_seen in seen
        if is_seen
    ]
    return [blocks.plan_blocks(sharding.positions(rank), shard, mask) for shard in shards]


def plan_sum(sharding: sp.Sharding, _: sp.Mask) -> object:
    """Plan an all-reduce around a ring of the sharding's ranks."""
    return table.program_of(program.operation("all_reduce", 0, sharding.size, (1 << 20,)), "ring")


def forget() -> None:
    """Clear the caches of plans."""
    for cached in (reach.hops, reach.seen_blocks, reach.shown_keys, blocks._plan):
        cached.cache_clear()
    table._of_messages.cache_clear()


def timed(plan: Plan, sharding: sp.Sharding, mask: sp.Mask) -> Span:
    """Time a plan with cold caches. The sharding's hash is known before: it is kept over steps."""
    forget()
    hash(sharding)
    start = time.perf_counter()
    plan(sharding, mask)
    return start, time.perf_counter()


def times(rank: Rank, rounds: int) -> Iterator[Record]:
    """Time all plans in turns, and yield a line of milliseconds for each."""
    striped = sp.Sharding.striped
    even = {P: (sp.Sharding.zigzag(TOKENS * P, P), sp.Mask(causal=True)) for P in TIMED}
    packed = {P: (striped(TOKENS * P, P), documents(20_000, TOKENS * P)) for P in TIMED}
    long, short = TOKENS << 10, TOKENS << 7
    many = {n: (striped(long, 1024), documents(n, long)) for n in (64, 1250, 5000, 20_000)}
    few = {n: (striped(short, 8), documents(n, short)) for n in (64, 188, 750, 3000)}
    over: Record = {"over": "documents"}
    cases: list[tuple[str, Plan, Any, Record]] = [
        ("ring, causal, zigzag", plan_ring, even, {}),
        ("ring, 20,000 documents, striped", plan_ring, packed, {}),
        ("ring, P = 1024, striped", plan_ring, many, {**over, "bound": 20.0}),
        ("ring, P = 8, striped", plan_ring, few, {**over, "bound": 2.0}),
        ("all visits, causal, zigzag", plan_visits, even, {}),
        ("all visits, P = 8, striped", plan_visits, few, over),
        ("all-reduce around a ring", plan_sum, even, {}),
    ]
    runners = {f"{c[0]} {n}": partial(timed, c[1], *one) for c in cases for n, one in c[2].items()}
    spans = race(rank.world, runners, rounds, seed=rounds)
    for name, _, sizes, more in cases:
        by_size = [[1e3 * (end - start) for start, end in spans[f"{name} {n}"][0]] for n in sizes]
        turns = zip(*by_size, strict=True)
        yield line(f"plan (ms): {name}", [*sizes], *turns, allowed=LINEAR, **more)


def kept(build: Callable[[], object]) -> int:
    """Return the bytes of Python objects and arrays that the result of `build` keeps alive."""
    forget()
    tracemalloc.start()
    _, (held, _) = build(), tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return held


def mesh(size: int) -> sp.Mesh:
    """Make the mesh of the middle one of `size` ranks, without the other ranks."""
    comm = MagicMock(rank=size // 2, size=size, **{"bcast.side_effect": lambda value: value})
    comm.Dup.return_value = comm.Split.return_value = comm
    with patch("sp_core.agreement.agree", lambda comm, call, value, error: (value,) * comm.size):
        return sp.Mesh(comm, transport="host", tuning="off", sp=size)


def sharding(size: int) -> object:
    """Make a sharding, and what it caches for each rank."""
    made = sp.Sharding.zigzag(TOKENS * size, size)
    return made, hash(made), made.lengths, made.fingerprint, made._segment_order


def predicted(whole: cost.Attention, rank: int, ulysses: int) -> dict[str, cost.Both]:
    """Return what a rank sends by each scheme; in a hybrid, groups of `ulysses` ranks share heads.

    Args:
        whole: the attention of all ranks.
        rank: the rank whose messages are counted.
        ulysses: the number of ranks of a group, which divides that of all ranks.
    """
    starts = range(0, whole.sharding.size, ulysses)
    groups = [list(range(start, start + ulysses)) for start in starts]
    return {
        "ring": cost.ring(whole, rank),
        "ulysses": cost.ulysses(whole, rank),
        "allgather_kv": cost.allgather_kv(whole, rank),
        "hybrid": cost.hybrid(whole, rank // ulysses, rank % ulysses, groups),
    }


def computed_for(size: int) -> dict[tuple[str, float], float]:
    """Return messages and bytes of one rank in a step, and bytes of objects that list all ranks.

    A key is a name and the greatest exponent. The sequence is the same for all numbers of ranks.
    """
    rank, causal = size // 2, sp.Mask(causal=True)
    owned, near = sp.Sharding.zigzag(1 << 18, size), sp.Sharding.contiguous(TOKENS * size, size)
    sizes = (1, 1 << 14, 1 << 14, 1, 4)  # of float32 with one element for each head
    whole = cost.Attention(owned, owned, causal, *sizes)
    window = cost.Attention(near, near, sp.Mask(True, TOKENS // 2), *sizes)
    both = predicted(whole, rank, 8)
    steps: dict[str, tuple[cost.Both, float, float]] = {
        "ring": (both["ring"], LINEAR, FLAT),
        "ring, window": (cost.ring(window, rank), FLAT, FLAT),
        "hybrid, ulysses=8": (both["hybrid"], LINEAR, FLAT),
        "allgather_kv": (both["allgather_kv"], 0, FLAT),
        "ulysses": (both["ulysses"], 0, FLAT - 1),
        "tp_sp": (cost.tp_sp(owned, rank, 1, 4096, 4), 0, FLAT),
    }
    found: dict[tuple[str, float], float] = {
        ("bytes of Mesh and Communicator", LINEAR): kept(partial(mesh, size)),
        ("bytes of Sharding, zigzag, and its caches", LINEAR): kept(partial(sharding, size)),
        ("bytes of the plan of a ring", LINEAR): kept(partial(plan_ring, owned, causal)),
    }
    for name, (passes, messages, sent) in steps.items():
        total = sum(passes, cost.Traffic())
        found |= {(f"messages: {name}", messages): total.messages} if total.messages else {}
        found[f"MB sent: {name}", sent] = total.bytes_sent / 1e6
    for op, algorithm, counts, allowed in (
        ("all_reduce", "ring", 1, LINEAR),
        ("all_reduce", "recursive_doubling", 1, LOG),
        ("all_reduce", "rabenseifner", 1, LOG),
        ("all_gather", "bruck", size, LOG),
    ):
        asked = program.operation(op, rank, size, (1 << 20,) * counts)
        held = kept(partial(table.program_of, asked, algorithm))
        messages, *_ = table.program_of(asked, algorithm).figures
        found |= {
            (f"messages: {op}, {algorithm}", allowed): messages,
            (f"bytes of the plan: {op}, {algorithm}", allowed): held,
        }
    return found


def computed(setting: Record, rank: Rank) -> Record:
    """Return the lines that one rank computes without the others."""
    found = [computed_for(size) for size in (8, *COMPUTED)][1:]  # the first loads modules
    lines = [
        line(key[0], COMPUTED, [values[key] for values in found], allowed=key[1])
        for key in found[0]
    ]
    return {"lines": [*times(rank, setting["rounds"]), *lines]}


def measure(_: Record, rank: Rank) -> Record:
    """Compare every scheme with one process, forward and backward, and count live bytes.

    Results are those over messages and in windows. "peaks" are the live bytes of a step over
    messages; "own" are the bytes at the end that no other process shares. Both are those of the
    rank with the most.

    Raises:
        AssertionError: a result, a gradient or a count of messages is wrong.
    """
    # brings hypothesis, which only this needs
    from tests.oracle import attention_check as oracle
    from tests.oracle.strategies import AttentionProblem

    world, size, dense = rank.world, rank.world.size, oracle.reference.attention

    def on_first(*tensors: Any, **options: Any) -> Any:
        """Compute the reference, of 250 MB with 64 heads, on rank 0 for all ranks."""
        found = None if world.rank else dense(*tensors, **options)
        meet(world)
        return world.bcast(found)

    terms = ("float64", "zigzag", "zigzag", sp.Mask(causal=True), None, 1.0)
    drawn = ("normal", "normal", (True, True, True), "plain", 7)
    problem = AttentionProblem(1, 3 * size + 5, 3 * size + 5, size, 1, 4, *terms, *drawn)
    peaks: dict[str, int] = {}
    for transport in ("host", "window"):
        with (
            patch.object(oracle.reference, "attention", on_first),
            patch.object(base, "PAUSE_SECONDS", REST_SECONDS),
            patch.object(agreement.Question, "wait", base.wait),
            # a ring of 2 holds less than one of more ranks
            sp.Mesh(world, transport=transport, ring=size // 4, ulysses=4) as ranks,
        ):
            comm = ranks["ring", "ulysses"]
            schemes = {name: partial(run, comm=comm) for name, run in SCHEMES.items()}
            schemes["hybrid"] = partial(sp.hybrid_attention, mesh=ranks)
            for name, scheme in schemes.items():
                rank.tell(f"{name}, transport {transport}")
                oracle.check_attention(name, scheme, problem, comm)
                peak = live(name, scheme, ranks) if transport == "host" else 0
                meet(world)
                peaks[name] = max(peaks.get(name, 0), *world.allgather(peak))
    return {"peaks": peaks, "own": max(world.allgather(own_bytes()))}


def meet(world: Any) -> None:
    """Wait for all ranks asleep: waiting in MPI would take time from a rank that computes.

    With many ranks each must look less often than in `meet_asleep`.
    """
    base.wait(base.Transfer([world.Ibarrier().Test]))


def live(name: str, scheme: Callable[..., Any], ranks: sp.Mesh) -> int:
    """Return the peak bytes of a step on the first, the middle and the last rank; 0 on the others.

    Raises:
        AssertionError: the numbers of messages or bytes sent are not those of `predicted`.
    """
    comm, groups = ranks["ring", "ulysses"], (("ring", "ulysses"), "ring", "ulysses")
    owned, causal = sp.Sharding.zigzag(TOGETHER, comm.size), sp.Mask(causal=True)
    q, k, v = (torch.ones(1, TOGETHER // comm.size, HEADS, 8, requires_grad=True) for _ in range(3))

    def step() -> None:
        torch.autograd.grad(scheme(q, k, v, sharding=owned, mask=causal).sum(), (q, k, v))

    step()  # the first step makes the buffers that later steps use again
    for axes in groups:
        ranks[axes].counters.reset()
    peak, is_counted = 0, comm.rank in (0, comm.size // 2, comm.size - 1)
    if is_counted:  # counting takes longer than the step
        peak = peak_memory(step, (q, k, v), comm.device)[0]
    else:
        step()
    counts = [ranks[axes].counters.total() for axes in groups]
    whole = cost.Attention(owned, owned, causal, 1, HEADS, HEADS, 8, 4)
    wanted = sum(predicted(whole, comm.rank, 4)[name], cost.Traffic())
    assert wanted.messages == sum(count.messages for count in counts), name
    assert wanted.bytes_sent == sum(count.bytes_sent for count in counts), name
    return peak


def own_bytes() -> int:
    """Return the bytes of this process that no other process shares."""
    lines = map(str.split, Path("/proc/self/smaps_rollup").read_text().splitlines())
    return 1024 * sum(int(line[1]) for line in lines if line[0].startswith("Private_"))


def lines_of(launches: Sequence[Record]) -> Iterator[Record]:
    """Yield the lines of the launch of one rank, and those of live bytes over all others."""
    yield from (row for one in launches for row in one.get("lines", ()))
    many = sorted((one for one in launches if "peaks" in one), key=lambda one: one["ranks"])
    for name in many[0]["peaks"] if len(many) > 1 else ():
        # allgather_kv holds the keys of all tokens, a group of heads at a time
        allowed = TENTH - (name != "allgather_kv")
        sizes, peaks = zip(*((one["ranks"], one["peaks"][name]) for one in many), strict=True)
        yield line(f"live bytes: {name}", sizes, peaks, allowed=allowed)


def show(document: Record) -> Iterator[Part]:
    """Yield the table, the schemes that were right, and a complaint for each exceeded limit."""
    rows, columns = [], ("what", "over", "measured", "", "must be", "found", "verdict")
    for row in lines_of(document["launches"]):
        medians = map(statistics.median, zip(*row["rounds"], strict=True))
        told = (f"{n}: {significant(m)}" for n, m in zip(row["sizes"], medians, strict=True))
        start, needed = (row["what"], row["over"], ", ".join(told)), [*requirements(row)]
        rows += [(*start, one.text, *one.cells()) for one in needed]
        yield from unmet(needed, f"{row['what']} over {row['over']}")
    if rows:
        yield make("growth", columns, rows, WITHIN)
    for one in document["launches"]:
        if "peaks" in one:
            yield (
                f"{one['name']}: right over messages and in windows, forward and backward: "
                f"{', '.join(one['peaks'])}; a rank has {one['own'] / 1e6:.0f} MB of its own"
            )


def plan(options: argparse.Namespace) -> tuple[Record, list[Entry]]:
    """Return the number of rounds; a launch of one rank, and one for each number of ranks."""
    alone = Entry(
        "computed", 1, {"rounds": options.rounds}, measure="benchmarks.contests.growth:computed"
    )
    counts = numbers_of_ranks(options.ranks, 16, divide=HEADS)
    return {"rounds": options.rounds}, [alone, *(Entry(f"P = {size}", size, {}) for size in counts)]


OPTIONS = {
    "--ranks": about(
        default="16,32,64", metavar="P,P,...", help="numbers of ranks (default: %(default)s)"
    ),
    "--rounds": about(
        type=at_least(1), default=FEWEST, metavar="N", help="timed rounds (default: %(default)s)"
    ),
}
growth = Contest(
    *("growth", __doc__, OPTIONS, plan, "benchmarks.contests.growth:measure", show),
    file="growth_{mpi}.json",
    timeout=1200.0,
)
