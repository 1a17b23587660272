"""What is measured: sizes, and how often. Plain numbers; the driver writes them, the ranks read them."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

RANKS = 2
LAYOUTS = {"allgather_kv": ("contiguous", "zigzag"), "ring": ("contiguous", "zigzag"), "ulysses": ("contiguous",)}
BALANCED = {"allgather_kv": "zigzag", "ring": "zigzag", "ulysses": "contiguous"}
REFERENCE_SEQ = 4096  # `rounds` counts samples at this length
MAX_ROUNDS = 4  # times `rounds`, for shorter sequences
MIN_SAMPLES = 3


class SettingError(ValueError):
    """Sizes that cannot be measured, told to the user without a stack."""


@dataclass(frozen=True)
class Setting:
    """One comparison; batch 1, float32.

    Args:
        seqs: sequence lengths.
        heads: H, a multiple of the number of ranks.
        head_dim: D.
        rounds: samples of each contestant in one launch at length 4096; shorter sequences get more, longer ones fewer.
        extras_up_to: longest sequence at which unmasked attention and single ranks are measured too.
        seed: of inputs and order.
        check_only: compare results and time nothing.

    Raises:
        SettingError: sizes that some contestant cannot split.
    """

    seqs: tuple[int, ...] = (1024, 4096, 8192)
    heads: int = 8
    head_dim: int = 64
    rounds: int = 3
    extras_up_to: int = 4096
    seed: int = 0
    check_only: bool = False

    def __post_init__(self) -> None:
        if not self.seqs or len(set(self.seqs)) != len(self.seqs):
            raise SettingError(f"--seq {self.seqs}: name each length once, and one at least.")
        bad = [seq for seq in self.seqs if seq < 2 * RANKS or seq % (2 * RANKS)]
        if bad:
            raise SettingError(f"--seq {bad[0]} is no multiple of {2 * RANKS}; the peers cannot split it over {RANKS} ranks.")
        if self.rounds < 1:
            raise SettingError(f"--rounds {self.rounds}; pass 1 or more.")
        if self.heads < RANKS or self.heads % RANKS:
            raise SettingError(f"--heads {self.heads} is no multiple of {RANKS}, the number of ranks.")

    def samples(self, seq: int) -> int:
        """How often each contestant is timed at a length, in one launch."""
        wanted = math.ceil(self.rounds * REFERENCE_SEQ / seq)
        return max(min(wanted, MAX_ROUNDS * self.rounds), min(MIN_SAMPLES, self.rounds))

    def extras(self, seq: int) -> bool:
        """Whether unmasked attention and single ranks are measured at a length."""
        return seq <= max(self.extras_up_to, min(self.seqs))

    def as_dict(self) -> dict[str, Any]:
        """All fields as plain values."""
        return {**asdict(self), "seqs": list(self.seqs)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Setting:
        """The setting that `as_dict` described."""
        return cls(**{**values, "seqs": tuple(values["seqs"])})
