"""What one run of the scaling experiment computes: sizes, presets, and the numbers that follow from them by formula.

Shapes: B batch, S sequence, E model dim, H heads, K key/value heads, D head dim, F feed-forward dim, P ranks.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}  # float64 is what these are judged against
LAYOUTS = ("contiguous", "zigzag", "striped")
DEVICES = ("cpu", "cuda")


class CaseError(ValueError):
    """A case that cannot be run; the text says why and what to pass instead."""


@dataclass(frozen=True)
class Case:
    """One transformer block on `ranks` ranks, forward.

    Args:
        ranks: P.
        hidden: E, which is heads times head dim.
        heads: H.
        kv_heads: K, a divisor of H.
        ffn: F.
        seq: S, tokens of the whole sequence.
        batch: B.
        causal: whether a token sees only itself and those before it.
        layout: which rank owns which tokens.
        dtype: of weights and activations.
        iterations: timed steps.
        warmup: steps before them that are not timed.
        device: "cpu" or "cuda".
        transport: "auto", or one that the device offers.
        share_gpu: let several ranks use one GPU.
        seed: of weights and embedding.
    """

    ranks: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    seq: int
    batch: int
    causal: bool = False
    layout: str = "contiguous"
    dtype: str = "float32"
    iterations: int = 10
    warmup: int = 2
    device: str = "cpu"
    transport: str = "auto"
    share_gpu: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        _check_counts(self)
        _check_heads(self)
        _check_choices(self)

    @property
    def head_dim(self) -> int:
        """D."""
        return self.hidden // self.heads

    @property
    def tokens(self) -> int:
        """B*S."""
        return self.batch * self.seq

    @property
    def longest_sum(self) -> int:
        """Terms of the longest sum in the block: a linear layer's, or that over the keys."""
        return max(self.hidden, self.ffn, self.seq)

    @property
    def kv_bytes(self) -> int:
        """Bytes of all keys and values: what every rank holds after the AllGather."""
        return 2 * self.tokens * self.kv_heads * self.head_dim * ITEM_BYTES[self.dtype]

    @property
    def flops(self) -> int:
        """Floating point operations of one step over all ranks, a multiply-add counted as two."""
        kv_width = self.kv_heads * self.head_dim
        weights = 2 * self.hidden * (self.hidden + kv_width + self.ffn)
        pairs = self.seq * (self.seq + 1) // 2 if self.causal else self.seq**2
        return 2 * self.tokens * weights + 4 * self.batch * pairs * self.hidden

    def as_dict(self) -> dict[str, Any]:
        """All fields and the derived head dim, as plain values."""
        return {"scheme": "allgather_kv", "direction": "forward", **asdict(self), "head_dim": self.head_dim}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Case:
        """The inverse of `as_dict`."""
        return cls(**{name: value for name, value in values.items() if name in cls.__dataclass_fields__})

    def with_ranks(self, ranks: int) -> Case:
        """The same computation on another number of ranks."""
        return replace(self, ranks=ranks)


PRESETS: dict[str, dict[str, Any]] = {
    "small": {"hidden": 512, "heads": 8, "seq": 2048, "batch": 1, "iterations": 20, "warmup": 3, "dtype": "float32"},
    "paper": {"hidden": 5120, "heads": 40, "seq": 4096, "batch": 4, "iterations": 10, "warmup": 2, "dtype": "float32,bfloat16"},
}
"""Sizes by name; whatever is not listed follows from them or has the default of `Case`."""


def complete(sizes: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """Fill in the sizes that follow from others.

    Args:
        sizes: a preset with the given values over it.
        given: only what the user asked for, which must not be overruled.

    Returns:
        Values for `Case`, without `head_dim`.

    Raises:
        CaseError: `head_dim` does not fit heads and hidden.
    """
    head_dim = sizes.pop("head_dim", None)
    if head_dim is not None and "hidden" not in given:
        sizes["hidden"] = sizes["heads"] * head_dim
    if head_dim is not None and sizes["heads"] * head_dim != sizes["hidden"]:
        raise CaseError(
            f"{sizes['heads']} heads of {head_dim} make {sizes['heads'] * head_dim}, hidden is {sizes['hidden']}. "
            "Leave one of --hidden, --heads, --head-dim out, or make them fit."
        )
    return {"kv_heads": sizes["heads"], "ffn": 4 * sizes["hidden"], **sizes}


def _check_counts(case: Case) -> None:
    for name in ("ranks", "hidden", "heads", "kv_heads", "ffn", "seq", "batch", "iterations"):
        if getattr(case, name) < 1:
            raise CaseError(f"{name} is {getattr(case, name)}; pass 1 or more.")
    if case.warmup < 0:
        raise CaseError(f"warmup is {case.warmup}; pass 0 or more.")


def _check_heads(case: Case) -> None:
    if case.hidden % case.heads:
        raise CaseError(f"{case.heads} heads do not divide hidden {case.hidden}. Pass a --hidden that is a multiple of --heads.")
    if case.heads % case.kv_heads:
        raise CaseError(f"{case.kv_heads} key/value heads do not divide {case.heads} heads. Pass a divisor as --kv-heads.")


def _check_choices(case: Case) -> None:
    for name, choices in (("dtype", tuple(ITEM_BYTES)), ("layout", LAYOUTS), ("device", DEVICES)):
        if getattr(case, name) not in choices:
            raise CaseError(f"{name} is {getattr(case, name)!r}; pass one of {', '.join(choices)}.")
