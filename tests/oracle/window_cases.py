"""Simulate collectives in shared memory: ranks step in any order that their flags allow."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from random import Random

import torch
from torch import Tensor

import sp_core as sp
from oracle.fake_device import DelayedMemory
from oracle.schedule_cases import pieces
from sp_core.programs import (
    HALF,
    OWN,
    SLOTS,
    Buffer,
    Combine,
    Operation,
    Program,
    Region,
    in_window,
    operation,
)
from sp_core.transport import Window
from sp_core.transport.shared import HOST

OPS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "reduce", "shift")


@dataclass(frozen=True)
class Problem:
    """Describe a collective on pieces of any sizes (see `schedule_cases.pieces`).

    Args:
        op: the collective.
        shape: the argument of `pieces`.
        place: the root, or the offset of a shift.
        resident, in_place: as in `Operation`.
        long: the factor of all sizes; a large one makes an all-reduce need two steps.
    """

    op: str
    shape: int
    place: int
    resident: bool
    in_place: bool
    long: int

    def task(self, rank: int, size: int, slot: int) -> Operation:
        """Return the operation of one rank."""
        counts = tuple(count * self.long for count in pieces(size, self.shape))
        made = operation(self.op, rank, size, counts, self.place, itemsize=4, slot=slot)
        if self.op == "all_to_all":
            square = [tuple(count * (other % 3) for other in counts) for count in counts]
            recv = tuple(row[rank] for row in square)
            return made._replace(send=square[rank], recv=recv, longest=max(map(max, square)))
        in_place = self.in_place and self.op == "all_reduce"
        return made._replace(resident=self.resident, in_place=in_place)

    def expected(self, tasks: Sequence[Operation], inputs: Sequence[Tensor], rank: int) -> Tensor:
        """Return the result that a rank must get."""
        size, task = len(tasks), tasks[rank]
        if self.op == "shift":
            return inputs[(rank - self.place) % size]
        if self.op == "broadcast":
            return inputs[task.root] if rank != task.root else inputs[rank][:0]
        if self.op in ("all_gather", "all_to_all"):
            cut = [x.split(list(t.send)) for x, t in zip(inputs, tasks, strict=True)]
            return torch.cat([parts[rank if self.op == "all_to_all" else 0] for parts in cut])
        total = in_rank_order(inputs)
        if self.op == "reduce" and rank != task.root:
            return total[:0]
        return total.split(list(task.send))[rank] if self.op == "reduce_scatter" else total


def in_rank_order(parts: Sequence[Tensor]) -> Tensor:
    """Return the sum in rank order; half types are added in float32 and rounded once."""
    dtype = parts[0].dtype
    wide = torch.float32 if dtype in HALF else dtype
    return reduce(torch.add, (part.to(wide) for part in parts)).to(dtype)


class Node:
    """Hold the shared memory of some ranks, and make their steps in a random order.

    Args:
        size: the number of ranks.
        slot: the number of elements of a slot.
        dtype: the dtype of all vectors.
        seed: the seed of the order in which ranks make their steps.
    """

    def __init__(self, size: int, slot: int, dtype: torch.dtype, seed: int) -> None:
        self.size, self.slot = size, slot
        self._tmp = [torch.full((SLOTS * slot,), 77.0).to(dtype) for _ in range(size)]
        self._random = Random(seed)

    def play(
        self, problems: Sequence[Problem], inputs: Sequence[Sequence[Tensor]]
    ) -> list[list[Tensor]]:
        """Run collectives one after the other, and return the results of all ranks for each.

        Args:
            problems: the collectives.
            inputs: for each collective, the inputs of all ranks.
        """
        self._steps: list[list[tuple[int, bool, Program, int]]] = [[] for _ in range(self.size)]
        self._buffers: list[list[dict[Buffer, Tensor]]] = []
        for number, problem in enumerate(problems):
            for rank in range(self.size):
                task = problem.task(rank, self.size, self.slot)._replace(
                    first=len(self._steps[rank]) % SLOTS
                )
                program = in_window(task)
                self._steps[rank] += [
                    (number, step == 0, program, step) for step in range(len(program.steps))
                ]
            self._buffers.append([])
            for rank, x in enumerate(inputs[number]):
                task, mine = problem.task(rank, self.size, self.slot), x.clone()
                result = mine if task.in_place else x.new_full((sum(task.recv),), 99)
                self._buffers[-1].append({Buffer.IN: mine, Buffer.OUT: result})
        self._run()
        return [[buffers[Buffer.OUT] for buffers in of_ranks] for of_ranks in self._buffers]

    def _run(self) -> None:
        made = [0] * self.size
        while any(len(steps) > made[rank] for rank, steps in enumerate(self._steps)):
            rank = self._random.choice([rank for rank in range(self.size) if self._may(rank, made)])
            number, _, program, step = self._steps[rank][made[rank]]
            for combine in program.steps[step].then:
                self._combine(self._buffers[number], rank, combine)
            made[rank] += 1

    def _may(self, rank: int, made: Sequence[int]) -> bool:
        """Return whether the flags allow a rank to make its next step."""
        if made[rank] == len(self._steps[rank]):
            return False
        first = self._steps[rank][made[rank]][1]
        return all(other >= made[rank] - first for other in made)

    def _combine(
        self, buffers: Sequence[dict[Buffer, Tensor]], rank: int, combine: Combine
    ) -> None:
        def memory(region: Region) -> Tensor:
            owner = rank if region.rank == OWN else region.rank
            whole = (
                self._tmp[owner] if region.buffer is Buffer.TMP else buffers[owner][region.buffer]
            )
            assert region.stop <= len(whole)
            return whole[region.start : region.stop]

        memory(combine.into).copy_(in_rank_order([memory(part) for part in combine.parts]))


def inputs_of(
    problem: Problem, size: int, slot: int, dtype: torch.dtype, seed: int
) -> list[Tensor]:
    """Return the numbers of each rank; their sums depend on the order."""
    random = torch.Generator().manual_seed(seed)
    lengths = [sum(problem.task(rank, size, slot).send) for rank in range(size)]
    if problem.op == "broadcast":
        lengths = [max(lengths)] * size
    return [
        (torch.randn(length, generator=random) * 10.0 ** (rank % 4)).to(dtype)
        for rank, length in enumerate(lengths)
    ]


def use_window(comm: sp.Communicator, slot_bytes: int = 64, *, on_device: bool = False) -> None:
    """Give a communicator shared memory that is full of 0xFF bytes. Every rank calls this."""
    comm.window = Window(comm._comm, slot_bytes, DelayedMemory() if on_device else HOST)
    comm.window.slots[comm.rank].fill_(0xFF)
