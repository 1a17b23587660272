"""A suite of one test, which fails with the seed in CASE_SEED; test_studies.py runs it."""

import os

import pytest


def test_likes_its_seed(request: pytest.FixtureRequest) -> None:
    assert str(request.config.getoption("--hypothesis-seed")) != os.environ["CASE_SEED"], (
        "not this seed"
    )
