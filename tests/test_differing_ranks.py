"""Ranks that say different things: every call and argument gives its documented result, or one error on all ranks."""

from __future__ import annotations

import pytest
from domains.declared import Subject
from domains.differing import fault, listed
from domains.subjects import SUBJECTS

ON_RANKS = [subject for subject in SUBJECTS if any(factor.startswith(("comm.", "mesh.")) for factor in subject.factors)]


@pytest.mark.parametrize("subject", ON_RANKS, ids=lambda subject: subject.name)
def test_an_argument_that_differs_is_refused_on_every_rank_or_harmless(subject: Subject) -> None:
    drawn = subject.draw(subject.base, 1)
    faults = [fault(subject, drawn, difference) for difference in listed(subject, drawn)]
    assert not any(faults), "\n".join(filter(None, faults))
    assert len(faults) > 5
