"""The schemes of this project, called as any library is: if these do not pass, the harness is wrong."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from sp_core import Mask, Mesh, Sharding
from sp_core.schemes import SCHEMES


def prepare(comm: Any, variant: str) -> None:
    """Nothing: each call makes its mesh."""


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    comm: Any,
    causal: bool,
    window: int | None,
    documents: Any,
    shards: Any,
    **rest: Any,
) -> Tensor:
    """Any of the schemes: which one, the shape decides. The mesh has to outlive backward, and ends with the example."""
    names = sorted(SCHEMES)
    scheme = SCHEMES[
        names[(q.shape[0] + q.shape[2] + q.shape[3] // 8 + len(shards[0])) % len(names)]
    ]
    mask = Mask(causal=causal, window=window, documents=documents)
    sharding = Sharding.from_positions(shards)
    return scheme(
        q,
        k,
        v,
        comm=Mesh(comm, sp=comm.size)["sp"],
        sharding=sharding,
        mask=mask,
        softmax_scale=rest["softmax_scale"],
    )
