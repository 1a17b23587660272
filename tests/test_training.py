"""Training over ranks.

A step is that of one device, and the comparison of whole runs finds what is planted.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks import launching
from benchmarks.training import runs as faults
from benchmarks.training.contest import allowed, complaints, divergence, train, yardstick
from benchmarks.training.runs import DTYPES, Place, Setting, places, run_alone, run_place
from sp_core.testing import run_threads

SMALL = Setting(
    steps=6,
    every=2,
    shortest=3,
    longest=9,
    perturbed=2,
    warmup=1,
    model={
        "vocab_size": 256,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 2,
    },
)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """What one rank has done: the folder, and the curves by dtype."""
    folder = tmp_path_factory.mktemp("alone")

    def run(dtype: str) -> dict[str, Any]:
        return run_threads(1, lambda comm: run_alone(comm, dtype, SMALL, folder))[0]

    curves = {dtype: run(dtype) for dtype in DTYPES}
    assert all(0 < curve["worst"] <= 1 for curve in curves.values())
    return folder, curves


def judged(place: Place, dtype: str, alone: tuple[Path, dict[str, Any]]) -> list[str]:
    """What is wrong with a mesh."""
    folder, curves = alone
    record = run_threads(2, lambda comm: run_place(comm, place, dtype, SMALL, folder))[0]
    return complaints(record, curves[dtype])


@pytest.mark.mpi_skip
def test_what_is_planted_is_found_and_nothing_else(
    alone: tuple[Path, dict[str, Any]],
) -> None:
    """On every mesh of two ranks on which the fault is one."""
    for place in places(2):
        assert [judged(place, dtype, alone) for dtype in DTYPES] == [[], []], place
    for fault in faults.FAULTS:
        harmless = {"tp"} if "labels" not in fault else {"tp", "dp"}
        for place in places(2):
            if set(place.axes) & harmless and not (place.tp_sp and "norms" in fault):
                continue
            with faults.planted(fault):
                found = judged(place, "float32", alone)
            assert any(text.startswith("gradients") for text in found), (fault, place)
            assert any(text.startswith("losses") for text in found), (fault, place)


@pytest.mark.mpi_skip
def test_a_fault_that_can_no_longer_be_planted_is_an_error() -> None:
    name = "a mean of the ranks' means"
    with (
        faults.planted(name),
        pytest.raises(LookupError, match="plant the fault elsewhere"),
        faults.planted(name),
    ):
        pass


@pytest.mark.mpi_skip
def test_a_curve_may_be_ten_times_as_far_away_as_a_perturbed_one() -> None:
    """Where nothing has diverged yet, by ten units in the last place of the loss."""
    unit = 2.0**-21  # of 5.0 in float32
    curve = {
        "dtype": "float32",
        "losses": [5.0] * 4,
        "perturbed": [[5.0, 5.0, 5 - 8 * unit, 5.0], [5.0, 5 + 2 * unit, 5.0, 5.0]],
    }
    assert allowed(curve) == [10 * unit, 20 * unit, 80 * unit, 80 * unit]
    assert divergence([5.0 + 10 * unit] * 4, curve) == 1.0
    assert divergence([5.0, 5.0 - 40 * unit, 5.0, 5.0], curve) == 2.0
    assert (
        yardstick(
            {
                **curve,
                "losses": [5.0, 4.0, 3.0, 2.0],
                "perturbed": [[5.0, 4.0, 3.0, 2.0]],
                "worst": 1.0,
            }
        )
        == []
    )
    (text,) = yardstick(
        {
            **curve,
            "losses": [5.0, 4.0, 3.0, 2.0],
            "perturbed": [[5.0, 4.0, 3.0, 2.01]],
            "worst": 1.0,
        }
    )
    assert "a lower learning rate" in text
    (text,) = yardstick({**curve, "losses": [5.0, 2.0], "perturbed": [[5.0, 2.0]], "worst": 1.5})
    assert text.startswith("1.5 times the bound")
    assert divergence([5.0] * 3, curve) == divergence([float("nan")] * 4, curve) == float("inf")


@pytest.mark.mpi_skip
def test_every_scheme_is_on_every_number_of_ranks() -> None:
    for ranks in (2, 3, 4):
        names = [place.name for place in places(ranks)]
        assert len(set(names)) == len(names)
        assert {
            f"dp{ranks}",
            f"ring{ranks}",
            f"ring{ranks}_allgather_kv",
            f"ulysses{ranks}",
            f"tp{ranks}",
        } <= set(names)


@pytest.mark.mpi_skip
def test_a_session_trains_alone_first_and_stops_if_that_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A planted fault leaves the committed result alone."""
    losses = [5.0, 4.0, 3.0]
    curve = {"losses": losses, "perturbed": [losses], "worst": 0.5}
    curves = {dtype: {"dtype": dtype, **curve} for dtype in DTYPES}
    worst = dict.fromkeys(("loss", "gradients", "norm", "clipped norm"), (0.5, "loss"))
    runs = [
        {"place": "dp2", "ranks": 2, "dtype": dtype, **curve, "worst": worst, "apart": 0.0}
        for dtype in DTYPES
    ]
    wrong = [runs[0], {**runs[1], "losses": [5.0, 4.0, 3.5]}]
    launched: list[Any] = []

    def run(ranks: int, measure: str, job: dict[str, Any], launch: object) -> object:
        launched.append(job["place"] and job["place"].name)
        return answers.pop(0)

    monkeypatch.setattr(launching, "run", run)
    options = ["--only", "dp2", "--ranks", "2", "--folder", str(tmp_path)]
    out = ["--out", str(tmp_path / "train.json")]
    good = {"status": "ok", "curves": curves}
    trained = [{"status": "ok", "runs": found} for found in (runs, wrong)]
    answers = [{"status": "failed", "reason": "no"}, good, trained[0], good, trained[1]]
    assert train([*options, *out]) == 1
    assert train([*options, *out]) == 0
    assert train([*options, "--plant", "a mean of the ranks' means"]) == 1
    assert launched == [None, None, "dp2", None, "dp2"]
    shown = capsys.readouterr().out
    assert "2 of 2 runs over several ranks have learned what one rank has; 150 steps" in shown
    assert "P = 2, dp2, float32: losses: " in shown
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".json"] * 2 + [".png"] * 2
