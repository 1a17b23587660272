"""Records of measurements: JSON lines, one for each case, number of ranks and launch, described by `schema.json`.

A file of records is data from elsewhere (another machine, another commit, a pull request), so what is read is checked as if
somebody wanted to do harm with it. What is written is checked in the same way: nothing is written that cannot be read.
"""

from benchmarks.records.check import SCHEMA_VERSION, Record, RecordError, parse, reason, validate
from benchmarks.records.files import Reading, append, read
from benchmarks.records.identity import fingerprint, key

__all__ = [
    "SCHEMA_VERSION",
    "Reading",
    "Record",
    "RecordError",
    "append",
    "fingerprint",
    "key",
    "parse",
    "read",
    "reason",
    "validate",
]
