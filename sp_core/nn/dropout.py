"""Dropout with the same pattern for any number of ranks.

A hash of the seed and of an element's global indices decides whether `dropout` drops the element.
There is no random state and no communication. Ranks that hold the same token drop the same
elements, a recomputed forward drops them again, and one device drops what many ranks drop.
"""

import torch
from torch import Tensor

from sp_core.arguments import check, check_dense
from sp_core.compiling import eager
from sp_core.errors import DtypeError, ShapeError
from sp_core.mask import Positions, position_tensor

# the constants of SplitMix64; signed 64-bit numbers, because torch computes in int64
_STEPS = ((30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64), (31, None))
_FIRST = 0x9E3779B97F4A7C15 - 2**64  # added to the seed: `_mixed` maps 0 to 0
_BITS = 53


@eager  # inductor compiles the hash to one that ignores positions
def dropout(
    x: Tensor,
    p: float,
    *,
    seed: int,
    positions: Positions,
    features: Positions | None = None,
    training: bool = True,
) -> Tensor:
    """Set elements of x to zero with probability p, and multiply the others by 1 / (1 - p).

    Args:
        x: (B, S, *, E), any floating dtype; S is the number of this rank's tokens.
        p: the probability that an element becomes zero, in [0, 1).
        seed: 0 <= seed < 2^62, equal on all ranks that share the sequences. The caller must pass a
            different seed for each layer, training step, micro-batch and replica.
        positions: the global positions of the S tokens.
        features: the E global indices of the last dim, if that dim is split over ranks; None for
            0 .. E - 1. Indices of the other dims count from 0 on every rank.
        training: False returns x unchanged.

    Returns:
        A tensor of the shape and dtype of x. Differentiable any number of times.

    Raises:
        ShapeError: x is sparse, nested or of fewer than 3 dims, or there are not S positions or not
            E features.
        DtypeError: x is no tensor, or not floating.
        ValueError: p or seed is out of range.
        TypeError: p is not a number, seed no whole number, positions or features no integers.

    Source: Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014, figure
    16, for the hash.
    """
    check_dense(x, "x")
    check(p=p, seed=seed)
    check("place", positions=positions, **{} if features is None else {"features": features})
    if not (0 <= p < 1 and 0 <= seed < 2**62):
        raise ValueError(f"{p=} and {seed=} were given; pass p in [0, 1), and seed in [0, 2^62).")
    if not x.dtype.is_floating_point:
        raise DtypeError(f"a tensor of {x.dtype} was given; dropout needs a floating one.")
    numbers = (len(positions), None if features is None else len(features))
    if x.dim() < 3 or numbers[0] != x.shape[1] or numbers[1] not in (None, x.shape[-1]):
        raise ShapeError(
            f"{numbers[0]} positions and {numbers[1]} features for a tensor of shape "
            f"{tuple(x.shape)}; pass (B, S, ..., E), S positions, and E features or None."
        )
    if not training or p == 0:
        return x
    places = [range(x.shape[0]), positions, *map(range, x.shape[2:])]
    if features is not None:
        places[-1] = features
    kept = _uniform(seed, places, x.device) >= float(p)
    return x.mul(kept.to(x.dtype)).mul(1.0 / (1.0 - float(p)))


def _uniform(seed: int, places: list[Positions], device: torch.device) -> Tensor:
    """Hash the seed and each combination of indices to a float64 number in [0, 1).

    `places` holds the global indices of each dim. The result has one dim for each entry.
    """
    state = _mixed(torch.tensor(seed, dtype=torch.int64, device=device) + _FIRST)
    for place in places:
        state = _mixed(state[..., None] + position_tensor(place, device))
    return state.bitwise_and(2**_BITS - 1).double().div(2**_BITS)


def _mixed(x: Tensor) -> Tensor:
    """Apply the finalizer of SplitMix64 to each element of int64 x. Products are modulo 2^64."""
    for shift, multiplier in _STEPS:
        x = x ^ ((x >> shift) & (2 ** (64 - shift) - 1))  # >> fills with copies of the sign
        x = x if multiplier is None else x * multiplier
    return x
