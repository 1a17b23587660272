"""Binomial trees: broadcast from one rank and reduction to one rank, each the other way round, in ceil(log2 P) steps.

Six ranks, numbered from the root; who sends to whom in the steps of a broadcast:

    step 0      0 ------------> 4
    step 1      0 ----> 2       4 (----> 6)
    step 2      0 -> 1  2 -> 3  4 -> 5

A reduction runs the arrows backwards, last step first, and adds what arrives to what is there.
Messages: P-1 in all, each of the whole vector. The addends are in the order of their numbers; a
half type is rounded at every addition.

Source: Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in
MPICH", IJHPCA 19 (2005), sections 4.2 and 4.6.
"""

from __future__ import annotations

from sp_core.schedules.program import Combine, Message, Program, Step, inp, out, program, tmp


def broadcast(rank: int, size: int, count: int, root: int) -> Program:
    """Receive from the parent, then serve the children, those with the largest families first."""
    number, whole = (rank - root) % size, range(count)
    have = inp(whole) if rank == root else out(whole)
    steps = [Step((), (Message(_rank(number & (number - 1), size, root), have),))] if number else []
    steps += [
        Step((Message(_rank(child, size, root), have),))
        for child in reversed(_children(number, size))
    ]
    return program(steps)


def reduce(rank: int, size: int, count: int, root: int) -> Program:
    """Add what the children have, those with the smallest families first, then serve the parent."""
    number, whole = (rank - root) % size, range(count)
    children = _children(number, size)
    landed = tmp(0, count)
    more = 1 if rank == root or len(children) == 1 else 2  # vectors of scratch
    total = out(whole) if rank == root else tmp((more - 1) * count, count)
    have, steps = inp(whole), []
    for child in children:
        received = Message(_rank(child, size, root), landed)
        steps.append(Step((), (received,), (Combine(total, (have, landed)),)))
        have = total
    if number:
        steps.append(Step((Message(_rank(number & (number - 1), size, root), have),)))
    return program(steps, more * count if children else 0)


def _rank(number: int, size: int, root: int) -> int:
    return (number + root) % size


def _children(number: int, size: int) -> list[int]:
    """Return the numbers with one more bit, below the lowest one, the smallest family first."""
    lowest = number & -number if number else 1 << size.bit_length()
    bits = (1 << place for place in range(lowest.bit_length() - 1))
    return [number + bit for bit in bits if number + bit < size]
