"""Describe how the logits of attention follow from q k^T."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any, TypedDict

import torch
from torch import Tensor

from sp_core import arguments
from sp_core.errors import DeviceError, DtypeError, ShapeError


class Terms(TypedDict, total=False):
    """Keyword arguments of every attention function that change its logits.

    Args:
        softcap: bound of the scaled scores s: they become softcap * tanh(s / softcap) before the
            mask is applied. A positive number; None for no bound.
        sinks: (H,), floating: one learned logit per query head. It joins the softmax of each query
            as a key without a value, and the log-sum-exp that is returned. All ranks pass the same
            values, which are not compared. The gradient is this rank's summand: pass
            `copy_to_group(sinks, comm=comm)` to sum it over the ranks, as for any weight that they
            hold alike.

    Source: Gemma Team 2024, Gemma 2: Improving Open Language Models at a Practical Size,
    arXiv:2408.00118, section 2, for softcap; OpenAI 2025, gpt-oss-120b & gpt-oss-20b Model Card,
    arXiv:2508.10925, section 2, for sinks.
    """

    softcap: float | None
    sinks: Tensor | None


@dataclass(frozen=True)
class Logits:
    """The logits of attention, from scores q k^T: the scale, and the terms as in `Terms`."""

    softmax_scale: float
    softcap: float | None = None
    sinks: Tensor | None = field(default=None, repr=False)

    @classmethod
    def of(
        cls,
        q: Tensor,
        *,
        softmax_scale: float | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        **unknown: object,
    ) -> Logits:
        """Check what an attention of q (B, S, H, D) was given, and fill in the default scale.

        Raises:
            TypeError: softmax_scale is not a finite number, softcap not a positive one, sinks no
                tensor, or an unknown argument.
            ShapeError, DtypeError, DeviceError: sinks that do not fit q.
        """
        if unknown:
            raise TypeError(
                f"{', '.join(unknown)} was given, which no attention takes. Pass a mask as "
                "mask=Mask(causal=True); the terms of the logits are softcap and sinks."
            )
        arguments.check(softmax_scale=softmax_scale, softcap=softcap, sinks=sinks)
        if sinks is not None:
            _check_sinks(sinks, q)
        scale = 1.0 / math.sqrt(q.shape[-1]) if softmax_scale is None else float(softmax_scale)
        return cls(scale, softcap, sinks)

    @property
    def is_plain(self) -> bool:
        """Return whether only the plain kernel, which holds the scores, can compute them."""
        return self.softcap is not None

    def of_heads(self, heads: range) -> Logits:
        """Return the logits of some of the query heads."""
        at = slice(heads.start, heads.stop)
        return replace(self, sinks=None if self.sinks is None else self.sinks[at])

    def given(self) -> dict[str, Any]:
        """Return the scale and the terms that there are, as arguments of `local_attention`."""
        return {name: value for name, value in vars(self).items() if value is not None}


def _check_sinks(sinks: Tensor, q: Tensor) -> None:
    if sinks.shape != q.shape[2:3] or sinks.layout is not torch.strided:
        raise ShapeError(
            f"sinks {tuple(sinks.shape)} ({sinks.layout}) given, needed a dense tensor "
            f"({q.shape[2]},), one for each query head"
        )
    if not sinks.is_floating_point():
        raise DtypeError(f"sinks of {sinks.dtype} given, needed floating ones; cast first")
    if sinks.device != q.device:
        raise DeviceError(f"sinks on {sinks.device} given, needed {q.device}; move them first")
