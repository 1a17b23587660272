"""The scaling experiment: its arithmetic is right, its failures are told, its files are there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from kit.records import NOTHING, case, dicts, record

from benchmarks import launching, records, scaling
from sp_core.machine import cores

pytestmark = pytest.mark.mpi_skip  # these start mpiexec, which must not be done inside mpiexec

ROOT = Path(__file__).resolve().parent.parent
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
    """What ci/ sets for either MPI."""
    lines = [
        line
        for name in ("openmpi", "mpich")
        for line in (ROOT / "ci" / f"env.{name}").read_text().splitlines()
    ]
    settings = dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))
    return {
        **settings,
        **os.environ,
        "PYTHONPATH": os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", ""))),
    }


def program(name: str, *options: str) -> str:
    """The output of a program that must come out well."""
    answer = subprocess.run(
        [sys.executable, "-m", "benchmarks", name, *options],
        cwd=ROOT,
        env=mpi_environment(),
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr
    return answer.stdout


def found(ranks: int, seconds: float, **changes: Any) -> dict[str, Any]:
    """The end of a launch that came out well."""
    shape = {"batch": 2, "seq": 100}
    made = dicts(record(case("layers", "allgather_kv", "block", ranks, shape=shape), seconds))
    parts = {name: made[name] for name in NOTHING} | {"work": {"flops": None, "tokens": 200}}
    gather = {"ms": 2.0, "gb_per_s": 1.5} if ranks > 1 else None
    return {"status": "ok", "parts": parts, "check": CHECK, "all_gather": gather, **changes}


CHECK = {
    **dict.fromkeys(("single_error", "ranks_error", "bound", "single_bound", "scale"), 0.0),
    "max_abs_error": 1e-6,
    "tokens": 1,
    "passed": True,
}
FAILURE = {"status": "oom", "reason": "out of memory, while warming up", "output": "the last words"}


def answering(monkeypatch: pytest.MonkeyPatch, answers: dict[int, Any]) -> None:
    """Launches that end as they are told, by number of ranks."""

    def run(ranks: int, *_: object, **__: object) -> Any:
        if answers[ranks] is KeyboardInterrupt:
            raise KeyboardInterrupt
        return answers[ranks]

    monkeypatch.setattr(launching, "run", run)


def settings(*options: str) -> list[Any]:
    return scaling.settings(launching.parse("", "", scaling.OPTIONS, options))


def test_rows_derive_speedup_and_efficiency() -> None:
    seconds = {1: 0.8, 2: 0.5, 4: 0.25}
    launches = [(one, one.case.ranks) for one in settings(*TINY, "--ranks", "1,2,4")]
    outcomes = [scaling.outcome_of(one, found(ranks, seconds[ranks])) for one, ranks in launches]
    one, two, four = scaling.table(outcomes, "cpu").rows
    assert two == (
        *["2", "500", "1.60", "80%", "400", "10%", "2.000", "1.50"],
        "3.00 MiB",
        "1.0e-06",
        "",
    )
    assert one[6:8] == ("-", "-")
    assert (four[0], four[-1]) == ("4", "oversubscribed")


def test_presets_are_completed_by_what_follows() -> None:
    paper, *_, other = settings("--preset", "paper", "--ranks", "1,2")
    names = [scaling.file_name(one, "float32") for one in (paper, other)]
    first = "strong_scaling_sp_cpu_p"
    assert names == [f"{first}1.json", f"{first}2_bfloat16.json"]
    sizes = {
        "hidden": 5120,
        "heads": 40,
        "kv_heads": 40,
        "head_dim": 128,
        "ffn": 20480,
        "seq": 4096,
        "batch": 4,
    }
    assert paper.case.shape == sizes
    assert (paper.case.mask, paper.iterations, paper.case.dtype) == ("full", 10, "float32")
    assert settings("--head-dim", "32")[0].case.shape["hidden"] == 256
    assert settings("--hidden", "256")[0].case.shape["ffn"] == 1024


WRONG = {"status": "wrong", "check": {**CHECK, "max_abs_error": None, "passed": False}}
STOP = KeyboardInterrupt


@pytest.mark.parametrize(
    ("two", "code", "told", "shown", "kept"),
    [
        (FAILURE, 1, "OOM: out of memory, while warming up\nthe last words", "124", "124"),
        (WRONG, 1, "WRONG. max |ranks - single device| = not finite", "14", "124"),
        (STOP, 130, "interrupted; what is complete follows", "1", "1"),
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
    """A failure is a row, a wrong output is none. An older result does not pass for a new one."""
    answering(monkeypatch, {1: found(1, 1.0), 2: two, 4: found(4, 0.5)})
    (tmp_path / "strong_scaling_sp_cpu_p2.json").write_text("an older result")
    assert scaling.main(["--out", str(tmp_path)]) == code
    said = capsys.readouterr()
    assert told in said.out + said.err
    ends = {"1": "1.0e-06", "2": "oom", "4": "oversubscribed"}
    rows = [line.split() for line in said.out.splitlines() if line[:3] in ("  1", "  2", "  4")]
    assert [(row[0], row[-1]) for row in rows] == [(ranks, ends[ranks]) for ranks in shown]
    assert (tmp_path / "strong_scaling_sp_cpu.png").read_bytes().startswith(b"\x89PNG")
    statuses = {
        path.stem[-1]: json.loads(path.read_text())["record"]["status"]
        for path in tmp_path.glob("*.json")
    }
    second = two["status"] if isinstance(two, dict) else ""
    assert statuses == {ranks: second if ranks == "2" else "ok" for ranks in kept}


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
    launch = launching.Launch(
        f"{sys.executable} {tmp_path / 'launcher.py'} {{ranks}}",
        timeout=0.2 if status == "timeout" else 30.0,
    )
    told = launching.run(2, "nowhere:measure", {}, launch)
    assert (told["status"], told["reason"]) == (status, reason)


@pytest.mark.starts_mpi
def test_a_step_with_its_backward_under_another_scheme(tmp_path: Path) -> None:
    what = ["--scheme", "ring", "--backward", "--mask", "causal", "--sharding", "striped"]
    (document,), shown = experiment(tmp_path, "2", *what)
    assert "ring, forward and backward" in shown
    found = records.parse(json.dumps(document["record"]).encode())
    assert (found.case.scheme, found.case.direction, found.case.mask) == ("ring", "both", "causal")
    assert (document["check"]["passed"], document["all_gather"]) == (True, None)
    assert found.work
    assert found.work.bytes_formula


def experiment(folder: Path, ranks: str, *options: str) -> tuple[list[dict[str, Any]], str]:
    """Run the real thing; return the documents and the output."""
    more = ("--ranks", ranks, "--out", str(folder))
    shown = program("scaling", *TINY, *options, *more)
    assert (folder / "strong_scaling_sp_cpu.png").read_bytes().startswith(b"\x89PNG")
    names = [f"strong_scaling_sp_cpu_p{p}.json" for p in ranks.split(",")]
    return [json.loads((folder / name).read_text()) for name in names], shown


@pytest.mark.starts_mpi
def test_the_experiment_from_end_to_end(tmp_path: Path) -> None:
    """Two launches of the real thing: everything that a run leaves behind is there and in order."""
    (one, three), shown = experiment(tmp_path, "1,3", "--causal", "--layout", "zigzag")
    assert shown.count("correct. max |ranks - single device|") == 2
    assert set(one) == set(three) == {"record", "check", "all_gather"}
    first, second = (made["record"] for made in (one, three))
    assert len(second["timing"]["samples_s"]) == second["timing"]["iterations"] == 3
    assert (one["all_gather"], first["work"]["bytes_formula"]) == (None, 0)
    sent = second["work"]["bytes_formula"]
    assert sent == second["comm"]["all_gather"]["bytes_sent"] == 2 * (2 * 2 * 33 * 2 * 16 * 4)
    assert second["transport"]["oversubscribed"] == ("oversubscribed" in shown) == (cores() < 3)
    assert second["memory"]["peak_bytes"] > 0
    assert (three["check"]["passed"], second["transport"]["mode"]) == (True, "host")
