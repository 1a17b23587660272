"""The option of pytest-xdist without pytest-xdist."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """The option."""
    parser.addoption("--numprocesses", type=int)
