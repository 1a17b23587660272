"""What a ring holds at once on each of four ranks, by the length of the sequence: live tensors and the transport's buffers.

The ranks are threads; bytes are counted, not timed, so this needs no quiet machine and says the
same on any.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.reporting.tables import Table, make
from benchmarks.statistics import Requirement, exact_interval
from sp_core.mask import Mask
from sp_core.mesh import Mesh
from sp_core.schemes import ring_attention
from sp_core.sharding import Sharding
from sp_core.testing import run_threads
from tests.oracle.live_bytes import LiveBytes

RANKS = 4
SEQS = (4096, 8192, 16384, 32768)
HEADS, HEAD_DIM = 2, 64
BOUND = 1.15  # times what is proportional to S/P


def live_bytes(seq: int) -> int:
    """The most bytes of tensors alive at once on any rank, forward and backward: causal, zigzag, float32, check="off"."""
    peaks = [0] * RANKS

    def body(comm: Any) -> None:
        sharding = Sharding.zigzag(seq, RANKS)
        with Mesh(comm, check="off", sp=RANKS) as mesh:
            shape = (1, sharding.local_len(comm.rank), HEADS, HEAD_DIM)
            q, k, v = (torch.ones(shape, requires_grad=True) for _ in range(3))
            grad = torch.ones(shape)
            with LiveBytes((q, k, v, grad)) as live:
                out = ring_attention(
                    q, k, v, comm=mesh["sp"], sharding=sharding, mask=Mask(causal=True)
                )
                torch.autograd.grad(out, (q, k, v), grad)
            peaks[comm.rank] = live.peak

    run_threads(RANKS, body)
    return max(peaks)


def growth(peaks: dict[int, int]) -> float:
    """The largest over the smallest number of bytes per token of a rank."""
    per_token = [peak / (seq / RANKS) for seq, peak in peaks.items()]
    return max(per_token) / min(per_token)


def table(peaks: dict[int, int]) -> Table:
    """Return a table of the bytes by length, with a title that says whether they are proportional."""
    verdict = Requirement("", "<=", BOUND, exact_interval([growth(peaks)]))
    title = (
        f"live bytes of the ring on each of {RANKS} ranks, {HEADS} heads of {HEAD_DIM}, float32: "
    )
    title += f"{growth(peaks):.3f} times proportional to S/P, must be <= {BOUND}: {verdict.mark}"
    rows = [
        (str(seq), f"{peak / 2**20:.2f}", f"{peak / (seq / RANKS):.0f}")
        for seq, peak in peaks.items()
    ]
    return make(title, ("sequence", "MiB", "bytes per token of a rank"), rows)


def measure(seqs: Sequence[int] = SEQS) -> dict[int, int]:
    """The bytes at each length."""
    return {seq: live_bytes(seq) for seq in seqs}
