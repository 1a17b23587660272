"""Compare the formulas of `cost` with numbers that were counted by hand."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import sp_core as sp
from sp_core import cost

QUERIES = sp.Sharding.from_positions([[0, 1], [2], [3, 4, 5], []])
OTHER = sp.Sharding.from_positions([[0, 1], [2], [], [3, 4, 5]])  # alike in the first two ranks
APART = {"kv_sharding": sp.Sharding.from_positions([[0], [1, 2, 3, 4], [], [5]])}
LSE = {"return_lse": True, "lse_grad": True}
SENT: dict[str, tuple[dict[str, Any], str]] = {
    "alike": (
        {},
        """
        allgather_kv 0 720 0 1680, 0 360 0 1560, 0 1080 0 1800, 0 0 0 1440
        ring 2 600 5 2040, 2 360 5 1800, 2 480 5 1920, 2 480 4 1440
        ulysses 0 560 0 480, 0 400 0 480, 0 720 0 480, 0 120 0 360
        hybrid 1 480 3 1440, 1 360 3 840, 1 480 3 1320, 1 240 3 840
        """,
    ),
    "causal": (
        {**APART, "mask": sp.Mask(causal=True), "itemsize": 8, **LSE},
        """
        allgather_kv 0 1440 0 3840, 0 5760 0 6720, 0 0 0 2880, 0 1440 0 3840
        ring 2 960 5 3840, 3 2880 6 5760, 1 1920 4 4800, 2 2400 4 4800
        ulysses 0 1888 0 2208, 0 3200 0 1504, 0 1488 0 2640, 0 1056 0 1280
        hybrid 1 2464 2 5184, 1 2784 2 2464, 0 480 1 2496, 0 896 1 1280
        """,
    ),
    "shared": (
        {**APART, "mask": sp.Mask(causal=True), "shared": True, **LSE},
        """
        allgather_kv 2 600 2 1800, 2 240 2 720, 3 720 3 2160, 2 600 2 1800
        ring 1 480 2 1440, 1 120 2 360, 3 720 6 2160, 0 0 0 0
        ulysses 0 504 0 584, 0 840 0 392, 0 384 0 720, 0 288 0 320
        hybrid 0 232 0 512, 0 512 0 232, 1 520 2 1448, 1 448 2 720
        """,
    ),
    "for q": (
        {"kv_sharding": OTHER, "needs_grad": (True, False, False)},
        """
        allgather_kv 0 720 0 720, 0 360 0 360, 0 0 0 0, 0 1080 0 1080
        ring 2 600 2 600, 3 720 3 720, 1 120 1 120, 2 480 2 480
        ulysses 0 560 0 320, 0 400 0 280, 0 360 0 360, 0 480 0 120
        hybrid 1 480 1 400, 1 360 1 280, 1 360 1 360, 1 480 1 240
        """,
    ),
    "for k": (
        {"kv_sharding": OTHER, "needs_grad": (False, True, False)},
        """
        allgather_kv 0 720 0 1680, 0 360 0 1560, 0 0 0 1440, 0 1080 0 1800
        ring 2 600 5 2040, 3 720 6 2160, 1 120 4 1560, 2 480 4 1440
        ulysses 0 560 0 320, 0 400 0 280, 0 360 0 540, 0 480 0 120
        hybrid 1 480 3 1360, 1 360 3 760, 1 360 3 1560, 1 480 3 600
        """,
    ),
    "alike for q": (
        {"needs_grad": (True, False, False)},
        """
        allgather_kv 0 720 0 720, 0 360 0 360, 0 1080 0 1080, 0 0 0 0
        ring 2 600 2 600, 2 360 2 360, 2 480 2 480, 2 480 2 480
        ulysses 0 560 0 480, 0 400 0 480, 0 720 0 480, 0 120 0 360
        hybrid 1 480 3 1440, 1 360 3 840, 1 480 3 1320, 1 240 3 840
        """,
    ),
    "for sinks": (
        {"kv_sharding": OTHER, "needs_grad": (False,) * 3, "sinks_grad": True},
        """
        allgather_kv 0 720 0 720, 0 360 0 360, 0 0 0 0, 0 1080 0 1080
        ring 2 600 2 600, 3 720 3 720, 1 120 1 120, 2 480 2 480
        ulysses 0 560 0 160, 0 400 0 80, 0 360 0 300, 0 480 0 0
        hybrid 1 480 1 320, 1 360 1 200, 1 360 1 360, 1 480 1 120
        """,
    ),
    "for none": (
        {"needs_grad": (False,) * 3, "return_lse": True},
        """
        allgather_kv 0 720 0 0, 0 360 0 0, 0 1080 0 0, 0 0 0 0
        ring 2 600 0 0, 2 360 0 0, 2 480 0 0, 2 480 0 0
        ulysses 0 624 0 0, 0 480 0 0, 0 744 0 0, 0 168 0 0
        hybrid 1 512 0 0, 1 392 0 0, 1 480 0 0, 1 288 0 0
        """,
    ),
}
"""Changes of a problem, and the traffic that was counted by hand, tensor by tensor. A line has a
scheme, and for each of four ranks messages and bytes of the forward, then of the backward.
"""


def numbers(*traffic: cost.Both) -> str:
    return ", ".join(
        " ".join(f"{one.messages} {one.bytes_sent}" for one in both) for both in traffic
    )


def sent(**change: Any) -> dict[str, list[cost.Both]]:
    """Return by scheme what each of four ranks sends. Hybrid has two groups of two ranks."""
    problem = replace(cost.Attention(QUERIES, QUERIES, sp.Mask(), 2, 6, 3, 5, 2), **change)
    alone, pairs, whole = [[0], [1], [2], [3]], [[0, 1], [2, 3]], [[0, 1, 2, 3]]
    schemes = (cost.allgather_kv, cost.ring, cost.ulysses)
    found = {each.__name__: [each(problem, rank) for rank in range(4)] for each in schemes} | {
        "hybrid": [cost.hybrid(problem, *divmod(rank, 2), pairs) for rank in range(4)]
    }
    assert found["ring"] == [cost.hybrid(problem, rank, 0, alone) for rank in range(4)]
    assert found["ulysses"] == [cost.hybrid(problem, 0, rank, whole) for rank in range(4)]
    return found


@pytest.mark.parametrize("name", SENT)
def test_four_ranks_send_what_was_counted_by_hand(name: str) -> None:
    """With groups of one rank hybrid attention is the ring, with one group it is Ulysses."""
    change, counted = SENT[name]
    assert [f"{scheme} {numbers(*each)}" for scheme, each in sent(**change).items()] == [
        line.strip() for line in counted.strip().splitlines()
    ]


def test_short_numbers_of_numpy_count_as_those_of_python() -> None:
    """A product of two of them may be beyond an int8."""
    names = ("batch", "num_heads", "num_kv_heads", "head_dim", "itemsize")
    short = dict(zip(names, np.array([2, 6, 3, 5, 2], np.int8), strict=True))
    assert sent(**short) == sent()


@pytest.mark.parametrize("keys", [QUERIES, OTHER], ids=["alike", "other lengths"])
@pytest.mark.parametrize("learns", [False, True])
def test_gradients_of_keys_travel_with_those_of_values(keys: sp.Sharding, learns: bool) -> None:
    """`learns` says whether q needs a gradient, too."""
    both, k, v = (
        sent(kv_sharding=keys, needs_grad=(learns, *needed))
        for needed in ((True, True), (True, False), (False, True))
    )
    assert both == k == v


def test_a_pair_of_parallel_layers_sends_what_was_counted_by_hand() -> None:
    traffic = [cost.tp_sp(QUERIES, rank, batch=2, hidden=5, itemsize=2) for rank in range(4)]
    assert numbers(*traffic) == "0 200 0 320, 0 160 0 220, 0 240 0 420, 0 120 0 120"
