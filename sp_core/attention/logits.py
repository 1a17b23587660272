"""Describe how the logits of attention follow from q k^T."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, TypedDict

from torch import Tensor

from sp_core import arguments


class Terms(TypedDict, total=False):
    """Keyword arguments of every attention function that change its logits.

    Args:
        softcap: bound of the scaled scores s: they become softcap * tanh(s / softcap) before the
            mask is applied. A positive number; None for no bound.

    Source: Gemma Team 2024, Gemma 2: Improving Open Language Models at a Practical Size,
    arXiv:2408.00118, section 2.
    """

    softcap: float | None


@dataclass(frozen=True)
class Logits:
    """The logits of attention, from scores q k^T: the scale, and the terms as in `Terms`."""

    softmax_scale: float
    softcap: float | None = None

    @classmethod
    def of(
        cls, q: Tensor, *, softmax_scale: float | None = None, softcap: float | None = None
    ) -> Logits:
        """Check what an attention of q (B, S, H, D) was given, and fill in the default scale.

        Raises:
            TypeError: softmax_scale is not a finite number, softcap not a positive one.
        """
        arguments.check(softmax_scale=softmax_scale, softcap=softcap)
        scale = 1.0 / math.sqrt(q.shape[-1]) if softmax_scale is None else float(softmax_scale)
        return cls(scale, softcap)

    @property
    def is_plain(self) -> bool:
        """Return whether only the plain kernel, which holds the scores, can compute them."""
        return self.softcap is not None

    def given(self) -> dict[str, Any]:
        """Return the scale and the terms that there are, as arguments of `local_attention`."""
        return {name: value for name, value in vars(self).items() if value is not None}
