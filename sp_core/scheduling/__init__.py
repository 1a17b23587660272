"""Plan which rank computes which sequences, and in which order a pipeline computes micro-batches.

An `Assignment` says which ranks compute which sequences of unequal length. `pipeline` assigns
layers to stages, and orders the forwards and backwards of each stage. All of it is computed
locally, without communication. `sp_core.llama` follows the assignments and orders.
"""

from sp_core.scheduling.assignment import (
    POLICIES,
    Assignment,
    Work,
    balanced,
    contiguous,
    dynamic,
    padded,
    round_robin,
)
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

__all__ = [
    "POLICIES",
    "Assignment",
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
