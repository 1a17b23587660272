"""Test that calls which differ between ranks give their result, or one error on all ranks."""

import functools
import os
import random
import sys
from typing import Any

import pytest
from domains import attention, collectives
from domains.declared import Subject
from domains.differing import alone, compared, faults, known_of, unchecked
from domains.subjects import SUBJECTS

from sp_core.testing import spmd, tier

SEED = int(os.environ.get("SP_DOMAIN_SEED", "1"))
SAMPLE = 3
"""The number of differences of each call that a run tries with `check="off"`. Under mpiexec it is
also the number of those that may be valid. `nox -s domains` and `explore` try all."""

COMPARED = compared(SUBJECTS)
UNDER_MPI = [*attention.SUBJECTS, *collectives.SUBJECTS]
"""Calls that are tested under mpiexec too. The other calls are built from these."""


def check(comm: Any, subject: Subject) -> None:
    """Change each argument on one rank and on all. Then one rank makes one call more, or one less.

    Ranks in different groups of an axis may get different errors.
    """
    sample = SAMPLE if tier() == "mpi" else sys.maxsize
    found = list(faults(subject, subject.draw(subject.base, 1), comm, sample))
    assert len(found) > 5
    assert not any(found), "\n".join(filter(None, found))
    for is_extra in (True, False):
        told = comm.allgather(
            alone(subject, subject.draw(subject.base, 1), comm, is_extra=is_extra)
        )
        assert {bool(text) for text in told} == {"a call on one rank" not in subject.allowed}, told


@pytest.mark.ranks
@pytest.mark.parametrize(
    "subject", UNDER_MPI if tier() == "mpi" else COMPARED, ids=lambda subject: subject.name
)
def test_ranks_that_differ_are_told_so_or_get_their_result(subject: Subject) -> None:
    @spmd(subject.ranks(subject.draw(subject.base, 1)))
    def ranks_that_differ(comm: Any) -> None:
        check(comm, subject)

    ranks_that_differ()


@pytest.mark.parametrize(
    "subject", [s for s in COMPARED if "(check)" in s.factors], ids=lambda subject: subject.name
)
def test_ranks_that_differ_unchecked_get_an_error_or_their_result(subject: Subject) -> None:
    chosen = random.Random(f"{SEED} {subject.name}").sample(known_of(subject), SAMPLE)
    assert not [fault for fault in map(functools.partial(unchecked, subject), chosen) if fault]
