"""What each collective is for: of which contributions every element of a result is the sum."""

from __future__ import annotations

from sp_core.schedules.definition import Schedule

Value = tuple[tuple[int, int], ...]
"""Contributions (rank, place in its IN), sorted."""


def expected(schedule: Schedule, rank: int) -> list[Value]:
    """The elements of a rank's OUT."""
    everybody = range(schedule.size)
    total = sum(schedule.recv[rank])
    match schedule.op:
        case "all_gather":
            return [((q, i),) for q in everybody for i in range(schedule.recv[rank][q])]
        case "all_to_all":
            starts = [sum(schedule.send[q][:rank]) for q in everybody]
            return [((q, starts[q] + i),) for q in everybody for i in range(schedule.recv[rank][q])]
        case "broadcast":
            return [((schedule.root, i),) for i in range(total)]
        case "reduce_scatter":
            start = sum(schedule.send[rank][:rank])
            return [tuple((q, start + i) for q in everybody) for i in range(total)]
        case _:
            return [tuple((q, i) for q in everybody) for i in range(total)]
