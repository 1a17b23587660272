"""A few tests with which the plugin's options are tried."""

import os
from typing import Any

import pytest

from sp_core.testing import record_ratio, spmd, tier

RANK = int(os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK", "0")))


@spmd()
def test_ranks(comm: Any, request: pytest.FixtureRequest) -> None:
    comm.Barrier()
    assert "CASE_EXIT" not in os.environ
    if os.environ.get("CASE_ENDS") == str(RANK):
        request.session.shouldstop = "this rank runs no more tests"


def test_ordinary() -> None:
    if os.environ.get("CASE_EXIT") == str(RANK):
        pytest.exit("no licence")
    record_ratio("of one test", float(os.environ.get("CASE_RATIO", "0.1")))
    assert tier() == "threads"


if "CASE_COLLECT" in os.environ:

    @pytest.mark.parametrize("rank", range(1 + RANK))
    def test_that_is_not_the_same_on_all_ranks(rank: int) -> None:
        """Rank 1 collects one test more than rank 0."""
