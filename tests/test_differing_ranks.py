"""Ranks that say different things: every call and argument gives its documented result, or one error on all ranks."""

from __future__ import annotations

from typing import Any

import pytest
from domains.declared import Subject
from domains.differing import faults
from domains.subjects import SUBJECTS

from sp_core.testing import spmd

BY_RANKS = {
    size: [s for s in SUBJECTS if any(f.startswith(("comm.", "mesh.")) for f in s.factors) and s.ranks(s.draw(s.base, 1)) == size]
    for size in (2, 4)
}


@pytest.mark.parametrize("subject", BY_RANKS[2], ids=lambda subject: subject.name)
@spmd(2)
def test_two_ranks_that_differ_are_told_so_or_get_their_result(comm: Any, subject: Subject) -> None:
    found = list(faults(subject, subject.draw(subject.base, 1), comm))
    assert len(found) > 5
    assert not any(found), "\n".join(filter(None, found))


@pytest.mark.parametrize("subject", BY_RANKS[4], ids=lambda subject: subject.name)
@spmd(4)
def test_four_ranks_that_differ_are_told_so_or_get_their_result(comm: Any, subject: Subject) -> None:
    found = list(faults(subject, subject.draw(subject.base, 1), comm))
    assert len(found) > 5
    assert not any(found), "\n".join(filter(None, found))
