"""Every public call over its declared domain: each named part of each parameter is drawn, and judged against a reference."""

from __future__ import annotations

import os

import pytest
from domains.declared import Subject
from domains.public import without_domain
from domains.subjects import SUBJECTS
from domains.trial import draw_singles

SEED = int(os.environ.get("SP_DOMAIN_SEED", "1"))


@pytest.mark.parametrize("subject", SUBJECTS, ids=lambda subject: subject.name)
def test_every_part_of_every_domain_is_drawn(subject: Subject) -> None:
    assert draw_singles(subject, SEED).singles == subject.singles()


def test_every_public_parameter_has_a_domain() -> None:
    assert without_domain(SUBJECTS) == []
