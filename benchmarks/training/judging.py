"""Whether a mesh has learned what one rank has."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np

FACTOR = 10.0
"""How many times as far as a run from weights one unit in the last place away a mesh may be."""

SHARE = 0.01
"""What is allowed may be at most this share of what was learned: a longer yardstick could not tell right from wrong."""


def allowed(curve: Mapping[str, Any]) -> list[float]:
    """How far from one rank's loss a mesh's may be at each step: ten times the largest divergence so far of a perturbed run.

    Less than one unit in the last place of a loss no loss can differ by, so that is the least divergence.
    """
    alone = curve["losses"]
    least = [float(np.spacing(np.dtype(curve["dtype"]).type(loss))) for loss in alone]
    seen = [max(abs(run[step] - loss) for run in curve["perturbed"]) for step, loss in enumerate(alone)]
    return [FACTOR * limit for limit in accumulate(map(max, seen, least), max)]


def divergence(losses: Sequence[float], curve: Mapping[str, Any]) -> float:
    """The worst difference from one rank's loss over what is allowed; above 1 means that another thing was learned."""
    if len(losses) != len(curve["losses"]):
        return math.inf
    limits = allowed(curve)
    ratios = [abs(mine - alone) / limit for mine, alone, limit in zip(losses, curve["losses"], limits, strict=True)]
    return max((math.inf if math.isnan(ratio) else ratio for ratio in ratios), default=math.inf)


def yardstick(curve: Mapping[str, Any]) -> list[str]:
    """What is wrong with the runs of one rank."""
    longest, learned = allowed(curve)[-1], curve["losses"][0] - min(curve["losses"])
    found = []
    if not curve["worst"] <= 1:
        found.append(f"{curve['worst']:.3g} times the bound around the float64 reference")
    if not longest <= SHARE * learned:
        found.append(
            f"training amplifies one unit in the last place so much that {longest:.2g} would be allowed, where {learned:.2g} was "
            "learned; take fewer steps, or a lower learning rate"
        )
    return found


def complaints(record: Mapping[str, Any], curve: Mapping[str, Any]) -> list[str]:
    """What is wrong with a mesh."""
    if "reason" in record:
        return [record["reason"]]
    found = [
        f"{kind}: {ratio:.3g} times the bound, worst in {where}" for kind, (ratio, where) in record["worst"].items() if ratio > 1
    ]
    if not {"loss", "gradients", "norm", "clipped norm"} <= set(record["worst"]):
        found.append("not everything was compared")
    ratio = divergence(record["losses"], curve)
    if ratio > 1:
        found.append(f"losses: {ratio:.3g} times as far from one rank's as {FACTOR:g} times a change of one unit in the last place")
    if record["apart"] > 0:
        found.append(f"ranks that hold the same weight differ by {record['apart']:.3g} in the end")
    return found
