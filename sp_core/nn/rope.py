"""Rotary position embedding of queries and keys, computed from the global positions of tokens.

`Rope.apply` rotates a tensor; `rotation` computes the angles once, to rotate in many layers. Pair i
is the dims i and i + head_dim / 2. Nothing here communicates.
"""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sp_core.arguments import check
from sp_core.errors import DtypeError, ShapeError
from sp_core.mask import Positions, position_tensor

_FIELDS = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
}
"""For each rope_type, the entries that a scaling must have."""
_YARN = {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": True}
"""Default values of optional entries of a yarn scaling."""
_NUMBERS = {*_YARN, "attention_factor", "mscale", "mscale_all_dim"}.union(*_FIELDS.values())
"""Entries of a scaling that are numbers, except for truncate, which is True or False."""


class Rope:
    """Rotary embedding in the half-split convention: dims i and i + head_dim / 2 are a pair.

    Each call computes the angles from its positions, in float64 for every dtype, because a float32
    angle of 10^6 radians is off by 0.06.

    Attributes: `frequencies`, float64 (head_dim / 2,), the radians per token of each pair;
    `amplitude`, the factor by which rotated tensors are multiplied, 1 except with yarn.

    Args:
        head_dim: the dims of one head, an even number.
        base: the base of the frequencies base^(-2 i / head_dim) of the pairs i.
        scaling: None, or a dict as in a Hugging Face configuration: {"rope_type": "linear",
            "factor": f} or {"rope_type": "llama3", "factor", "low_freq_factor", "high_freq_factor",
            "original_max_position_embeddings"} or {"rope_type": "yarn", "factor",
            "original_max_position_embeddings"}, the last also with "beta_fast", "beta_slow",
            "truncate" (None counts as False), "attention_factor", "mscale" and "mscale_all_dim".

    Raises:
        ShapeError: head_dim is odd or below 2.
        ValueError: a number is not finite; base is not positive; scaling has an unknown type, lacks
            an entry, or has a factor, original context or attention_factor that is not positive;
            llama3 without low_freq_factor < high_freq_factor; yarn without base > 1 and beta_fast >
            beta_slow > 0, or with an original context of fewer than 2 pi beta_slow tokens.
        TypeError: an argument is of another type.

    Source: Su et al., "RoFormer", 2021, equation 34; linear: Chen et al., "Position interpolation",
        2023, equation 4; yarn: Peng et al., "YaRN", 2023, mixed as in the authors' code, by the
        index of the pair; llama3, and the entries of yarn:
        https://github.com/huggingface/transformers/blob/main/src/transformers/modeling_rope_utils.py.
    """

    def __init__(
        self, head_dim: int, base: float = 10000.0, scaling: Mapping[str, Any] | None = None
    ) -> None:
        check(head_dim=head_dim, base=base, scaling=scaling)
        if not head_dim or head_dim < 2 or head_dim % 2:
            raise ShapeError(
                f"head_dim is {head_dim}, needed an even number of at least 2, because dims "
                f"rotate in pairs"
            )
        given = dict(scaling or {})
        if given.get("truncate", True) is None:  # in transformers, other nulls mean the default
            given["truncate"] = False
        known = {name: value for name, value in given.items() if value is not None}
        for name in (name for name in known if name in _NUMBERS):
            kind = "causal" if name == "truncate" else "p"  # True or False, or a number
            check(kind, **{f"scaling[{name!r}]": known[name]})
        self.frequencies = _frequencies(head_dim, float(base), known)
        self.amplitude = _amplitude(known)
        self._text = f"Rope({head_dim}, base={float(base)}, scaling={sorted(known.items())})"

    def __repr__(self) -> str:
        """Return head_dim, base and the entries of scaling: equal for equal arguments."""
        return self._text

    def apply(self, x: Tensor, positions: Positions) -> Tensor:
        """Rotate queries or keys by the angles of their tokens' global positions.

        Args:
            x: (B, S, H, head_dim), any floating dtype, with S tokens, usually those of this rank.
            positions: the global positions of the S tokens in the order of x: a range, integers or
                a tensor.

        Returns:
            (B, S, H, head_dim) in x's dtype, computed in float64 for float64 and in float32
            otherwise. Differentiable.

        Raises:
            ShapeError: x is not (B, S, H, head_dim), or there are not S positions.
            DtypeError: x is not floating.
            TypeError: positions are no integers.
        """
        return rotation(self, positions, x)(x)


def check_rope(rope: Rope | None, head_dim: int) -> None:
    """Raise ShapeError if a rope is not made for heads of `head_dim`."""
    if rope is not None and 2 * len(rope.frequencies) != head_dim:
        raise ShapeError(
            f"{rope} was given for heads of head_dim {head_dim}; pass Rope({head_dim})."
        )


def rotation(rope: Rope, positions: Positions, like: Tensor) -> Callable[[Tensor], Tensor]:
    """Compute the angles of S positions once, and return the function that rotates by them.

    Args:
        rope: the rotary embedding.
        positions: S global positions, as a range, integers or a tensor.
        like: a tensor on the device of the tensors to rotate, and of float64 if they are.

    Returns:
        A function from x (B, S, H, head_dim) to the rotated x of the same dtype, with the errors of
        `Rope.apply` about x. Those about positions are raised here.
    """
    dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
    radians = position_tensor(positions, like.device).double()
    angles = radians.outer(rope.frequencies.to(like.device))
    cos, sin = (rope.amplitude * x for x in (angles.cos(), angles.sin()))
    return partial(_rotate, cos=cos.to(dtype), sin=sin.to(dtype))


def _rotate(x: Tensor, *, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x (B, S, H, head_dim); cos and sin (S, head_dim / 2) are those of the angles."""
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


def _kind(scaling: Mapping[str, Any]) -> str:
    """Return the entry "rope_type" of a scaling, in older files "type"; "default" if empty."""
    kind = scaling.get("rope_type", scaling.get("type"))
    return "default" if not scaling else str(kind)


def _frequencies(head_dim: int, base: float, scaling: Mapping[str, Any]) -> Tensor:
    """Return the radians per token of each pair after scaling, float64 (head_dim / 2,)."""
    plain = base ** -(torch.arange(0, head_dim, 2, dtype=torch.float64, device="cpu") / head_dim)
    for name, used in (("rope_theta", base), ("partial_rotary_factor", 1.0)):
        if (x := scaling.get(name)) not in (None, used):
            raise ValueError(
                f"scaling has {name}={x}, but {used} is used. Pass rope_theta as `base`; only all "
                "pairs of a head can be rotated."
            )
    kind = _kind(scaling)
    if kind == "default":
        return plain
    if kind not in _FIELDS:
        raise ValueError(
            f"{scaling=} was given; it needs a rope_type, one of {[*_FIELDS]}. "
            "Compute a model with another one in transformers, on one process."
        )
    missing = [field for field in _FIELDS[kind] if field not in scaling]
    if missing:
        raise ValueError(
            f"{scaling=} lacks {', '.join(missing)}; take the values with which the model was "
            "trained."
        )
    for name in ("factor", "original_max_position_embeddings"):
        if not 0 < (x := float(scaling.get(name, 1))) < math.inf:
            raise ValueError(f"scaling has {name}={x}, needed a positive number.")
    scaled = plain / float(scaling["factor"])
    if kind == "linear":
        return scaled
    divided = _low(plain, scaling) if kind == "llama3" else _yarn(len(plain), base, scaling)
    return plain.lerp(scaled, divided)


def _low(plain: Tensor, scaling: Mapping[str, Any]) -> Tensor:
    """Return llama3's weight w of each pair. Its frequency is (1 - w) plain + w plain / factor.

    `plain` has the radians per token of each pair. w is 1 for a pair that makes at most
    low_freq_factor full turns in the original context, 0 for at least high_freq_factor turns, and
    linear in between.
    """
    turns = float(scaling["original_max_position_embeddings"]) * plain / (2 * math.pi)
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    if not -math.inf < low < high < math.inf:
        raise ValueError(
            f"llama3 was given low_freq_factor={low} and high_freq_factor={high}; needed "
            "low_freq_factor < high_freq_factor."
        )
    return 1 - ((turns - low) / (high - low)).clamp(0.0, 1.0)


def _yarn(half: int, base: float, scaling: Mapping[str, Any]) -> Tensor:
    """Return yarn's weight w of `half` pairs. A frequency is (1 - w) plain + w plain / factor.

    w rises linearly with the index of a pair: from 0 for the pair that makes beta_fast full turns
    in the original context to 1 for the pair that makes beta_slow full turns.
    """
    fields = {**_YARN, **scaling}
    fast, slow = float(fields["beta_fast"]), float(fields["beta_slow"])
    most = float(fields["original_max_position_embeddings"]) / (2 * math.pi)
    if not (base > 1 and math.inf > fast > slow > 0 and most >= slow):
        raise ValueError(
            f"yarn was given base={base}, beta_fast={fast}, beta_slow={slow} and an original "
            f"context of {2 * math.pi * most:.0f} tokens; needed base > 1, beta_fast > beta_slow "
            "> 0, and at least 2 pi beta_slow tokens."
        )
    # fractional indices of the pairs with beta_fast and with beta_slow turns per context
    first, last = (half * math.log(most / turns, base) for turns in (fast, slow))
    if fields["truncate"]:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * half - 1)
    pairs = torch.arange(half, device="cpu").double()
    return ((pairs - first) / (last - first or 1)).clamp(0.0, 1.0)


def _amplitude(scaling: Mapping[str, Any]) -> float:
    """Return the factor by which yarn multiplies rotated queries and keys; 1 for other types.

    The factor is the entry attention_factor, else 1 + g with g = 0.1 ln(max(factor, 1)), or with
    mscale and mscale_all_dim (1 + mscale g) / (1 + mscale_all_dim g).
    """
    if _kind(scaling) != "yarn":
        return 1.0
    growth = 0.1 * math.log(max(float(scaling["factor"]), 1.0))
    above, below = (float(scaling.get(name, 0)) for name in ("mscale", "mscale_all_dim"))
    if not (above and below):
        above, below = 1.0, 0.0
    usual = (1 + above * growth) / (1 + below * growth)
    if not 0 < (amplitude := float(scaling.get("attention_factor", usual))) < math.inf:
        raise ValueError(
            f"yarn multiplies by {amplitude}, needed a positive number; change attention_factor, "
            "or mscale and mscale_all_dim."
        )
    return amplitude
