"""Overlap communication with computation."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from sp_core.collectives.maps import Map, Started
from sp_core.communicator import Communicator
from sp_core.sharding import split_ranges

Group = tuple[slice, slice]
"""Query heads, and the key/value heads that they read."""

GROUPS = 4
"""The number of pieces of a computation. Communication makes progress between them."""


def one_ahead(calls: Iterable[tuple[Map, Tensor]]) -> Iterator[Tensor]:
    """Yield the results of collectives, each after the next one was started."""
    under_way: deque[Started] = deque()
    for mapping, x in calls:
        under_way.append(mapping.start(x))
        if len(under_way) > 1:
            yield under_way.popleft().wait()
    while under_way:
        yield under_way.popleft().wait()


def join_heads(parts: list[Tensor]) -> Tensor:
    """Join groups of heads (B, h, S, D) to one contiguous tensor (B, S, H, D)."""
    return (
        parts[0].transpose(1, 2)
        if len(parts) == 1
        else torch.cat([part.transpose(1, 2) for part in parts], 2)
    )


def head_groups(num_heads: int, num_kv_heads: int, size: int) -> list[Group]:
    """Return the query heads and key/value heads of each group. One rank has one group."""
    group = num_heads // max(num_kv_heads, 1)  # a rank of a hybrid may have no heads at all
    parts = split_ranges(num_kv_heads, max(min(GROUPS, num_kv_heads), 1) if size > 1 else 1)
    return [
        (slice(part.start * group, part.stop * group), slice(part.start, part.stop))
        for part in parts
    ]


def polled(comm: Communicator, groups: Iterable[Group]) -> Iterator[Group]:
    """Yield the groups. Let communication make progress after each one."""
    for group in groups:
        yield group
        comm.poll()
