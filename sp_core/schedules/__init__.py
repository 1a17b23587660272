"""Collectives as plain data: who sends what to whom in which step. Computed, printed, costed and proven without MPI."""

from sp_core.schedules.checking import ScheduleError, verify
from sp_core.schedules.definition import Buffer, Combine, Message, Program, Region, Schedule, Step
from sp_core.schedules.figures import WIDE_BLOCK, Cost, cost, show, wide_length
from sp_core.schedules.replay import HALF, REDUCTIONS, replay
from sp_core.schedules.table import (
    ALGORITHMS,
    IN_RANK_ORDER,
    LIBRARY,
    SCHEDULED,
    SEGMENT_BYTES,
    Task,
    check_algorithm,
    defaults,
    program_of,
    schedule_of,
    segment_length,
)
from sp_core.schedules.window import in_window
from sp_core.schedules.window_definition import SLOTS, Gather, InWindow, Place, WindowTask, widest_sum, window_cost

__all__ = [
    "ALGORITHMS",
    "HALF",
    "IN_RANK_ORDER",
    "LIBRARY",
    "REDUCTIONS",
    "SCHEDULED",
    "SEGMENT_BYTES",
    "SLOTS",
    "WIDE_BLOCK",
    "Buffer",
    "Combine",
    "Cost",
    "Gather",
    "InWindow",
    "Message",
    "Place",
    "Program",
    "Region",
    "Schedule",
    "ScheduleError",
    "Step",
    "Task",
    "WindowTask",
    "check_algorithm",
    "cost",
    "defaults",
    "in_window",
    "program_of",
    "replay",
    "schedule_of",
    "segment_length",
    "show",
    "verify",
    "wide_length",
    "widest_sum",
    "window_cost",
]
