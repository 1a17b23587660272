"""Rotary position embedding, from global positions alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sp_core.errors import DtypeError, ShapeError
from sp_core.mask import Positions, position_tensor

_FIELDS = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}


class Rope:
    """Rotary embedding in the half-split convention: dim i is rotated with dim i + head_dim / 2.

    Nothing is cached by length or offset: the angles come from the positions of each call, in
    float64 for every dtype, because a float32 angle of 10^6 radians is off by 0.06.

    Args:
        head_dim: even.
        base: of the frequencies base^(-2 i / head_dim), radians per token.
        scaling: None, or a dict as in a Hugging Face configuration, {"rope_type": "linear",
            "factor": f} or {"rope_type": "llama3", "factor", "low_freq_factor", "high_freq_factor",
            "original_max_position_embeddings"}.

    Raises:
        ShapeError: head_dim is odd or below 2.
        ValueError: base is not positive, or scaling is of an unknown type or incomplete.

    Source: Su et al., "RoFormer", 2021, equation 34; linear: Chen et al., "Position interpolation",
        2023, equation 4; llama3:
        https://github.com/huggingface/transformers/blob/main/src/transformers/modeling_rope_utils.py,
        _compute_llama3_parameters.
    """

    def __init__(
        self, head_dim: int, base: float = 10000.0, scaling: Mapping[str, Any] | None = None
    ) -> None:
        if head_dim < 2 or head_dim % 2:
            raise ShapeError(
                f"head_dim is {head_dim}, needed an even number of at least 2, because dims "
                f"rotate in pairs"
            )
        if not base > 0:
            raise ValueError(f"base is {base}, needed a positive number; 10000 is the usual one")
        self.head_dim = head_dim
        self.frequencies = _frequencies(head_dim, float(base), scaling)

    def apply(self, x: Tensor, positions: Positions) -> Tensor:
        """Rotate queries or keys by the angles of their global positions.

        Args:
            x: (B, S, H, head_dim), any floating dtype.
            positions: S global positions, in the order of x's tokens.

        Returns:
            (B, S, H, head_dim) in x's dtype; rotated in float64 for float64 and in float32
            otherwise. Differentiable.

        Raises:
            ShapeError: another head dim, or positions that do not number the tokens.
            DtypeError: x is not floating.
        """
        return rotation(self, positions, x)(x)


def rotation(rope: Rope, positions: Positions, like: Tensor) -> Callable[[Tensor], Tensor]:
    """Compute the angles of some positions once, for all layers that rotate by them.

    Args:
        rope: the embedding.
        positions: S global positions.
        like: a tensor on the device, and in the dtype, of the tensors to rotate.

    Returns:
        A function that rotates as `Rope.apply`, and raises the same errors.
    """
    dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
    radians = position_tensor(positions, like.device).double()
    angles = radians.outer(rope.frequencies.to(like.device))
    return partial(_rotate, cos=angles.cos().to(dtype), sin=angles.sin().to(dtype))


def _rotate(x: Tensor, *, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x (B, S, H, head_dim) by angles (S, head_dim / 2)."""
    count, half = cos.shape
    if x.dim() != 4 or x.shape[-1] != 2 * half or x.shape[1] != count:
        raise ShapeError(
            f"x has shape {tuple(x.shape)}, needed (B, S, H, head_dim) with S = {count} positions "
            f"and head_dim = {2 * half}; pass the global positions of this rank's tokens"
        )
    if not x.is_floating_point():
        raise DtypeError(f"x has dtype {x.dtype}, needed a floating one; cast first")
    a, b = x.to(cos.dtype).chunk(2, dim=-1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


def _frequencies(head_dim: int, base: float, scaling: Mapping[str, Any] | None) -> Tensor:
    """Return the radians per token of each pair of dims, float64 (head_dim / 2,).

    The scaling "default" is none.
    """
    plain = base ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    kind = None if scaling is None else scaling.get("rope_type", scaling.get("type"))
    if not scaling or kind == "default":
        return plain
    missing = [field for field in _FIELDS.get(str(kind), ("rope_type",)) if field not in scaling]
    if kind not in _FIELDS or missing:
        lacks = f" and lacks {', '.join(missing)}" if missing else ""
        raise ValueError(
            f"scaling has rope_type {kind!r}{lacks}; needed one of {_FIELDS}, or None. For yarn "
            "use `parallelize`, with a model of transformers."
        )
    return plain / float(scaling["factor"]) if kind == "linear" else _llama3(plain, scaling)


def _llama3(plain: Tensor, scaling: Mapping[str, Any]) -> Tensor:
    """Divide low frequencies by the factor, keep high ones, and blend linearly between.

    What is low and high is counted in turns per original context.
    """
    turns = float(scaling["original_max_position_embeddings"]) * plain / (2 * math.pi)
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    keep = ((turns - low) / (high - low)).clamp(0.0, 1.0)  # 0: divided, 1: kept
    return plain * (keep + (1 - keep) / float(scaling["factor"]))
