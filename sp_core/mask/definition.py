"""The mask: its definition on pairs of global positions, and the checks of its arguments."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import index

import torch
from torch import Tensor

from sp_core.arguments import check
from sp_core.errors import ShapeError

Positions = range | Sequence[int] | Tensor


@dataclass(frozen=True)
class Mask:
    """Which keys a query sees, defined on global positions.

    Query position q sees key position k when all of these hold:
        causal: k <= q, also when query and key lengths differ.
        window w: the w nearest keys on each allowed side, itself included: 0 <= q - k < w when
        causal, |q - k| < w when not.
        documents: both lie in the document of the same number. Positions stay global: with
            kv_documents, document i of the queries sees document i of the keys, and causal and
            window still compare q and k as they are, not relative to their documents.

    Args:
        causal: hide the keys after the query.
        window: tokens, at least 1.
        documents: boundaries 0 = b0 <= b1 <= ... <= bn = seq_len (the cu_seqlens of the field); an
            empty document is allowed.
        kv_documents: boundaries of the keys' documents where they differ (cross attention); the
            same number of documents.

    Raises:
        TypeError: causal is not a bool, window or a boundary is not an integer.
        ValueError: window is below 1.
        ShapeError: boundaries that do not start at 0, decrease, or number differently for queries
            and keys.
    """

    causal: bool = False
    window: int | None = None
    documents: tuple[int, ...] | None = None
    kv_documents: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        """Normalise to hashable ints, because plans are cached on the mask."""
        check(causal=self.causal)
        object.__setattr__(self, "window", _window(self.window))
        object.__setattr__(self, "documents", _boundaries("documents", self.documents))
        object.__setattr__(self, "kv_documents", _boundaries("kv_documents", self.kv_documents))
        count, kv_count = (x and len(x) - 1 for x in (self.documents, self.key_documents))
        if count != kv_count:
            raise ShapeError(
                f"{count} documents and {kv_count} kv_documents were given, needed the same "
                f"number; "
                "give documents for the queries too, and repeat a boundary for an empty document"
            )

    @property
    def key_documents(self) -> tuple[int, ...] | None:
        """The boundaries of the keys' documents: kv_documents, or documents if none were given."""
        return self.documents if self.kv_documents is None else self.kv_documents

    def difference_range(self) -> tuple[int | None, int | None]:
        """Return the least and greatest visible q - k, without regard to documents.

        None means no limit.
        """
        greatest = None if self.window is None else self.window - 1
        return (0 if self.causal else None if greatest is None else -greatest), greatest

    def allowed(self, q_positions: Positions, kv_positions: Positions) -> Tensor:
        """Return for every pair of positions whether the query sees the key.

        This is the definition of the mask.

        Args:
            q_positions: Sq global positions, in any order.
            kv_positions: Sk global positions, in any order.

        Returns:
            Bool tensor (Sq, Sk), on the device of the query positions.

        Raises:
            ShapeError: a position outside the documents.
        """
        q = position_tensor(q_positions)
        k = position_tensor(kv_positions).to(q.device)
        least, greatest = self.difference_range()
        difference = q[:, None] - k[None, :]
        visible = torch.ones_like(difference, dtype=torch.bool)
        if least is not None:
            visible &= difference >= least
        if greatest is not None:
            visible &= difference <= greatest
        if self.documents is not None and self.key_documents is not None:
            visible &= (
                document_of(q, self.documents)[:, None]
                == document_of(k, self.key_documents)[None, :]
            )
        return visible

    def check_lengths(self, seq_len: int, kv_seq_len: int | None = None) -> None:
        """Refuse documents that do not end at the end of the sequence.

        Args:
            seq_len: tokens of the whole query sequence.
            kv_seq_len: tokens of the whole key sequence; seq_len when None.

        Raises:
            ShapeError: documents end elsewhere.
        """
        for name, bounds, needed_name, needed in (
            ("documents", self.documents, "seq_len", seq_len),
            (
                "kv_documents",
                self.key_documents,
                "kv_seq_len",
                seq_len if kv_seq_len is None else kv_seq_len,
            ),
        ):
            if bounds is not None and bounds[-1] != needed:
                raise ShapeError(
                    f"the mask's {name} end at {bounds[-1]}, needed {needed_name} = {needed}; "
                    f"make the "
                    f"last boundary {needed} (for cross attention give kv_documents for the keys)"
                )


def position_tensor(positions: Positions, device: torch.device | str | None = None) -> Tensor:
    """Turn positions (range, sequence of ints, or 1-D integer tensor) into an int64 tensor (S,).

    Raises:
        ShapeError: a tensor that is not one-dimensional.
        TypeError: positions that are not integers.
    """
    if isinstance(positions, range):
        tensor = torch.arange(positions.start, positions.stop, positions.step, device=device)
    elif isinstance(positions, Tensor):
        kind = positions.dtype
        if kind.is_floating_point or kind.is_complex or kind == torch.bool:
            raise TypeError(
                f"positions have dtype {positions.dtype}, needed an integer dtype; pass global "
                f"token positions"
            )
        tensor = positions.to(device=device or positions.device, dtype=torch.int64)
    else:
        tensor = torch.tensor([*map(index, positions)], dtype=torch.int64, device=device)
    if tensor.dim() != 1:
        raise ShapeError(
            f"positions have shape {tuple(tensor.shape)}, needed one dimension; one list serves "
            f"the whole batch"
        )
    return tensor


def document_of(positions: Tensor, boundaries: tuple[int, ...]) -> Tensor:
    """Return the number of the document of each position.

    A position on a boundary opens the next non-empty document.

    Raises:
        ShapeError: a position outside the documents.
    """
    if positions.numel():
        check_inside(int(positions.min()), int(positions.max()), boundaries)
    ends = torch.tensor(boundaries[1:], device=positions.device)
    return torch.bucketize(positions.contiguous(), ends, right=True)


def check_inside(first: int, last: int, boundaries: tuple[int, ...]) -> None:
    """Refuse positions outside the documents.

    Raises:
        ShapeError: first is negative or last is not below the final boundary.
    """
    if first < 0 or last >= boundaries[-1]:
        raise ShapeError(
            f"positions {first}..{last} given, but the documents of the mask hold "
            f"0..{boundaries[-1] - 1}; "
            "let the last boundary be the sequence length (give padding a document of its own)"
        )


def document_number(position: int, boundaries: tuple[int, ...]) -> int:
    """Return the number of the document of one position."""
    return bisect_right(boundaries, position) - 1


def _window(window: int | None) -> int | None:
    """Check a window length."""
    check(window=window)
    if window is None:
        return None
    if window < 1:
        raise ValueError(
            f"window is {window}, needed at least 1, because a query counts itself; use None for "
            f"no window"
        )
    return int(window)


def _boundaries(name: str, values: Sequence[int] | Tensor | None) -> tuple[int, ...] | None:
    """Check document boundaries, and make them a tuple of ints."""
    if values is None:
        return None
    items = values.tolist() if isinstance(values, Tensor) else list(values)
    if any(isinstance(b, bool) or not hasattr(b, "__index__") for b in items):
        raise TypeError(
            f"{name} is {values!r}, needed integers: the boundaries 0 = b0 <= ... <= bn = seq_len"
        )
    bounds = tuple(b.__index__() for b in items)
    if not bounds or bounds[0] != 0 or any(a > b for a, b in pairwise(bounds)):
        raise ShapeError(
            f"{name} is {bounds!s:.80}, needed boundaries 0 = b0 <= b1 <= ... <= bn = seq_len "
            f"(cu_seqlens)"
        )
    return bounds
