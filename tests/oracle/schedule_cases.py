"""Draw collectives by a named algorithm, with the schedule that each must follow."""

from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

import sp_core as sp
from oracle.collective_cases import NEEDED
from oracle.proof import Schedule
from sp_core.programs import ALGORITHMS, COMMON_ALGORITHMS, operation, program_of
from sp_core.segments import split_sizes

NAMES = [
    (op, name)
    for op, names in ALGORITHMS.items()
    for name in names
    if name not in COMMON_ALGORITHMS
]
"""Every collective with each of its algorithms that has a schedule."""

SUMS = ("all_reduce", "reduce_scatter", "reduce")
FLOATS = ("float32", "float64", "bfloat16", "float16")


def schedule(
    op: str,
    algorithm: str,
    counts: tuple[int, ...],
    root: int = 0,
    segment: int | None = None,
    nodes: tuple[int, ...] = (),
) -> Schedule:
    """Return a schedule with pieces of `counts`, or of their products in an all-to-all."""
    more: dict[str, Any] = {"segment": segment, "nodes": nodes}
    tasks = [operation(op, rank, len(counts), counts, root, **more) for rank in range(len(counts))]
    if op == "all_to_all":
        rows = [tuple(a * b for b in counts) for a in counts]
        tasks = [
            task._replace(send=row, recv=row, longest=max(counts) ** 2)
            for task, row in zip(tasks, rows, strict=True)
        ]
    programs = tuple(program_of(task, algorithm) for task in tasks)
    send, recv = tuple(task.send for task in tasks), tuple(task.recv for task in tasks)
    return Schedule(op, send, recv, root, programs)


def pieces(size: int, shape: int) -> tuple[int, ...]:
    """Return sizes of pieces: 0, 1, P - 1, P, P + 1 or 3 P elements dealt evenly, else any."""
    totals = (0, 1, size - 1, size, size + 1, 3 * size)
    if shape < len(totals):
        return split_sizes(totals[shape], size)
    random = Random(shape)
    return tuple(random.randrange(8) for _ in range(size))


def nodes_of(size: int, layout: int) -> tuple[int, ...]:
    """Return the node of each rank: one for all, one each, pairs, alternating, else random."""
    ranks = range(size)
    usual = ([0] * size, ranks, [rank // 2 for rank in ranks], [rank % 2 for rank in ranks])
    random = Random(layout)
    return (
        tuple(usual[layout]) if layout < len(usual) else tuple(random.randrange(3) for _ in ranks)
    )


@dataclass(frozen=True)
class Vectors:
    """Describe a call of a collective on random vectors.

    Args:
        op, algorithm: the collective and its algorithm.
        shape: says how long the pieces are (see `pieces`).
        place: the root, modulo the number of ranks.
        dtype: the name of a torch dtype.
        seed: the seed of the vectors.
        layout: says which ranks share a node (see `nodes_of`).
    """

    op: str
    algorithm: str
    shape: int
    place: int
    dtype: str
    seed: int
    layout: int = 0

    def schedule(self, size: int, segment: int | None) -> Schedule:
        """Return the schedule that the ranks must follow."""
        return schedule(
            self.op,
            self.algorithm,
            pieces(size, self.shape),
            self.place % size,
            segment,
            self.nodes(size),
        )

    def nodes(self, size: int) -> tuple[int, ...]:
        """Return the node of each rank."""
        return nodes_of(size, self.layout)

    def inputs(self, size: int) -> list[Tensor]:
        """Return each rank's numbers. Large ones cancel, so that a sum depends on its order."""
        random = torch.Generator().manual_seed(self.seed)
        counts = pieces(size, self.shape)
        large = torch.randn(sum(counts), generator=random) * (
            1e3 if self.dtype == "float16" else 1e6
        )
        found = []
        for rank in range(size):
            length = counts[rank] if self.op == "all_gather" else sum(counts)
            shape = (length, counts[rank]) if self.op == "all_to_all" else (length,)
            small = torch.randn(shape, generator=random, dtype=torch.float64)
            cancels = rank % 3 == 2 or rank + 1 < size
            x = small + large * (0, 1, -1)[rank % 3] * cancels if self.op in SUMS else small
            found.append(x.to(getattr(torch, self.dtype)))
        return found

    def call(self, x: Tensor, comm: sp.Communicator) -> Tensor:
        """Call the collective, and return the result."""
        counts = pieces(comm.size, self.shape)
        own: dict[str, dict[str, Any]] = {
            "all_to_all": NEEDED["all_to_all"] | {"split_sizes": counts, "concat_sizes": counts},
            **{op: {"sizes": counts} for op in ("all_gather", "reduce_scatter")},
            **{op: {"root": self.place % comm.size} for op in ("broadcast", "reduce")},
        }
        result: Tensor = getattr(sp, self.op)(
            x, comm=comm, algorithm=self.algorithm, **own.get(self.op, {})
        )
        return result


@st.composite
def vectors(
    draw: st.DrawFn, ops: tuple[str, ...] = tuple(ALGORITHMS), dtypes: tuple[str, ...] = FLOATS
) -> Vectors:
    """Draw any collective among `ops` by any algorithm that has a schedule."""
    op, algorithm = draw(st.sampled_from([name for name in NAMES if name[0] in ops]))
    dtype = draw(st.sampled_from(dtypes))
    return Vectors(
        op,
        algorithm,
        draw(st.integers(0, 30)),
        draw(st.integers(0, 7)),
        dtype,
        draw(st.integers(0, 999)),
        draw(st.just(0) | st.integers(0, 9)),
    )
