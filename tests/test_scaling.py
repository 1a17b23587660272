"""The scaling experiment: its arithmetic is right, its failures are told, and its files are there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import launching, report, scaling
from benchmarks.case import Case
from sp_core.machine import cores

pytestmark = pytest.mark.mpi_skip  # these start mpiexec, which must not be done inside mpiexec

ROOT = Path(__file__).resolve().parent.parent
TINY = Case(ranks=2, hidden=64, heads=4, kv_heads=2, ffn=256, seq=48, batch=2)
TINY_OPTIONS = (
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
)


def mpi_environment() -> dict[str, str]:
    """What ci/ sets for either MPI."""
    lines = [line for name in ("openmpi", "mpich") for line in (ROOT / "ci" / f"env.{name}").read_text().splitlines()]
    settings = dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))
    return {**settings, **os.environ, "PYTHONPATH": str(ROOT)}


def record(ranks: int, seconds: float, **changes: Any) -> dict[str, Any]:
    """A record such as a worker writes."""
    case = Case(ranks=ranks, hidden=64, heads=4, kv_heads=4, ffn=256, seq=100, batch=2)
    made: dict[str, Any] = {
        "status": "ok",
        "case": case.as_dict(),
        "device": {"kind": "cpu", "name": "a processor", "count": 2},
        "transport": {"mpi": {"vendor": "An MPI", "version": "1"}, "threads": 1, "oversubscribed": ranks > 2, "shared_gpu": False},
        "timing": {"median_s": seconds, "skew_limited": False},
        "comm": {"share": 0.25, "all_gather": {"ms": 2.0, "gb_per_s": 1.5} if ranks > 1 else None},
        "memory": {"peak_bytes": 3 * 2**20},
        "work": {"tokens": case.tokens},
        "check": {
            **dict.fromkeys(("single_error", "ranks_error", "bound", "single_bound", "scale"), 0.0),
            "max_abs_error": 1e-6,
            "tokens": 1,
            "passed": True,
        },
    }
    return {**made, **changes}


def failure(ranks: int) -> dict[str, Any]:
    return {"status": "oom", "reason": "out of memory, while warming up", "case": record(ranks, 1.0)["case"]}


def test_rows_derive_speedup_and_efficiency() -> None:
    one, two, four = report.rows([record(4, 0.25), record(1, 0.8), record(2, 0.5)])
    assert [row.ranks for row in (one, two, four)] == [1, 2, 4]
    assert (two.speedup, two.efficiency, two.tokens_per_s) == (1.6, 0.8, 400.0)
    assert (one.flags, four.flags) == ((), ("oversubscribed",))
    assert two.cells() == ("2", "500.0", "1.60", "80%", "400", "25.0%", "2.000", "1.50", "3.0 MiB", "1.0e-06", "")
    assert one.cells()[6:8] == (report.DASH, report.DASH)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ("--ranks 0", "every number must be 1 or more"),
        ("--ranks 2,2", "appear once"),
        ("--ranks two", "not a list of numbers"),
        ("--heads 7", "7 heads do not divide hidden 512"),
        ("--kv-heads 3", "3 key/value heads do not divide 8 heads"),
        ("--head-dim 32 --hidden 512", "8 heads of 32 make 256, hidden is 512"),
        ("--seq 0", "seq is 0"),
        ("--dtype float8", "dtype is 'float8'"),
        ("--transport pigeon", "transport 'pigeon' on cpu"),
        ("--timeout 0", "pass more than 0"),
        ("--launcher srun", "write {ranks} in it"),
        ("--launcher no-such-program{ranks}", "no no-such-program"),
        ("--device cuda", "sees no CUDA device"),
    ],
)
def test_bad_options_are_refused_before_anything_starts(
    options: str, complaint: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(scaling, "run_case", lambda *_: pytest.fail("a case was run"))
    assert scaling.main([*options.split(), "--out", str(tmp_path / "out")]) == 2
    assert complaint in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_presets_are_completed_by_what_follows() -> None:
    def first(*options: str) -> Case:
        return scaling.cases(scaling.parser().parse_args(options))[0][0]

    paper = first("--preset", "paper")
    assert (paper.hidden, paper.heads, paper.head_dim, paper.ffn, paper.seq, paper.batch) == (5120, 40, 128, 20480, 4096, 4)
    assert (paper.causal, paper.iterations, paper.dtype) == (False, 10, "float32")
    assert first("--head-dim", "32").hidden == 256
    assert first("--hidden", "256").ffn == 1024


def test_a_case_that_fails_is_a_row_and_does_not_lose_the_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    answers = {1: record(1, 1.0), 2: failure(2), 4: record(4, 0.5)}
    monkeypatch.setattr(scaling, "run_case", lambda case, *_: (answers[case.ranks], "the last words"))
    assert scaling.main(["--out", str(tmp_path)]) == 1
    shown = capsys.readouterr().out
    assert "P = 2, float32: OOM: out of memory, while warming up\nthe last words" in shown
    assert [line.split()[:1] + line.split()[-1:] for line in shown.splitlines() if line[:3] in ("  1", "  2", "  4")] == [
        ["1", "1.0e-06"],
        ["2", "oom"],
        ["4", "oversubscribed"],
    ]
    assert (tmp_path / "strong_scaling_sp_cpu.png").read_bytes().startswith(b"\x89PNG")
    assert [json.loads((tmp_path / f"strong_scaling_sp_cpu_p{p}.json").read_text())["status"] for p in (1, 2, 4)] == [
        "ok",
        "oom",
        "ok",
    ]


def test_a_wrong_result_is_a_failure_and_not_a_row(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    good = record(1, 1.0)
    wrong = {"status": "wrong", "case": record(2, 1.0)["case"], "check": {**good["check"], "max_abs_error": None, "passed": False}}
    monkeypatch.setattr(scaling, "run_case", lambda case, *_: (good if case.ranks == 1 else wrong, ""))
    assert scaling.main(["--out", str(tmp_path), "--ranks", "1,2"]) == 1
    shown = capsys.readouterr().out
    assert "P = 2, float32: WRONG. max |ranks - single device| = not finite" in shown
    assert "\n  2 " not in shown


def test_an_interruption_keeps_what_is_complete(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def run(case: Case, *_: object) -> tuple[dict[str, Any], str]:
        if case.ranks == 2:
            raise KeyboardInterrupt
        return record(case.ranks, 1.0), ""

    monkeypatch.setattr(scaling, "run_case", run)
    (tmp_path / "strong_scaling_sp_cpu_p2.json").write_text("an older result")
    assert scaling.main(["--out", str(tmp_path)]) == 130
    assert "\n  1 " in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["strong_scaling_sp_cpu.png", "strong_scaling_sp_cpu_p1.json"]


@pytest.mark.parametrize(
    ("program", "status", "reason"),
    [
        ("raise SystemExit('SomeError: it broke')", "failed", "exit code 1 while starting: SomeError: it broke"),
        ('raise SystemExit("DefaultCPUAllocator: can\'t allocate memory")', "oom", "out of memory, while starting"),
        ("import time; time.sleep(60)", "timeout", "not finished after 0.2 s, while starting"),
        ("", "failed", "exit code 0 while starting: nothing was printed"),
    ],
)
def test_a_launch_that_fails_says_how(
    program: str, status: str, reason: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(launching, "GRACE_SECONDS", 0.5)
    (tmp_path / "launcher.py").write_text(program)
    launch = launching.Launch(
        f"{sys.executable} {tmp_path / 'launcher.py'} {{ranks}}", timeout=0.2 if status == "timeout" else 30.0
    )
    told, _ = launching.run_case(TINY, launch)
    assert (told["status"], told["reason"]) == (status, reason)


@pytest.mark.starts_mpi
def test_the_experiment_from_end_to_end(tmp_path: Path) -> None:
    """Two launches of the real thing: everything that a run leaves behind is there and in order."""
    command = [sys.executable, "-m", "benchmarks.scaling", *TINY_OPTIONS, "--ranks", "1,3", "--causal", "--layout", "zigzag"]
    answer = subprocess.run(
        [*command, "--out", str(tmp_path)],
        cwd=ROOT,
        env=mpi_environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert answer.stdout.count("correct. max |ranks - single device|") == 2
    assert (tmp_path / "strong_scaling_sp_cpu.png").read_bytes().startswith(b"\x89PNG")
    one, three = (json.loads((tmp_path / f"strong_scaling_sp_cpu_p{p}.json").read_text()) for p in (1, 3))
    assert set(one) == {
        "schema_version",
        "status",
        "commit",
        "case",
        "device",
        "transport",
        "env",
        "timing",
        "comm",
        "memory",
        "work",
        "check",
    }
    assert len(three["timing"]["samples_s"]) == three["case"]["iterations"] == 3
    assert (one["comm"]["all_gather"], one["comm"]["bytes_sent_per_step"]) == (None, 0)
    assert three["comm"]["bytes_sent_per_step"] == three["comm"]["bytes_formula"] == 2 * (2 * 2 * 33 * 2 * 16 * 4)
    assert three["transport"]["oversubscribed"] == (cores() < 3)
    assert ("oversubscribed" in answer.stdout) == (cores() < 3)
    assert len(three["memory"]["peak_bytes_per_rank"]) == 3
    assert three["check"]["passed"]
    assert three["transport"]["mode"] == "host"
