"""Test training over ranks.

Runs over ranks are compared with runs of one rank. The comparison finds all planted faults.
"""

import math
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

import sp_core as sp
from benchmarks import launching
from benchmarks.training import runs as faults
from benchmarks.training.contest import allowed, complaints, divergence, train, yardstick
from benchmarks.training.runs import DTYPES, Place, Setting, apart, places, run_alone, run_place
from sp_core.llama import create
from sp_core.testing import run_threads, spmd

pytestmark = pytest.mark.mpi_skip
SMALL = Setting(
    steps=4,
    every=4,
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
    """Train on one rank. Return the folder of the results, and the curves by dtype."""
    folder = tmp_path_factory.mktemp("alone")

    def run(dtype: str) -> dict[str, Any]:
        return run_threads(1, lambda comm: run_alone(comm, dtype, SMALL, folder))[0]

    curves = {dtype: run(dtype) for dtype in DTYPES}
    assert all(0 < curve["worst"] <= 1 for curve in curves.values())
    return folder, curves


def judged(place: Place, dtype: str, alone: tuple[Path, dict[str, Any]]) -> list[str]:
    """Train on a mesh of two ranks. Return what is wrong with its run."""
    folder, curves = alone
    record = run_threads(2, lambda comm: run_place(comm, place, dtype, SMALL, folder))[0]
    return complaints(record, curves[dtype])


def test_what_is_planted_is_found_and_nothing_else(
    alone: tuple[Path, dict[str, Any]],
) -> None:
    """Faults are planted on every mesh of two ranks, unless a fault has no effect on the mesh."""
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


def test_a_fault_that_can_no_longer_be_planted_is_an_error() -> None:
    name = "a mean of the ranks' means"
    with (
        faults.planted(name),
        pytest.raises(LookupError, match="plant the fault elsewhere"),
        faults.planted(name),
    ):
        pass


def test_a_curve_may_be_ten_times_as_far_away_as_a_perturbed_one() -> None:
    """If no perturbed run has diverged yet, ten units in the last place of the loss are allowed."""
    unit = 2.0**-21  # the last place of 5.0 in float32
    perturbed = [[5.0, 5.0, 5 - 8 * unit, 5.0], [5.0, 5 + 2 * unit, 5.0, 5.0]]
    curve = {"dtype": "float32", "losses": [5.0] * 4, "perturbed": perturbed}
    assert allowed(curve) == [10 * unit, 20 * unit, 80 * unit, 80 * unit]
    assert divergence([5.0 + 10 * unit] * 4, curve) == 1.0
    assert divergence([5.0, 5.0 - 40 * unit, 5.0, 5.0], curve) == 2.0
    assert divergence([5.0] * 3, curve) == divergence([float("nan")] * 4, curve) == float("inf")
    for last, worst, told in (
        (2.0, 1.0, ""),
        (2.01, 1.0, "a lower learning rate"),
        (2.0, 1.5, "1.5 times the bound around the float64 reference"),
    ):
        learned = {"losses": [5.0, 2.0], "perturbed": [[5.0, last]], "worst": worst}
        found = yardstick({**curve, **learned})
        assert (told in "".join(found), len(found)) == (True, bool(told))


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_every_scheme_is_on_every_number_of_ranks(ranks: int) -> None:
    names = [place.name for place in places(ranks)]
    wanted = {"dp{}", "ring{}", "ring{}_allgather_kv", "ulysses{}", "tp{}", "tp{}_sp"}
    assert {name.format(ranks) for name in wanted} <= set(names)
    assert len(set(names)) == len(names)


def test_a_session_trains_alone_first_and_stops_if_that_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A session with a planted fault does not overwrite the results of one without."""
    losses = [5.0, 4.0, 3.0]
    curve = {"losses": losses, "perturbed": [losses], "worst": 0.5}
    good = {"status": "ok", "curves": {dtype: {"dtype": dtype, **curve} for dtype in DTYPES}}
    worst = dict.fromkeys(("loss", "gradients", "norm", "clipped norm"), (0.5, "loss"))
    one = {"place": "dp2", "ranks": 2, "losses": losses, "worst": worst, "apart": 0.0}
    right, wrong = (
        {"status": "ok", "runs": [{**one, "dtype": dtype, **more} for dtype in DTYPES]}
        for more in ({}, {"losses": [5.0, 4.0, 3.5]})
    )
    run = Mock(side_effect=[{"status": "failed", "reason": "no"}, good, right, *[good, wrong] * 2])
    monkeypatch.setattr(launching, "run", run)
    options = ["--only", "dp2", "--ranks", "2", "--folder", str(tmp_path)]
    out = ["--out", str(tmp_path / "train.json")]
    planted = ["--plant", "a mean of the ranks' means"]
    kept = [*planted, "--out", str(tmp_path / "kept.json")]
    assert [train([*options, *more]) for more in (out, out, planted, kept)] == [1, 0, 1, 1]
    places = [call.args[2]["place"] for call in run.call_args_list]
    assert [place and place.name for place in places] == [None, *[None, "dp2"] * 3]
    shown = capsys.readouterr().out
    assert "2 of 2 runs over several ranks have learned what one rank has; 150 steps" in shown
    assert "P = 2, dp2, float32: losses: " in shown
    # the first run's record was renamed
    files = sorted((path.name.partition(".")[0], path.suffix) for path in tmp_path.iterdir())
    made = product(("kept", "planted", "train"), (".json", ".png"))
    assert files == sorted([*made, ("train", ".json")])
    # one rank alone has a plot, too
    alone = [*options, "--only", "", "--out", str(tmp_path / "alone.json")]
    run.side_effect = [good, KeyboardInterrupt, good]
    assert [train([*alone, *more]) for more in ([], ["--only", "one rank"])] == [130, 0]


@spmd(1)
def test_weights_that_are_no_numbers_are_apart(comm: Any) -> None:
    with sp.Mesh(comm, tp=1) as mesh:
        model = create(SMALL.config, mesh)
        next(model.parameters()).data.fill_(math.nan)
        assert math.isnan(apart(model))
