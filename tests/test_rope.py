"""What makes no rotary embedding is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sp_core.errors import DtypeError, ShapeError
from sp_core.nn.rope import Rope


@pytest.mark.parametrize(("head_dim", "error"), [(3, ShapeError), (0, ShapeError)])
def test_an_odd_head_dim_is_refused(head_dim: int, error: type[Exception]) -> None:
    with pytest.raises(error, match="even"):
        Rope(head_dim)


@pytest.mark.parametrize(
    "scaling", [{"rope_type": "yarn", "factor": 2.0}, {"rope_type": "linear"}, {"factor": 2.0}]
)
def test_a_scaling_that_is_not_understood_is_refused(scaling: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="rope_type"):
        Rope(4, scaling=scaling)
    with pytest.raises(ValueError, match="base"):
        Rope(4, base=0.0)


def test_tensors_that_do_not_fit_are_refused() -> None:
    for x in (torch.randn(1, 3, 2, 6), torch.randn(1, 4, 2, 4), torch.randn(3, 2, 4)):
        with pytest.raises(ShapeError, match="needed"):
            Rope(4).apply(x, range(3))
    with pytest.raises(DtypeError, match="floating"):
        Rope(4).apply(torch.ones(1, 3, 2, 4, dtype=torch.int64), range(3))
