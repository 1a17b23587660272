"""Decide which rank computes what, and when.

Sequences of unequal length on ranks, micro-batches on the stages of a pipeline.

Plans are made of integers, without communication. `sp_core.llama` carries them out.
"""

from sp_core.scheduling.pipeline import (
    Slot,
    Timeline,
    bubble_share,
    gpipe,
    one_forward_one_backward,
    picture,
    prefill_only,
    split_stages,
    timeline,
)
from sp_core.scheduling.plan import (
    POLICIES,
    Plan,
    Work,
    balanced,
    contiguous,
    dynamic,
    padded,
    round_robin,
)

__all__ = [
    "POLICIES",
    "Plan",
    "Slot",
    "Timeline",
    "Work",
    "balanced",
    "bubble_share",
    "contiguous",
    "dynamic",
    "gpipe",
    "one_forward_one_backward",
    "padded",
    "picture",
    "prefill_only",
    "round_robin",
    "split_stages",
    "timeline",
]
