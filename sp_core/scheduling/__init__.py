"""Plan which rank computes which sequences, and in which order a pipeline computes micro-batches.

`plan` assigns sequences of unequal length to ranks. `pipeline` assigns layers to stages, and orders
the forwards and backwards of each stage. All of it is computed locally, without communication.
`sp_core.llama` follows the plans and orders.
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
