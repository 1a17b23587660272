"""Turn the sums and copies of a program into calls on memory."""

from collections.abc import Callable, Iterator
from functools import partial

from torch import Tensor

from sp_core.programs import HALF, REDUCTIONS, WIDE_BLOCK
from sp_core.transport import Work


def combination(
    into: Tensor,
    parts: list[Tensor],
    wide: tuple[Tensor, Tensor],
    reduction: str,
    copying: Callable[[Tensor, Tensor], Work],
) -> Iterator[Work]:
    """Yield the calls that write the sum (or maximum, minimum) of some vectors into another one.

    Args:
        into: receives the result.
        parts: the vectors, in the order of the sum; one of them may be `into` itself.
        wide: two float32 buffers, in which half types are added before one rounding.
        reduction: "sum", "max" or "min".
        copying: a function that returns the call that copies its second argument into its first.
    """
    together = REDUCTIONS[reduction]
    if len(parts) == 1:
        yield from (copying(into, part) for part in parts if part.data_ptr() != into.data_ptr())
    elif len(parts) > 2 and into.dtype in HALF:
        yield partial(_add_wide, into, parts, wide, together)
    else:
        total = parts[0] if into.data_ptr() in [part.data_ptr() for part in parts[2:]] else into
        for place, part in enumerate(parts[1:]):
            left = total if place else parts[0]
            yield partial(together, left, part, out=into if place == len(parts) - 2 else total)


def _add_wide(
    into: Tensor, parts: list[Tensor], wide: tuple[Tensor, Tensor], together: Callable[..., Tensor]
) -> None:
    """Write the sum of half-type vectors: add in float32, `WIDE_BLOCK` elements at a time.

    Each element is rounded once.

    Args:
        into, parts, wide: as in `combination`.
        together: the torch function that combines two tensors.
    """
    for start in range(0, into.numel(), WIDE_BLOCK):
        first, *rest = (part[start : start + WIDE_BLOCK] for part in parts)
        total, addend = (room[: first.numel()] for room in wide)
        total.copy_(first)
        for part in rest:
            together(total, addend.copy_(part), out=total)
        into[start : start + WIDE_BLOCK].copy_(total)
