"""Every public call over its declared domain: each named part of each parameter is drawn, and judged against a reference."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
from domains.declared import Subject
from domains.public import without_domain
from domains.report import changed, committed, impossible_pairs, parts_of
from domains.subjects import SUBJECTS
from domains.trial import draw_singles

SEED = int(os.environ.get("SP_DOMAIN_SEED", "1"))


@pytest.mark.parametrize("subject", SUBJECTS, ids=lambda subject: subject.name)
def test_every_part_of_every_domain_is_drawn(subject: Subject) -> None:
    impossible = impossible_pairs(subject.name, committed())
    assert draw_singles(subject, SEED, impossible).singles == subject.singles()


def test_every_public_parameter_has_a_domain() -> None:
    assert without_domain(SUBJECTS) == []


def test_every_part_was_explored() -> None:
    """The committed report lists the parts that are declared: none was added or lost since."""
    assert changed(SUBJECTS, committed()) == []
    assert not [record["subject"] for record in committed() if record["fault"]]
    assert all(
        record["drawn"] == record["possible"]
        for record in committed()
        if record["depth"] == "pairs"
    )


def test_a_part_without_its_generator_is_seen() -> None:
    subject = SUBJECTS[0]
    records = [{"subject": subject.name, "parts": parts_of(subject)}]
    fewer = {
        **subject.factors,
        "q.head_dim": dict(list(subject.factors["q.head_dim"].items())[:-1]),
    }
    assert changed([subject], records) == []
    assert changed([replace(subject, factors=fewer)], records) == [f"{subject.name} q.head_dim"]
    refused = {
        **subject.factors,
        "q.head_dim": {**subject.factors["q.head_dim"], "257 to 300": lambda chance, drawn: 0},
    }
    with pytest.raises(AssertionError, match=r"refuses .*q\.head_dim=257 to 300"):
        draw_singles(replace(subject, factors=refused), SEED)


def test_a_parameter_without_a_domain_is_seen() -> None:
    subject = next(subject for subject in SUBJECTS if subject.name == "all_gather")
    fewer = {name: parts for name, parts in subject.factors.items() if name != "sizes"}
    assert "all_gather(sizes)" in without_domain([replace(subject, factors=fewer)])
    assert not [name for name in without_domain([subject]) if name.startswith("all_gather(")]
