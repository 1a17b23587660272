"""Describe the messages, sums and copies of collectives as plain data. Nothing here communicates.

An `Operation` is one collective with its sizes, a `Program` the list of steps of one rank in it.
`program_of` and `in_window` return the program of an operation. `cost` predicts what a program
sends. `sp_core.collectives.execution` runs programs.
"""

from sp_core.programs.program import (
    HALF as HALF,
    OWN as OWN,
    REDUCTIONS as REDUCTIONS,
    WIDE_BLOCK as WIDE_BLOCK,
    Buffer as Buffer,
    Combine as Combine,
    Message as Message,
    Operation as Operation,
    Program as Program,
    Region as Region,
    Step as Step,
    operation as operation,
    wide_length as wide_length,
)
from sp_core.programs.table import (
    ALGORITHMS as ALGORITHMS,
    COMMON_ALGORITHMS as COMMON_ALGORITHMS,
    IN_RANK_ORDER as IN_RANK_ORDER,
    SCHEDULED as SCHEDULED,
    check_algorithm as check_algorithm,
    cost as cost,
    defaults as defaults,
    program_of as program_of,
    segment_length as segment_length,
    usable as usable,
)
from sp_core.programs.window import SLOTS as SLOTS, in_window as in_window
