"""Sizes of the comparison with peers, and how often each contestant is timed."""

from __future__ import annotations

import math

import msgspec

from benchmarks.launching import UsageError

RANKS = 2
LAYOUTS = {"allgather_kv": ("contiguous", "zigzag"), "ring": ("contiguous", "zigzag"), "ulysses": ("contiguous",)}
BALANCED = {"allgather_kv": "zigzag", "ring": "zigzag", "ulysses": "contiguous"}
REFERENCE_SEQ = 4096  # `rounds` counts samples at this length
MAX_ROUNDS = 4  # times `rounds`, for shorter sequences
MIN_SAMPLES = 3


class Setting(msgspec.Struct, frozen=True):
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
        UsageError: some contestant cannot split these sizes.
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
            raise UsageError(f"--seq {self.seqs}: name each length once, and one at least.")
        bad = [seq for seq in self.seqs if seq < 2 * RANKS or seq % (2 * RANKS)]
        if bad:
            raise UsageError(f"--seq {bad[0]} is no multiple of {2 * RANKS}; the peers cannot split it over {RANKS} ranks.")
        if min(self.rounds, self.head_dim) < 1:
            raise UsageError(f"--rounds {self.rounds} and --head-dim {self.head_dim}; pass 1 or more.")
        if self.heads < RANKS or self.heads % RANKS:
            raise UsageError(f"--heads {self.heads} is no multiple of {RANKS}, the number of ranks.")

    def samples(self, seq: int) -> int:
        """Return how often each contestant is timed at a length, in one launch."""
        wanted = math.ceil(self.rounds * REFERENCE_SEQ / seq)
        return max(min(wanted, MAX_ROUNDS * self.rounds), min(MIN_SAMPLES, self.rounds))

    def extras(self, seq: int) -> bool:
        """Return whether unmasked attention and single ranks are measured at a length."""
        return seq <= max(self.extras_up_to, min(self.seqs))
