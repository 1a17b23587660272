"""Records of measurements: a JSON line for each case, number of ranks and launch.

A file of records is data from elsewhere (another machine, another commit, a pull request), so it is
checked like hostile input. Written records are checked in the same way: nothing is written that
cannot be read.
"""

from benchmarks.records.check import Reading, RecordError, append, parse, read, reason
from benchmarks.records.types import (
    AXIS,
    MEASURED,
    SCHEMA_VERSION,
    Case,
    Record,
    fingerprint,
    make_case,
)

__all__ = [
    "AXIS",
    "MEASURED",
    "SCHEMA_VERSION",
    "Case",
    "Reading",
    "Record",
    "RecordError",
    "append",
    "fingerprint",
    "make_case",
    "parse",
    "read",
    "reason",
]
