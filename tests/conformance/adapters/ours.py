"""Call the attention schemes of this project as any other library is called.

If these do not pass, the harness is wrong.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from sp_core import Mask, Mesh, Sharding
from sp_core.schemes import SCHEMES


def prepare(comm: Any, variant: str) -> None:
    """Do nothing: each call of `attend` makes its mesh."""


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
    """Return the attention of one of the schemes, chosen by the shape: (B, S/P, H, D).

    The mesh must outlive the backward, so it is freed only at the end of the example.
    """
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
