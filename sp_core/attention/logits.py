"""Define how the logits of attention, the arguments of the softmax, follow from the scores q k^T.

`Terms` lists the keyword arguments for users; `Logits` holds their checked values. Shapes as in
`sp_core.attention`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self, TypedDict

import torch
from torch import Tensor

from sp_core import arguments
from sp_core.errors import DeviceError, DtypeError, ShapeError
from sp_core.mask import Positions, position_tensor

BY_HEAD = ("sinks", "alibi")
"""Fields of `Logits` with one number for each query head."""


class Terms(TypedDict, total=False):
    """Keyword arguments that change the logits, accepted by every attention function.

    Args:
        softcap: if given, each scaled score s becomes softcap * tanh(s / softcap) before the mask
            is applied. At least 1.2e-38, the smallest normal float32.
        sinks: (H,), floating: one learned logit per query head. It joins the softmax of each query
            as a key without a value. The log-sum-exp that is returned includes it. All ranks must
            pass the same values; this is not checked. Each rank gets the gradient of the
            queries and heads that it computes. Pass `copy_to_group(sinks, comm=comm)` to sum it
            over the ranks.
        alibi: H finite slopes, one for each query head, as numbers or as a tensor (H,). Each logit
            is reduced by slope * |query position - key position|. Positions are global. Slopes are
            constants, which get no gradient. With slopes, attention runs on this library's own
            kernel, never on torch's fused kernels.

    Source: Gemma Team 2024, Gemma 2: Improving Open Language Models at a Practical Size,
    arXiv:2408.00118, section 2, for softcap; OpenAI 2025, gpt-oss-120b & gpt-oss-20b Model Card,
    arXiv:2508.10925, section 2, for sinks; Press et al. 2022, Train Short, Test Long, ICLR,
    arXiv:2108.12409, section 3, for alibi.
    """

    softcap: float | None
    sinks: Tensor | None
    alibi: Sequence[float] | Tensor | None


@dataclass(frozen=True)
class Logits:
    """Hold the scale and the terms by which logits follow from scores q k^T.

    Args:
        softmax_scale: factor of the scores.
        softcap, sinks, alibi: as in `Terms`; None if not used.
        positions: global positions of the queries (Sq,) and of the keys (Sk,), which ALiBi needs;
            None until `between` is called.
    """

    softmax_scale: float
    softcap: float | None = None
    sinks: Tensor | None = field(default=None, repr=False)
    alibi: tuple[float, ...] | None = None
    positions: tuple[Tensor, Tensor] | None = field(default=None, repr=False)

    @classmethod
    def of(
        cls,
        q: Tensor,
        *,
        softmax_scale: float | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        alibi: Sequence[float] | Tensor | None = None,
        **unknown: object,
    ) -> Self:
        """Check the keyword arguments of an attention function, and return them as `Logits`.

        Args:
            q: (B, S, H, D); its heads, head dim and device are used.
            softmax_scale: factor of the scores; 1 / sqrt(D) if None.
            softcap: bound of the scaled scores; None for no bound.
            sinks: (H,), one logit per query head; None for none.
            alibi: H slopes, one per query head; None for none. `Terms` explains softcap, sinks and
                alibi.
            unknown: any other keyword argument, which is refused.

        Raises:
            TypeError: softmax_scale is neither 0 nor a normal float32, softcap is below 1.2e-38,
                sinks is no tensor, alibi is not finite numbers, or an unknown argument is given.
            ShapeError, DtypeError, DeviceError: sinks or alibi do not fit q.
            ValueError: alibi requires a gradient.
        """
        if unknown:
            raise TypeError(
                f"{', '.join(unknown)} was given, which no attention takes. Pass a mask as "
                "mask=Mask(causal=True). Terms of the logits are softmax_scale, softcap, sinks and "
                "alibi. No attention has dropout."
            )
        if isinstance(alibi, Tensor):
            if alibi.requires_grad:
                raise ValueError(
                    "alibi slopes with requires_grad given; they are constants: detach() them"
                )
            alibi = alibi.tolist()
        arguments.check(softmax_scale=softmax_scale, softcap=softcap, sinks=sinks, alibi=alibi)
        if sinks is not None:
            _check_sinks(sinks, q)
        if alibi is not None and len(alibi) != q.shape[2]:
            raise ShapeError(
                f"{len(alibi)} ALiBi slopes given, needed {q.shape[2]}, one for each query head"
            )
        scale = 1.0 / math.sqrt(q.shape[-1]) if softmax_scale is None else float(softmax_scale)
        cap = None if softcap is None else float(softcap)
        return cls(scale, cap, sinks, None if alibi is None else tuple(map(float, alibi)))

    @property
    def needs_plain_kernel(self) -> bool:
        """Return whether softcap or ALiBi is given, which no fused kernel computes."""
        return self.softcap is not None or self.alibi is not None

    def of_heads(self, heads: range | slice) -> Self:
        """Return a copy with the sinks and ALiBi slopes of only these query heads."""
        at = slice(heads.start, heads.stop)
        return replace(self, **{x: y[at] for x, y in self.given().items() if x in BY_HEAD})

    def between(self, queries: Positions, keys: Positions, device: torch.device) -> Self:
        """Return a copy with these global positions, if there are ALiBi slopes; else `self`.

        Args:
            queries, keys: Sq and Sk positions.
            device: the device on which the tensors of positions are made.
        """
        if self.alibi is None:
            return self
        places = position_tensor(queries, device), position_tensor(keys, device)
        return replace(self, positions=places)

    def at(self, queries: slice | Tensor, keys: slice | Tensor) -> Self:
        """Return a copy that keeps only the positions of these queries and keys, given by index."""
        if self.positions is None:
            return self
        return replace(self, positions=(self.positions[0][queries], self.positions[1][keys]))

    def add_bias(self, scores: Tensor) -> None:
        """Subtract slope * |query position - key position| from scores, if ALiBi slopes are given.

        Args:
            scores: (B, K, H/K * Sq, Sk), float32 or wider; changed.
        """
        if self.alibi is not None:
            assert self.positions is not None
            queries, keys = self.positions
            apart = (queries[:, None] - keys).abs().to(scores.dtype)
            heads = scores.shape[1], len(self.alibi) // scores.shape[1], 1, 1
            by_query = scores.unflatten(2, (-1, len(queries)))
            by_query.addcmul_(scores.new_tensor(self.alibi).view(heads), apart, value=-1)

    def given(self) -> dict[str, Any]:
        """Return the fields that are not None, by name.

        If `positions` is None, they can be passed to `local_attention` as keyword arguments.
        """
        return {name: value for name, value in vars(self).items() if value is not None}


def _check_sinks(sinks: Tensor, q: Tensor) -> None:
    """Refuse sinks that are not a dense floating tensor (H,) on the device of q (B, S, H, D)."""
    if sinks.shape != q.shape[2:3] or sinks.layout is not torch.strided:
        raise ShapeError(
            f"sinks {tuple(sinks.shape)} ({sinks.layout}) given, needed a dense tensor "
            f"({q.shape[2]},), one for each query head"
        )
    if not sinks.is_floating_point():
        raise DtypeError(f"sinks of {sinks.dtype} given, needed floating ones; cast first")
    if sinks.device != q.device:
        raise DeviceError(f"sinks on {sinks.device} given, needed {q.device}; move them first")
