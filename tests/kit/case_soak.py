"""A suite of one test, which does not like every seed, run by test_soak.py."""

from __future__ import annotations

import os

import pytest


def test_likes_its_seed(request: pytest.FixtureRequest) -> None:
    assert str(request.config.getoption("--hypothesis-seed")) != os.environ["CASE_SEED"], (
        "not this seed"
    )
