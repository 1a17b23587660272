"""The command that measures balance.

Its counter of operations, what it derives, and what makes it fail.
"""

from __future__ import annotations

from typing import Any

import pytest
from torch.utils.flop_counter import FlopCounterMode

import sp_core as sp
from benchmarks.contests import balance as command
from benchmarks.contests.balance import ATTENTION, attention_operations
from benchmarks.contests.contest import Wrong
from sp_core.llama import create
from sp_core.llama.unequal import compute
from sp_core.scheduling.plan import imbalance
from sp_core.testing import run_threads

SOME = command.workload()[::18]


def test_what_is_counted_while_computing_is_what_the_cost_model_says() -> None:
    """For every policy, to the last operation, on one rank; a plan that leaves one out is seen."""
    few = SOME[::7]

    def body(comm: Any) -> None:
        with sp.Mesh(comm, ring=1, check="off") as mesh:
            model = create(command.CONFIG, mesh)
            for plan in command.plans(few, 1).values():
                known = {ATTENTION: attention_operations}
                with FlopCounterMode(display=False, custom_mapping=known) as counter:
                    compute(model, few, plan)
                assert [counter.get_total_flops()] == command.predicted(plan)["loads"]

    run_threads(1, body)


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_workload_is_balanced_by_plan_and_naive_policies_are_not(ranks: int) -> None:
    found = command.planned(command.workload(), ranks)["planned"]
    shares = {name: imbalance(policy["loads"]) for name, policy in found.items()}
    assert max(shares["balanced"], shares["dynamic"]) < command.BOUND
    assert min(shares["contiguous"], shares["round_robin"]) > command.BOUND


def record() -> dict[str, Any]:
    """As of a launch in which the balanced policy took half the time of the others."""
    known = {"setting": {"ranks": 2}, **command.planned(SOME, 2)}
    policies = {
        name: {
            "counted": plan["loads"],
            "error": 0.0,
            "limit": 1e-6,
            "spans_s": [
                [(0.0, 1.0), (5.0, 6.0)],
                [(0.5, 1.0 + (name != "balanced")), (5.0, 6.0 + (name != "balanced"))],
            ],
        }
        for name, plan in known["planned"].items()
        if name != "padded"
    }
    bubbles = [{"micro_batches": 1, "measured": 0.6, "counted": 0.5, "formula": 0.5}]
    return {**known, "policies": policies, "bubbles": bubbles}


def test_throughput_is_a_ratio_of_the_same_round_and_tables_show_it() -> None:
    made = record()
    found = command.throughput(made, "round_robin")
    assert found is not None
    assert (found.median, found.low, found.high) == (2.0, 2.0, 2.0)
    assert command.throughput(made, "padded") is None
    assert wrong(made) == []
    shown = str(list(command.show({"launches": [made]})))
    assert "2.000 [2.000, 2.000]" in shown
    assert "bubble: 20.0%" in shown


def wrong(made: dict[str, Any]) -> list[str]:
    return [one for one in command.show({"launches": [made]}) if isinstance(one, Wrong)]


@pytest.mark.parametrize(
    ("part", "value", "text"),
    [("error", 1.0, "differ by 1.00e+00"), ("counted", [3, 1], "is 1.5000")],
)
def test_a_wrong_result_and_an_unbalanced_count_are_told(part: str, value: Any, text: str) -> None:
    made = record()
    made["policies"]["balanced"][part] = value
    assert text in wrong(made)[0]
    made["policies"]["balanced"]["error"] = float("nan")
    assert "differ by nan" in wrong(made)[0]
