"""Define the mask on pairs of global positions, and check its arguments.

`Mask` and `position_tensor` are public. A position is the index of a token in the whole sequence.
Boundaries of documents are a tuple of positions 0 = b0 <= b1 <= ... <= bn: document i holds the
positions b_i to b_(i+1) - 1.
"""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import pairwise
from operator import index
from typing import Any

import torch
from torch import Tensor

from sp_core.arguments import check, plain
from sp_core.errors import ShapeError
from sp_core.segments import Joined

FAR = 1 << 100  # stands for no limit: greater than any difference of positions times any step
FAR64 = 1 << 62
"""Positions are below this number. In int64 it also stands for no limit on their difference: the
sum of it and a position does not overflow."""

Positions = range | Sequence[int] | Tensor | Joined
"""Global positions of tokens: a range, a sequence of ints, or an integer tensor (S,). Schemes
pass a `Joined` for a shard of several segments; public functions do not take one."""


@dataclass(frozen=True)
class HashedOnce:
    """Compute the hash of a frozen dataclass once: caches look it up in every step of a ring.

    A subclass repeats `__hash__ = HashedOnce.__hash__`, because `dataclass` would make another one.
    """

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash(self._values)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the fields only: in another process the hash of Python 3.11 may differ."""
        return type(self), self._values

    @property
    def _values(self) -> tuple[Any, ...]:
        return tuple(getattr(self, field.name) for field in fields(self))


@dataclass(frozen=True)
class Mask(HashedOnce):
    """Define which keys a query sees, by global positions.

    A query at position q sees a key at position k if all of these hold:
        causal: k <= q, also if query and key lengths differ.
        window w: 0 <= q - k < w if causal, |q - k| < w if not. The query's own position counts.
        documents: both lie in the document of the same number. With kv_documents, document i of
            the queries sees document i of the keys. Positions stay global: causal and window
            still compare q and k as they are, not relative to their documents.

    Args:
        causal: hide the keys after the query.
        window: greatest distance plus 1, in tokens, at least 1; None for no limit.
        documents: boundaries 0 = b0 <= b1 <= ... <= bn = seq_len, usually called cu_seqlens; an
            empty document is allowed. None for a single sequence.
        kv_documents: boundaries of the keys' documents if they differ (cross attention), as many
            documents; `documents` if None.

    Raises:
        TypeError: causal is not a bool, window or a boundary is not an integer.
        ValueError: window is below 1.
        ShapeError: boundaries that do not start at 0, decrease, are above 2**62, or number
            differently for queries and keys.
    """

    causal: bool = False
    window: int | None = None
    documents: tuple[int, ...] | None = None
    kv_documents: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        """Check the arguments, and convert them to hashable ints: plans are cached by mask."""
        check(causal=self.causal, window=self.window)
        vars(self).update(
            window=plain(self.window),
            documents=_boundaries("documents", self.documents),
            kv_documents=_boundaries("kv_documents", self.kv_documents),
        )
        count, kv_count = (x and len(x) - 1 for x in (self.documents, self.key_documents))
        if count != kv_count:
            raise ShapeError(
                f"{count} documents and {kv_count} kv_documents were given, needed the same "
                f"number; "
                "give documents for the queries too, and repeat a boundary for an empty document"
            )

    __hash__ = HashedOnce.__hash__

    @property
    def key_documents(self) -> tuple[int, ...] | None:
        """Return the boundaries of the keys' documents: kv_documents if given, else documents."""
        return self.kv_documents or self.documents

    def difference_range(self) -> tuple[int | None, int | None]:
        """Return the least and greatest q - k that causal and window allow; None: no limit.

        A window of more than FAR64 tokens is longer than any sequence, so it is no limit either.
        """
        greatest = None if self.window is None or self.window > FAR64 else self.window - 1
        return (0 if self.causal else None if greatest is None else -greatest), greatest

    def allowed(self, q_positions: Positions, kv_positions: Positions) -> Tensor:
        """Return for every pair of positions whether the query sees the key.

        This is the definition of the mask.

        Args:
            q_positions: Sq global positions, in any order.
            kv_positions: Sk global positions, in any order.

        Returns:
            Bool tensor (Sq, Sk), True for visible pairs, on the device of the query positions.

        Raises:
            ShapeError: a position outside the documents, or a tensor that is not one-dimensional.
            TypeError: positions that are not integers.
        """
        q = position_tensor(q_positions)
        k = position_tensor(kv_positions).to(q.device)
        least, greatest = limits(self, (1 << 63) - 1)  # no difference in int64 exceeds this
        difference = q[:, None] - k[None, :]
        visible = (difference >= least) & (difference <= greatest)
        if self.documents is not None:
            of_k = document_of(k, self.kv_documents or self.documents)
            visible &= document_of(q, self.documents)[:, None] == of_k[None, :]
        return visible

    def check_lengths(self, seq_len: int, kv_seq_len: int | None = None) -> None:
        """Refuse documents that do not end at the end of the sequence.

        Args:
            seq_len: number of tokens of the whole query sequence.
            kv_seq_len: number of tokens of the whole key sequence; seq_len if None.

        Raises:
            ShapeError: the last boundary is not the number of tokens.
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


def limits(mask: Mask, far: int = FAR) -> tuple[int, int]:
    """Return the least and greatest (query position - key position) that causal and window allow.

    -far and far stand for no limit.
    """
    least, greatest = mask.difference_range()
    return -far if least is None else least, far if greatest is None else greatest


def position_tensor(positions: Positions, device: torch.device | str | None = None) -> Tensor:
    """Convert positions (range, sequence of ints, or 1-D integer tensor) to an int64 tensor (S,).

    Args:
        positions: S global positions.
        device: the result's device. None: that of `positions` if they are a tensor, else the CPU.

    Raises:
        ShapeError: a tensor that is not one-dimensional.
        TypeError: positions that are not integers, or a list or range with one of 2**62 or more in
            magnitude. Values of a tensor are not checked, because that would wait for a GPU.
    """
    if isinstance(positions, range):
        if positions and max(abs(positions[0]), abs(positions[-1])) >= FAR64:
            raise _unfit(positions)
        tensor = positions.start + positions.step * torch.arange(
            len(positions), device=device or "cpu"
        )
    elif isinstance(positions, Joined):
        tensor = positions.tensor().to(device)
    elif isinstance(positions, Tensor):
        kind = positions.dtype
        if kind.is_floating_point or kind.is_complex or kind == torch.bool:
            raise TypeError(
                f"positions have dtype {positions.dtype}, needed an integer dtype; pass global "
                f"token positions"
            )
        tensor = positions.to(device=device, dtype=torch.int64)
    else:
        has_order = isinstance(positions, Iterable) and not isinstance(positions, (set, frozenset))
        items = [*positions] if has_order else positions
        if items is positions or not all(
            _is_whole(item) and abs(index(item)) < FAR64 for item in items
        ):
            raise _unfit(items)
        tensor = torch.tensor([*map(index, items)], dtype=torch.int64, device=device or "cpu")
    if tensor.dim() != 1:
        raise ShapeError(
            f"positions have shape {tuple(tensor.shape)}, needed one dimension; one list serves "
            f"the whole batch"
        )
    return tensor


def _unfit(positions: object) -> TypeError:
    """Return the error for positions that are not integers below 2**62."""
    return TypeError(
        f"positions are {positions!s:.80}, needed integers below 2**62 in a list or range; "
        f"pass global token positions"
    )


def _is_whole(value: Any) -> bool:
    """Return whether a value is an integer, and no bool."""
    with suppress(TypeError):  # arrays have the method of integers, too
        return index(value) == value and not isinstance(value, bool)
    return False


def document_of(positions: Tensor, boundaries: tuple[int, ...]) -> Tensor:
    """Return for each position the number of its document, int64 (S,), counted from 0.

    A position on a boundary is the first of the next non-empty document.

    Args:
        positions: integer tensor (S,).
        boundaries: as in `Mask`.

    Raises:
        ShapeError: a position outside the documents.
    """
    if positions.numel():
        check_inside(int(positions.min()), int(positions.max()), boundaries)
    ends = torch.tensor(boundaries[1:], device=positions.device)
    return torch.bucketize(positions.contiguous(), ends, right=True)


def document_positions(positions: Tensor, mask: Mask) -> Tensor:
    """Return the position of each token in its document, from positions in the whole sequence."""
    if mask.documents is None:
        return positions
    starts = torch.tensor(mask.documents, device="cpu")
    return positions - starts[document_of(positions, mask.documents)]


def count_visible(mask: Mask, queries: range, keys: range) -> Tensor:
    """Count the keys that each query sees, int64 (Sq,).

    Args:
        mask: which keys a query sees.
        queries: positions of the queries.
        keys: positions of the keys, of step 1.
    """
    q = position_tensor(queries)
    least, greatest = limits(mask, FAR64)
    low, high = (q - greatest).clamp(min=keys.start), (q - least).clamp(max=keys.stop - 1)
    if mask.documents is not None:
        document = document_of(q, mask.documents)
        bounds = torch.tensor(mask.key_documents, device="cpu")
        low = low.maximum(bounds[document])
        high = high.minimum(bounds[document + 1] - 1)
    return (high - low + 1).clamp(min=0)


def check_inside(first: int, last: int, boundaries: tuple[int, ...]) -> None:
    """Refuse positions `first` to `last` unless all lie in documents.

    Raises:
        ShapeError: `first` is negative, or `last` is not below the final boundary.
    """
    if first < 0 or last >= boundaries[-1]:
        raise ShapeError(
            f"positions {first}..{last} given, but the documents of the mask hold "
            f"0..{boundaries[-1] - 1}; "
            "let the last boundary be the sequence length (give padding a document of its own)"
        )


def _boundaries(name: str, values: Sequence[int] | Tensor | None) -> tuple[int, ...] | None:
    """Check document boundaries, and return them as a tuple of ints, or None if None was given.

    `name` is the argument's name, for error texts.
    """
    if values is None:
        return None
    given: Any = values.tolist() if isinstance(values, Tensor) else values
    items: list[Any] = list(given) if isinstance(given, Iterable) else [None]
    if not all(map(_is_whole, items)):
        raise TypeError(
            f"{name} is {values!r}, needed integers: the boundaries 0 = b0 <= ... <= bn = seq_len"
        )
    bounds = tuple(b.__index__() for b in items)
    if not bounds or bounds[0] != 0 or any(a > b for a, b in pairwise((*bounds, FAR64))):
        raise ShapeError(
            f"{name} is {bounds!s:.80}, needed boundaries 0 = b0 <= b1 <= ... <= bn = seq_len "
            f"(cu_seqlens), at most 2**62"
        )
    return bounds
