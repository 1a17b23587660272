"""Bound how far a result may be from the float64 reference, elementwise, by its arithmetic.

    |error| <= C ((u + u_acc growth) scale + s) + n u scale
    growth = longest sum + greatest logit size

C is 20. n is the number of partial results that were rounded before they were merged. u is the unit
round-off of the dtype, u_acc that of the dtype in which sums are accumulated (float32 for 16 bits).
s is the smallest number above 0 of the dtype, because a result may underflow to it; s is 0 where
scale is 0. scale is the sum of the absolute terms behind an element, from the reference.

The size L of a logit is the sum of its absolute products, not its value, because products cancel
and their roundings do not. Such a logit carries an error of u_acc L into the exponent. A sum of k
terms of one sign carries up to u_acc k. The two errors add up; they do not multiply.
"""

import math
from decimal import Decimal

import torch
from torch import Tensor

# Over 40,000 random correct results (all dtypes; logits to 10^4; constant, cancelling and
# heavy-tailed values; orthogonal queries and keys; 1 to 400 tokens) the greatest error was
# 8.2 (u + u_acc growth) scale: correct code fills 0.41 of this bound.
C = 20.0


def unit_roundoff(dtype: torch.dtype) -> float:
    """Return half the distance from 1 to the next number of the dtype."""
    return torch.finfo(dtype).eps / 2


def bound(
    scale: Tensor,
    dtype: torch.dtype,
    growth: float = 1.0,
    extra_roundings: int = 0,
    single_device_error: Tensor | None = None,
) -> Tensor:
    """Return a bound on the error that rounding may cause in each element of a result.

    It is C * ((u + u_acc * growth) * scale + s) + extra_roundings * u * scale
    + 2 * single_device_error. Here C is 20 and u the unit round-off of `dtype`. u_acc is the
    smaller of u and the unit round-off of float32. s is the smallest number above 0 in `dtype`, but
    0 where scale is 0.

    Args:
        scale: the sum of the absolute values of the terms behind each element, from the reference;
            of the shape of the result.
        dtype: the dtype in which the result was computed.
        growth: number of terms of the longest sum, plus the greatest sum of absolute products
            behind a logit.
        extra_roundings: number of partial results that were rounded to `dtype` before they were
            merged or summed.
        single_device_error: |single device result - reference| at the same dtype, of the same
            shape.

    Returns:
        float64 tensor of the shape of scale.
    """
    u = unit_roundoff(dtype)
    accumulated = min(u, unit_roundoff(torch.float32)) * growth
    scale = scale.double().abs()
    underflow = (scale > 0).double() * (torch.finfo(dtype).smallest_normal * 2 * u)
    allowed = (C * (u + accumulated) + extra_roundings * u) * scale + C * underflow
    return (
        allowed
        if single_device_error is None
        else allowed + 2.0 * single_device_error.double().abs()
    )


def error_ratio(actual: Tensor, expected: Tensor, bound: Tensor) -> float:
    """Return the greatest elementwise |actual - expected| / bound; above 1 means wrong.

    Numbers of dtype int64 are subtracted as such, so that none is rounded to float64.

    Args:
        actual: result, of any dtype.
        expected: reference, of the same shape.
        bound: the allowed error of each element, as the function `bound` returns it; of the same
            shape.

    Returns:
        The ratio. It is inf if shapes differ, for NaN in either tensor, for an infinity that is not
        expected, for a negative bound, and for an error where the bound is 0. It is 0 for tensors
        without elements.
    """
    if not actual.shape == expected.shape == bound.shape:
        return math.inf
    ratios = _ratios(actual, expected, bound)
    return float(ratios.max()) if ratios.numel() else 0.0


def check_close(name: str, actual: Tensor, expected: Tensor, bound: Tensor) -> float:
    """Assert that a result lies within its bound and return the greatest error over bound.

    Whole numbers are compared exactly. The error of a complex number is the absolute value of the
    difference.

    Args:
        name: names the result in the message.
        actual: result, of any dtype.
        expected: reference, of the same shape.
        bound: the allowed error of each element, as from `bound`; of the same shape.

    Returns:
        The greatest elementwise |actual - expected| / bound, from 0 to 1.

    Raises:
        AssertionError: the shapes differ, or an element is out of bounds. The text names the worst
            element, with what was got, expected and allowed.
    """
    if not actual.shape == expected.shape == bound.shape:
        shapes = [tuple(t.shape) for t in (actual, expected, bound)]
        raise AssertionError(
            f"{name}: shape {shapes[0]} given, expected {shapes[1]} (bound {shapes[2]})"
        )
    ratio = error_ratio(actual, expected, bound)
    if ratio <= 1.0:
        return ratio
    ratios = _ratios(actual, expected, bound)
    flat, beyond = int(ratios.argmax()), int((ratios > 1).sum())
    index = [int(i) for i in torch.unravel_index(torch.tensor(flat, device="cpu"), ratios.shape)]
    got, want, allowed = (
        t.detach().cpu().reshape(-1)[flat].item() for t in (actual, expected, bound)
    )
    raise AssertionError(
        f"{name}{index} = {got!r}, expected {want!r}, error {abs(got - want):.3g} is "
        f"{ratio:.3g} times the bound "
        f"{allowed:.3g} ({beyond} of {ratios.numel()} elements out of bounds, dtype {actual.dtype})"
    )


def _ratios(actual: Tensor, expected: Tensor, bound: Tensor) -> Tensor:
    """Return the elementwise error over bound, inf for elements without a finite answer."""
    error, b = _error(actual.detach().cpu(), expected.detach().cpu()), bound.detach().cpu().double()
    ratios = torch.where(error == 0, 0.0, error / b.abs())
    # An infinite or NaN bound must not turn an error into 0. Nothing is within a negative bound.
    unusable = ratios.isnan() | (b.isinf() & (error != 0)) | (b < 0)
    return torch.where(unusable, math.inf, ratios)


def _error(a: Tensor, e: Tensor) -> Tensor:
    """Return |a - e| in float64; 64-bit whole numbers are subtracted first, and rounded up."""
    is_complex = a.is_complex() or e.is_complex()
    if is_complex or not {a.dtype, e.dtype} & {torch.int64, torch.uint64}:
        a, e = (x.to(torch.complex128 if is_complex else torch.float64) for x in (a, e))
        return torch.where(a == e, 0.0, (a - e).abs())  # equal infinities have no error
    pairs = zip(*(map(Decimal, x.flatten().tolist()) for x in (a, e)), strict=True)
    errors = [_rounded_up(abs(one - other)) for one, other in pairs]
    return torch.tensor(errors, dtype=torch.float64, device="cpu").reshape(a.shape)


def _rounded_up(x: Decimal) -> float:
    """Return a float that is not less than x: no error may be rounded down to its bound."""
    near = float(x)
    return math.nextafter(near, math.inf) if x.compare(Decimal(near)) == 1 else near
