"""Every subject: the public calls that have a declared domain."""

from __future__ import annotations

from domains import attention, collectives, exact, masks, numeric

SUBJECTS = [
    *attention.SUBJECTS,
    *collectives.SUBJECTS,
    *exact.SUBJECTS,
    *masks.SUBJECTS,
    *numeric.SUBJECTS,
]
BY_NAME = {subject.name: subject for subject in SUBJECTS}
