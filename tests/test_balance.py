"""The command that measures balance: its counter of operations, what it derives, and what makes it fail."""

from __future__ import annotations

import io
import json
from typing import Any

import msgspec
import pytest
import torch
from rich.console import Console
from torch.utils.flop_counter import FlopCounterMode

import sp_core as sp
from benchmarks import launching
from benchmarks.contests.balance import __main__ as command
from benchmarks.contests.balance.policies import (
    ATTENTION,
    Setting,
    attention_operations,
    plans,
    predicted,
)
from sp_core.llama.unequal import compute, work_of
from sp_core.scheduling.plan import imbalance
from sp_core.testing import run_threads

SMALL = Setting(
    ranks=2, rounds=2, hidden=16, heads=2, kv_heads=1, head_dim=8, ffn=20, layers=2, most=40
)


def test_what_is_counted_while_computing_is_what_the_cost_model_says() -> None:
    """For every policy, to the last operation, on one rank; a plan that leaves a sequence out is seen."""
    texts = SMALL.sequences()[:6]
    setting = msgspec.structs.replace(SMALL, ranks=1)

    def body(comm: Any) -> None:
        with sp.Mesh(comm, ring=1, check="off") as mesh:
            model = setting.model(mesh)
            for plan in plans(list(map(len, texts)), setting).values():
                with FlopCounterMode(
                    display=False, custom_mapping={ATTENTION: attention_operations}
                ) as counter:
                    compute(model, texts, plan)
                assert [counter.get_total_flops()] == predicted(plan, work_of(setting.config))[
                    "loads"
                ]

    run_threads(1, body)


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_workload_is_balanced_by_plan_and_naive_policies_are_not(ranks: int) -> None:
    setting = Setting(ranks=ranks)
    lengths = list(map(len, setting.sequences()))
    shares = {
        name: imbalance(plan.loads(work_of(setting.config)))
        for name, plan in plans(lengths, setting).items()
    }
    assert max(shares["balanced"], shares["dynamic"]) < command.BOUND
    assert min(shares["contiguous"], shares["round_robin"]) > command.BOUND


def record() -> dict[str, Any]:
    """As of a launch in which the balanced policy took half the time of the others."""
    lengths = list(map(len, SMALL.sequences()))
    made = {
        name: predicted(plan, work_of(SMALL.config)) for name, plan in plans(lengths, SMALL).items()
    }
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
        for name, plan in made.items()
        if name != "padded"
    }
    bubbles = [{"micro_batches": 1, "measured": 0.6, "counted": 0.5, "formula": 0.5}]
    setting = {
        "setting": msgspec.structs.asdict(SMALL),
        "sequences": len(lengths),
        "tokens": sum(lengths),
    }
    return {**setting, "planned": made, "policies": policies, "bubbles": bubbles}


def test_throughput_is_a_ratio_of_the_same_round_and_tables_show_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    made = record()
    found = command.throughput(made, "round_robin")
    assert found is not None
    assert (found.median, found.low, found.high) == (2.0, 2.0, 2.0)
    assert command.throughput(made, "padded") is None
    assert list(command.show(Console(width=170), {"launches": [made]})) == []
    shown = capsys.readouterr().out
    assert "2.000 [2.000, 2.000]" in shown
    assert "bubble: 20.0%" in shown


def wrong(made: dict[str, Any]) -> list[str]:
    return list(command.show(Console(file=io.StringIO()), {"launches": [made]}))


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


def test_options_that_cannot_be_run_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--ranks", "0"], ["--ranks", "two"], ["--rounds", "-1"]):
        assert command.balance(arguments) == 2
        assert "balance:" in capsys.readouterr().err


def test_the_file_is_whole_whenever_somebody_looks(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later launch that fails leaves what an earlier one has written, and the exit code says so."""

    def run(ranks: int, *_: object) -> dict[str, Any]:
        failure = {"status": "failed", "reason": "it died", "output": "the last words"}
        return (
            failure
            if ranks == 4
            else {"status": "ok", "policies": record()["policies"], "bubbles": []}
        )

    monkeypatch.setattr(launching, "run", run)
    monkeypatch.setattr(
        command, "settings", lambda options: [SMALL, msgspec.structs.replace(SMALL, ranks=4)]
    )
    assert command.balance(["--out", str(tmp_path / "b.json")]) == 1
    assert [one["status"] for one in json.loads((tmp_path / "b.json").read_text())["launches"]] == [
        "ok",
        "failed",
    ]
    assert torch.tensor(record()["policies"]["balanced"]["spans_s"]).shape == (2, 2, 2)
