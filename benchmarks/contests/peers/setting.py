"""Sizes of the comparison with peers, and how often each contestant is timed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence

import msgspec

from benchmarks.launching import Record, UsageError
from benchmarks.statistics import Interval, Requirement, exact_interval

RANKS = 2
LAYOUTS = {
    "allgather_kv": ("contiguous", "zigzag"),
    "ring": ("contiguous", "zigzag"),
    "ulysses": ("contiguous",),
}
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
        rounds: samples of each contestant in one launch at length 4096; shorter sequences get more,
            longer ones fewer.
        extras_up_to: longest sequence at which unmasked attention and single ranks are measured
            too.
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
            raise UsageError(
                f"--seq {bad[0]} is no multiple of {2 * RANKS}; the peers cannot split it over {RANKS} ranks."
            )
        if min(self.rounds, self.head_dim) < 1:
            raise UsageError(
                f"--rounds {self.rounds} and --head-dim {self.head_dim}; pass 1 or more."
            )
        if self.heads < RANKS or self.heads % RANKS:
            raise UsageError(
                f"--heads {self.heads} is no multiple of {RANKS}, the number of ranks."
            )

    def samples(self, seq: int) -> int:
        """Return how often each contestant is timed at a length, in one launch."""
        wanted = math.ceil(self.rounds * REFERENCE_SEQ / seq)
        return max(min(wanted, MAX_ROUNDS * self.rounds), min(MIN_SAMPLES, self.rounds))

    def extras(self, seq: int) -> bool:
        """Return whether unmasked attention and single ranks are measured at a length."""
        return seq <= max(self.extras_up_to, min(self.seqs))


LAUNCHES = 12  # a verdict needs at least as many
PEERS = ("torch ring/all-gather", "torch ring/all-to-all", "deepspeed ulysses")
SOLO, DUO = "sdpa/1 thread", "sdpa/2 threads"


def medians(launches: Sequence[Record], seq: int, name: str) -> list[float | None]:
    """Return the seconds of a contestant in each launch; None where it was not timed."""
    found = (launch.get("seqs", {}).get(str(seq), {}).get(name, {}) for launch in launches)
    return [heat.get("median_s") for heat in found]


def typical(launches: Sequence[Record], seq: int, name: str) -> float | None:
    """Return the median over the launches that timed a contestant."""
    times = [x for x in medians(launches, seq, name) if x is not None]
    return statistics.median(times) if times else None


def ratio(
    launches: Sequence[Record], seq: int, above: str | None, below: str | None
) -> Interval | None:
    """Return the time of one contestant over that of another, over all launches that timed both."""
    pairs = zip(
        medians(launches, seq, above or ""), medians(launches, seq, below or ""), strict=True
    )
    values = [a / b for a, b in pairs if a is not None and b is not None]
    return exact_interval(values) if values else None


def best(launches: Sequence[Record], seq: int) -> str | None:
    """Return our quickest way with check="off" over all launches: one for all of them, not the luckiest of each."""
    names = [f"{scheme}/{layout}/off" for scheme, layouts in LAYOUTS.items() for layout in layouts]
    found = {name: time for name in names if (time := typical(launches, seq, name)) is not None}
    return min(found, key=lambda name: found[name], default=None)


def lines(
    launches: Sequence[Record], seqs: Sequence[int], extras: Sequence[int]
) -> Iterator[Requirement]:
    """Yield all requirements; those for no particular length are judged at 4096, else at the longest that was measured."""

    def line(
        text: str, seq: int, relation: str, bound: float, above: str | None, below: str | None
    ) -> Requirement:
        return Requirement(
            f"{text}, {seq} tokens", relation, bound, ratio(launches, seq, above, below), LAUNCHES
        )

    place = REFERENCE_SEQ if REFERENCE_SEQ in extras else max(extras)
    winner = best(launches, place)
    for name in (winner, winner and winner.replace("/off", "/agree")):
        yield line(f"{name} / two threads", place, "<=", 1.05, name, DUO)
    for seq in seqs:
        for peer in PEERS:
            yield line(f"{peer} / {best(launches, seq)}", seq, ">", 1.0, peer, best(launches, seq))
    yield line(
        "ring, contiguous / zigzag", place, ">=", 1.3, "ring/contiguous/off", "ring/zigzag/off"
    )
    for scheme, layout in BALANCED.items():
        name = f"{scheme}/{layout}/off"
        yield line(f"{scheme}, causal / full mask", place, "<=", 0.6, name, f"{name}/full")
    for scheme in BALANCED:
        yield line(
            f"{scheme}, one rank / one thread", place, "<=", 1.03, f"{scheme}/one rank", SOLO
        )
