"""A plugin of another project, with the options that many projects have."""

import pytest

NAMES = (
    *(
        "--device",
        "--ranks",
        "--expect-ranks",
        "--timeout",
        "--share-gpu",
        "--gpus",
        "--backend",
        "--seed",
        "--profile",
    ),
    *(
        "--no-raw-replay",
        "--max-error-ratio",
        "--tally",
        "--tolerance",
        "--np",
        "--nprocs",
        "--transport",
        "--dtype",
        "--report",
    ),
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Take the names as a project does that knows nothing of others."""
    for name in NAMES:
        parser.addoption(name, default="theirs")
    parser.addini("max_error_ratio", "theirs", default="theirs")
