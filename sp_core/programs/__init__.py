"""Describe the messages, sums and copies of collectives as plain data. Nothing here communicates.

An `Operation` is one collective with its sizes, a `Program` the list of steps of one rank in it.
`program_of` and `in_window` return the program of an operation. `cost` predicts what a program
sends. `sp_core.collectives.execution` runs programs.
"""

from sp_core.programs.program import (
    HALF,
    OWN,
    REDUCTIONS,
    WIDE_BLOCK,
    Buffer,
    Combine,
    Message,
    Operation,
    Program,
    Region,
    Step,
    operation,
    wide_length,
)
from sp_core.programs.table import (
    ALGORITHMS,
    COMMON_ALGORITHMS,
    IN_RANK_ORDER,
    SCHEDULED,
    check_algorithm,
    cost,
    defaults,
    program_of,
    segment_length,
    usable,
)
from sp_core.programs.window import SLOTS, in_window

__all__ = [
    "ALGORITHMS",
    "COMMON_ALGORITHMS",
    "HALF",
    "IN_RANK_ORDER",
    "OWN",
    "REDUCTIONS",
    "SCHEDULED",
    "SLOTS",
    "WIDE_BLOCK",
    "Buffer",
    "Combine",
    "Message",
    "Operation",
    "Program",
    "Region",
    "Step",
    "check_algorithm",
    "cost",
    "defaults",
    "in_window",
    "operation",
    "program_of",
    "segment_length",
    "usable",
    "wide_length",
]
