"""Decide which rank computes what, and when.

Sequences of unequal length on ranks, micro-batches on the stages of a pipeline.

Plans are made of integers, without communication. `sp_core.llama` carries them out.
"""

from sp_core.scheduling.pipeline import (
    Slot,
    gpipe,
    one_forward_one_backward,
    prefill_only,
    split_stages,
)
from sp_core.scheduling.plan import (
    POLICIES,
    Plan,
    Work,
    balanced,
    contiguous,
    dynamic,
    round_robin,
)

__all__ = [
    "POLICIES",
    "Plan",
    "Slot",
    "Work",
    "balanced",
    "contiguous",
    "dynamic",
    "gpipe",
    "one_forward_one_backward",
    "prefill_only",
    "round_robin",
    "split_stages",
]
