"""Test the scaling experiment: its check of results, its reports of failures, its files."""

import contextlib
import json
import os
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from kit.records import NOTHING, case, dicts, record
from studies.commands import ROOT, output_of
from test_kit_deaths import assert_ended
from torch import Tensor

import sp_core as sp
from benchmarks import launching, sample, scaling
from benchmarks.cases import block
from benchmarks.cases.setting import BlockSetting
from benchmarks.records import make_case
from benchmarks.sample import Counts, makespans, race, take, timing
from sp_core.machine import cores
from sp_core.testing import run_threads

pytestmark = pytest.mark.mpi_skip  # these start mpiexec, which must not be done inside mpiexec

TINY = [
    "--hidden",
    "64",
    "--heads",
    "4",
    "--kv-heads",
    "2",
    "--seq",
    "33",
    "--batch",
    "2",
    "--iterations",
    "3",
    "--warmup",
    "0",
]


def mpi_environment() -> dict[str, str]:
    """Return this environment with the variables that ci/ sets for Open MPI and MPICH."""
    texts = [(ROOT / "ci" / f"env.{name}").read_text() for name in ("openmpi", "mpich")]
    lines = [line for line in "".join(texts).splitlines() if line and not line.startswith("#")]
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return {**dict(line.split("=", 1) for line in lines), **os.environ, "PYTHONPATH": path}


def program(name: str, *options: str) -> str:
    """Run a benchmark program that must succeed. Return its output."""
    command = [sys.executable, "-m", "benchmarks", name, *options]
    return output_of(command, ROOT, mpi_environment(), 180)


def found(ranks: int, seconds: float) -> dict[str, Any]:
    """Return the result of a launch that succeeded."""
    shape = {"batch": 2, "seq": 100}
    made = dicts(record(case("layers", "allgather_kv", "block", ranks, shape=shape), seconds))
    parts = {name: made[name] for name in NOTHING} | {"work": {"flops": None, "tokens": 200}}
    gather = {"ms": 2.0, "gb_per_s": 1.5} if ranks > 1 else None
    return {"status": "ok", "parts": parts, "check": CHECK, "all_gather": gather}


CHECK = {
    **dict.fromkeys(("single_error", "ranks_error", "bound", "single_bound", "scale"), 0.0),
    "max_abs_error": 1e-6,
    "tokens": 1,
    "passed": True,
}
FAILURE = {"status": "oom", "reason": "out of memory, while warming up", "output": "the last words"}
ROWS = {
    "1": "1 1,000 1.00 100% 200 0.0% 3.00 MiB 1.0e-06",
    "2": "2 oom",
    "4": "4 500 2.00 50% 400 30% 2.000 1.50 3.00 MiB 1.0e-06 oversubscribed",
}
"""The cells of each P in the table that are not empty."""
WRONG = {"status": "wrong", "check": {**CHECK, "max_abs_error": None, "passed": False}}


def settings(*options: str) -> list[Any]:
    return scaling.settings(launching.parse("", "", scaling.OPTIONS, options))


def test_presets_are_completed_by_what_follows() -> None:
    paper, *_, other = settings("--preset", "paper", "--ranks", "1,2")
    names = [scaling.file_name(one, "float32") for one in (paper, other)]
    assert names == [f"strong_scaling_sp_cpu_p{end}.json" for end in ("1", "2_bfloat16")]
    assert [paper.case.shape[name] for name in scaling.SHAPE] == [4, 4096, 5120, 40, 40, 128, 20480]
    assert (paper.case.mask, paper.iterations, paper.case.dtype) == ("full", 10, "float32")
    assert settings("--head-dim", "32")[0].case.shape["hidden"] == 256
    assert settings("--hidden", "256")[0].case.shape["ffn"] == 1024


@pytest.mark.parametrize(
    ("two", "code", "told", "shown", "kept"),
    [
        (FAILURE, 1, "OOM: out of memory, while warming up\nthe last words", "124", "124"),
        (WRONG, 1, "WRONG. max |ranks - single device| = not finite", "14", "124"),
        (KeyboardInterrupt, 130, "interrupted; what is complete follows", "1", "1"),
    ],
)
def test_a_case_that_goes_wrong_does_not_lose_the_others(
    two: Any,
    code: int,
    told: str,
    shown: str,
    kept: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    """The table has a row for a failed launch, none for a wrong output. Old results are removed."""
    ends = Mock(side_effect=[found(1, 1.0), two, found(4, 0.5)])
    monkeypatch.setattr(launching, "run", ends)
    (tmp_path / "strong_scaling_sp_cpu_p2.json").write_text("an older result")
    assert scaling.main(["--out", str(tmp_path)]) == code
    said = capsys.readouterr()
    assert told in said.out + said.err
    rows = [line.split() for line in said.out.splitlines() if line[:3] in ("  1", "  2", "  4")]
    filled = [" ".join(cell for cell in row if cell != "-") for row in rows]
    assert filled == [ROWS[ranks] for ranks in shown]
    assert (tmp_path / "strong_scaling_sp_cpu.png").read_bytes().startswith(b"\x89PNG")
    documents = {path.stem[-1]: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
    statuses = {ranks: document["record"]["status"] for ranks, document in documents.items()}
    second = two["status"] if isinstance(two, dict) else ""
    assert statuses == {ranks: second if ranks == "2" else "ok" for ranks in kept}


def test_no_older_file_passes_for_one_of_a_run_that_ends_early(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Files of ranks and dtypes that the run does not have would look like a part of it."""
    for end in ("cpu_p1.json", "cpu_p4.json", "cpu_p8_bfloat16.json", "cpu.png", "gpu_p1.json"):
        (tmp_path / f"strong_scaling_sp_{end}").write_text("an older result")
    monkeypatch.setattr(launching, "run", Mock(side_effect=KeyboardInterrupt))
    assert scaling.main(["--out", str(tmp_path)]) == launching.INTERRUPTED
    assert [path.name for path in tmp_path.iterdir()] == ["strong_scaling_sp_gpu_p1.json"]


@pytest.mark.parametrize(
    ("program", "status", "reason"),
    [
        (
            "raise SystemExit('SomeError: it broke')",
            "failed",
            "exit code 1 while starting: SomeError: it broke",
        ),
        (
            'raise SystemExit("DefaultCPUAllocator: can\'t allocate memory")',
            "oom",
            "out of memory, while starting",
        ),
        ("import time; time.sleep(60)", "timeout", "not finished after 0.2 s, while starting"),
        ("", "failed", "exit code 0 while starting: nothing was printed"),
    ],
)
def test_a_launch_that_fails_says_how(
    program: str, status: str, reason: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(launching, "GRACE_SECONDS", 0.5)
    (tmp_path / "launcher.py").write_text(program)
    launcher = f"{sys.executable} {tmp_path / 'launcher.py'} {{ranks}}"
    launch = launching.Launch(launcher, timeout=0.2 if status == "timeout" else 30.0)
    told = launching.run(2, "nowhere:measure", {}, launch)
    assert (told["status"], told["reason"]) == (status, reason)


def test_a_process_ends_with_those_that_it_has_started(tmp_path: Path) -> None:
    command = ["sh", "-c", "sleep 60 & echo $!; wait"]
    with (
        (tmp_path / "output").open("w") as output,
        launching.process(command, output, tmp_path, os.environ),
    ):
        while not (told := (tmp_path / "output").read_text()):
            time.sleep(0.01)
    assert_ended([told.strip()])


@pytest.mark.starts_mpi
def test_the_experiment_from_end_to_end(tmp_path: Path) -> None:
    """Run it on one rank and on three. Check its output and all files that it writes."""
    how = ("--causal", "--layout", "zigzag", "--backward", "--ranks", "1,3")
    shown = program("scaling", *TINY, *how, "--out", str(tmp_path))
    assert (tmp_path / "strong_scaling_sp_cpu.png").read_bytes().startswith(b"\x89PNG")
    files = [tmp_path / f"strong_scaling_sp_cpu_p{p}.json" for p in (1, 3)]
    one, three = (json.loads(file.read_text()) for file in files)
    assert shown.count("correct. max |ranks - single device|") == 2
    assert "allgather_kv, forward and backward" in " ".join(shown.split())
    assert set(one) == set(three) == {"record", "check", "all_gather"}
    first, second = (made["record"] for made in (one, three))
    assert len(second["timing"]["samples_s"]) == second["timing"]["iterations"] == 3
    assert (one["all_gather"], first["work"]["bytes_formula"]) == (None, 0)
    assert three["all_gather"]["bytes_result"] == 2 * 33 * 2 * 2 * 16 * 4
    sent = {name: entry["bytes_sent"] for name, entry in second["comm"].items()}
    assert second["work"]["bytes_formula"] == sum(sent.values()) - sent["control"] > 0
    assert second["transport"]["oversubscribed"] == ("oversubscribed" in shown) == (cores() < 3)
    assert second["memory"]["peak_bytes"] > 0
    assert (three["check"]["passed"], second["transport"]["mode"]) == (True, "host")


SHAPE = {"batch": 2, "seq": 48, "hidden": 64, "heads": 4, "kv_heads": 2, "head_dim": 16, "ffn": 256}
ALONE, FULL, CAUSAL = (
    make_case("layers", "ring", {"sp": ranks}, SHAPE, "auto", layout="contiguous", mask=mask)
    for ranks, mask in ((1, "full"), (2, "full"), (2, "causal"))
)


@pytest.fixture(scope="module")
def weights() -> dict[str, Tensor]:
    """Draw the weights of the tiny block as the worker does."""

    def drawn(comm: Any) -> dict[str, Tensor]:
        with sp.Mesh(comm, sp=1) as mesh:
            (layer, *_), _ = block.block(BlockSetting(ALONE), mesh, contextlib.nullcontext)
            return {name: weight.detach() for name, weight in layer.state_dict().items()}

    return run_threads(1, drawn)[0]


def one_token(x: Tensor) -> Tensor:
    """Replace a token of the second sequence. A sample of float64 results has no token there."""
    return torch.cat((x[:1], torch.cat((x[1:, :7], x[1:, 8:9], x[1:, 8:]), 1)))


FAULTS: dict[str, Any] = {
    "none": lambda x: x,
    "one token": one_token,
    "shards swapped": lambda x: x.roll(24, 1),
    "zeros": lambda x: torch.cat((x[:, :-1], x[:, -1:] * 0), 1),
    "not finite": lambda x: x.index_fill(1, torch.tensor(0), float("nan")),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sampled", [False, True])
def test_a_wrong_output_is_found(
    weights: dict[str, Tensor], dtype: torch.dtype, sampled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if sampled:
        monkeypatch.setitem(block.EXACT_FLOPS, "cpu", 0.0)
    x = block.tokens(FULL, torch.arange(48)).to(dtype)
    cast = {name: weight.to(dtype) for name, weight in weights.items()}
    alone, truth = block.alone(x, cast, FULL), block.exact(x, cast, FULL)
    own_keys = torch.cat([block.alone(part, cast, FULL) for part in x.chunk(2, 1)], 1)
    found = {name: fault(alone) for name, fault in FAULTS.items()} | {"own keys only": own_keys}
    verdicts = {name: block.judge(wrong, alone, truth, FULL) for name, wrong in found.items()}
    assert [name for name, verdict in verdicts.items() if verdict.passed] == ["none"]
    right = verdicts["none"]
    assert (right.max_abs_error, right.tokens) == (0.0, 48 if sampled else 2 * 48)


def test_an_error_just_above_the_bound_is_found(weights: dict[str, Tensor]) -> None:
    """An error is added where the single device errs most: close to it, but too far from float64.

    If the single device itself is too far off, as with TF32's 10 bits of mantissa, the check fails.
    """
    x = block.tokens(FULL, torch.arange(48))
    alone, truth = block.alone(x, weights, FULL), block.exact(x, weights, FULL)
    worst = torch.zeros(alone.numel()).index_fill(0, (alone - truth[2]).flatten().argmax(), 1.0)
    bound = block.judge(alone, alone, truth, FULL).bound
    for part, passed in ((0.4, True), (0.8, False)):
        ranks = alone + part * bound * worst.view_as(alone)
        assert block.judge(ranks, alone, truth, FULL).passed == passed
    coarse = (alone * 1024).round() / 1024
    verdict = block.judge(coarse, coarse, truth, FULL)
    assert not verdict.passed
    assert "The single device itself is too far off" in str(verdict)


@pytest.mark.parametrize("case", [FULL, CAUSAL], ids=lambda case: case.mask)
def test_a_sample_of_tokens_has_the_values_of_the_whole(
    weights: dict[str, Tensor], case: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = block.tokens(case, torch.arange(48))
    _, _, whole = block.exact(x, weights, case)
    monkeypatch.setitem(block.EXACT_FLOPS, "cpu", 0.0)
    monkeypatch.setattr(block, "SAMPLED_TOKENS", 5)
    rows, positions, sample = block.exact(x, weights, case)
    assert (rows.tolist(), positions.tolist()) == ([0], [0, 12, 24, 35, 47])
    torch.testing.assert_close(sample, whole[rows][:, positions])


def test_a_wrong_gradient_is_found(weights: dict[str, Tensor]) -> None:
    x = block.tokens(CAUSAL, torch.arange(48))
    y, upstream = block.alone(x, weights, CAUSAL), torch.ones_like(x).cumsum(1) / 48
    grad = block.gradient(x, weights, CAUSAL, upstream)
    shards = zip(x.chunk(2, 1), upstream.chunk(2, 1), strict=True)
    own_keys = torch.cat([block.gradient(a, weights, CAUSAL, b) for a, b in shards], 1)
    ends = [(y, grad), (y, one_token(grad)), (y, own_keys), (y + 1, grad)]
    verdicts = [block.judged(out, [dx], x, upstream, weights, CAUSAL) for out, dx in ends]
    assert [verdict.passed for verdict in verdicts] == [True, False, False, False]


def test_the_time_of_a_step_spans_all_ranks() -> None:
    spans = [[(0.0, 3.0), (10.0, 12.0)], [(1.0, 2.0), (10.5, 15.5)]]
    assert makespans(spans) == [3.0, 5.5]
    told = timing(spans, 1)
    assert (told["median_s"], told["skew_limited"]) == (4.25, True)
    assert told["barrier_skew_s"] == {"median": 0.75, "p95": 1.0, "max": 1.0}


class Clock(threading.local):
    """The clock of a rank's node, which was started some days before rank 0's."""

    ahead = 0.0

    def __call__(self) -> float:
        return time.perf_counter() + self.ahead


def test_nodes_with_different_clocks_are_timed_by_rank_0s(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(sample, "time", SimpleNamespace(perf_counter=clock))

    def body(comm: Any) -> list[float]:
        clock.ahead = 86400.0 * comm.rank
        spans, _ = take(comm.Barrier, comm, Counts(0, 1, 3), sync=lambda: None)
        raced = race(comm, {"a": lambda: (clock(), clock())}, 3, seed=0)
        return [*makespans(spans), *makespans(raced["a"])]

    for found in run_threads(3, body):
        assert 0 < min(found) <= max(found) < 60


def test_ranks_of_a_launcher_may_be_on_other_nodes_with_gpus() -> None:
    launcher = ("--launcher", "srun --ntasks={ranks}")
    found = settings("--device", "cuda", "--ranks", "8", *launcher)
    assert [one.case.ranks for one in found] == [8]
