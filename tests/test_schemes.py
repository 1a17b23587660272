"""Every scheme against the dense reference: any mask, layout, length, number of heads, dtype and number of ranks."""

from __future__ import annotations

import functools

import pytest
import torch

from sp_core.mesh import Mesh
from sp_core.schemes import SCHEMES
from sp_core.testing import device, given
from sp_core.testing.attention_check import check_attention
from sp_core.testing.strategies import AttentionProblem, attention_problems


@pytest.mark.parametrize("name", sorted(SCHEMES))
@given(problem=attention_problems())
def test_a_scheme_gives_what_one_device_gives(comm, name: str, problem: AttentionProblem) -> None:
    with Mesh(comm, device=device(), sp=comm.size) as mesh:
        scheme = functools.partial(SCHEMES[name], comm=mesh["sp"])
        check_attention(name, scheme, problem, comm.rank, comm.size, mesh["sp"].device)
