"""The comparison with peers: a wrong contestant is found and has no time, its arithmetic is right, and nothing is lost."""

from __future__ import annotations

import json
import math
import random
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_scaling import mpi_environment
from torch import Tensor

from benchmarks import launching
from benchmarks.contests.peers import __main__ as peers
from benchmarks.contests.peers import contestants as problem
from benchmarks.contests.peers import heat, memory
from benchmarks.contests.peers import setting as lines
from benchmarks.contests.peers.contestants import NAMES, Part
from benchmarks.contests.peers.setting import BALANCED, Setting
from benchmarks.launching import UsageError
from benchmarks.statistics import Requirement, exact_interval

ROOT = Path(__file__).resolve().parent.parent
TINY = Setting(seqs=(32,), heads=4, head_dim=8, rounds=1)
TINY_OPTIONS = ("--seq", "32", "--heads", "4", "--head-dim", "8")
OURS = "ring/zigzag/off"
CONTESTANTS = 22


def launched(times: dict[str, float], seq: int = 4096, **changes: Any) -> dict[str, Any]:
    """The record of a launch in which every contestant was right."""
    heat = {
        name: {"status": "ok", "errors": dict.fromkeys(NAMES, 1e-7), "median_s": time}
        for name, time in times.items()
    }
    return {"status": "ok", "load_before": 0.0, "seconds": 1.0, "seqs": {str(seq): heat}, **changes}


def solved(whole: tuple[Tensor, ...], mine: Part) -> list[Tensor]:
    """A rank's part of the right answer, in the layout of its tensors."""
    found = [x[:, mine.positions] for x in problem.alone(whole, causal=True)]
    return [x.transpose(1, 2) if mine.heads_first else x for x in found]


@pytest.mark.parametrize("heads_first", [False, True])
@pytest.mark.parametrize(
    "fault",
    ["none", "out off by one token", "dq of another token", "dk a mean", "dv zero", "not finite"],
)
def test_a_wrong_contestant_is_found(fault: str, heads_first: bool) -> None:
    whole = problem.draw(TINY, 32)
    mine = problem.part(whole, torch.tensor([*range(8), *range(24, 32)]), heads_first=heads_first)
    results = [x.clone() for x in solved(whole, mine)]
    tokens = 2 if heads_first else 1
    if fault == "out off by one token":
        results[0] = results[0].roll(1, tokens)
    if fault == "dq of another token":
        results[1].select(tokens, 3).copy_(results[1].select(tokens, 4).clone())
    if fault == "dk a mean":
        results[2] /= 2
    if fault == "dv zero":
        results[3].zero_()
    if fault == "not finite":
        results[2][0, 1, 2, 3] = math.nan
    found = problem.errors(results, mine, problem.alone(whole, causal=True))
    verdict = heat.verdict([("", [0.0] * len(NAMES)), ("", found)])
    assert verdict["status"] == ("ok" if fault == "none" else "wrong")
    json.dumps(verdict, allow_nan=False)


def test_a_mask_off_by_one_is_found() -> None:
    whole = problem.draw(TINY, 32)
    mine = problem.part(whole, torch.arange(32), heads_first=True)
    visible = torch.ones(32, 32, dtype=torch.bool).tril(-1)
    visible[0, 0] = True
    out = F.scaled_dot_product_attention(mine.q, mine.k, mine.v, attn_mask=visible)
    results = (out, *torch.autograd.grad(out, (mine.q, mine.k, mine.v), mine.grad))
    assert (
        min(problem.errors(results, mine, problem.alone(whole, causal=True))) > 100 * problem.LIMIT
    )


def test_one_rank_that_breaks_fails_the_contestant() -> None:
    fine = ("", [0.0] * len(NAMES))
    assert heat.verdict([fine, ("TypeError: no", [0.0] * len(NAMES))]) == {
        "status": "failed",
        "reason": "rank 1: TypeError: no",
    }
    assert heat.verdict([fine, fine])["status"] == "ok"


@pytest.mark.parametrize(
    ("count", "low", "high"), [(12, 3, 10), (6, 1, 6), (20, 6, 15), (3, 1, 3), (1, 1, 1)]
)
def test_the_interval_is_that_of_the_sign_test(count: int, low: int, high: int) -> None:
    """With fewer than 6 values none reaches 95 %, and the widest one is given."""
    values = [float(x) for x in range(1, count + 1)]
    random.Random(0).shuffle(values)
    found = exact_interval(values)
    assert (found.median, found.low, found.high, found.count) == (
        statistics.median(values),
        low,
        high,
        count,
    )


def test_a_ratio_pairs_what_was_measured_in_one_launch() -> None:
    """The machine slows down by ten and by a hundred; the ratio does not change."""
    launches = [launched({"a": 2.0 * slow, "b": slow}) for slow in (1.0, 10.0, 100.0)] + [
        launched({"a": 1.0})
    ]
    found = lines.ratio(launches, 4096, "a", "b")
    assert found is not None
    assert (found.median, found.low, found.high, found.count) == (2.0, 2.0, 2.0, 3)
    assert lines.ratio(launches, 4096, "a", "nobody") is None
    assert lines.ratio(launches, 1024, "a", "b") is None


def test_the_best_of_ours_is_one_for_all_launches() -> None:
    launches = [
        launched({OURS: a, "ulysses/contiguous/off": b, "sdpa/1 thread": 0.1})
        for a, b in ((1, 2), (1, 2), (9, 2))
    ]
    assert lines.best(launches, 4096) == OURS


@pytest.mark.parametrize(
    ("values", "bound", "relation", "mark"),
    [
        ((1.0, 1.01, 1.02), 1.05, "<=", "reached"),
        ((1.0, 1.01, 1.2), 1.05, "<=", "reached, open"),
        ((1.0, 1.1, 1.2), 1.05, "<=", "not reached, open"),
        ((1.1, 1.2), 1.05, "<=", "not reached"),
        ((1.3, 1.3), 1.3, ">=", "reached"),
        ((1.0, 1.0), 1.0, ">", "not reached"),
        ((), 1.0, ">", "not measured"),
    ],
)
def test_a_line_is_reached_or_not(
    values: tuple[float, ...], bound: float, relation: str, mark: str
) -> None:
    found = exact_interval(values) if values else None
    assert Requirement("", relation, bound, found).mark == mark
    if found is not None:
        assert Requirement("", relation, bound, found, fails=True).mark == "not reached"
        assert Requirement("", relation, None, found).mark == "-"


def test_few_launches_give_no_verdict() -> None:
    assert (
        Requirement("", ">", 1.0, exact_interval([2.0] * 11), 12).mark
        == "not judged: 11 of 12 launches"
    )
    assert Requirement("", ">", 1.0, exact_interval([2.0] * 12), 12).mark == "reached"


GOOD = {
    **{
        f"{scheme}/{layout}/{check}": 1.0
        for scheme, layout in BALANCED.items()
        for check in ("off", "agree")
    },
    **{f"{scheme}/{layout}/off/full": 2.0 for scheme, layout in BALANCED.items()},
    **{f"{scheme}/one rank": 2.0 for scheme in BALANCED},
    **dict.fromkeys(lines.PEERS, 1.2),
    "ring/contiguous/off": 1.5,
    "allgather_kv/contiguous/off": 1.5,
    lines.SOLO: 2.0,
    lines.DUO: 1.0,
}


@pytest.mark.parametrize(
    ("name", "factor", "short"),
    [
        ("nobody", 1.0, []),
        (
            lines.DUO,
            0.5,
            ["allgather_kv/zigzag/off / two threads", "allgather_kv/zigzag/agree / two threads"],
        ),
        ("allgather_kv/zigzag/agree", 1.1, ["allgather_kv/zigzag/agree / two threads"]),
        *((peer, 0.8, [f"{peer} / allgather_kv/zigzag/off"]) for peer in lines.PEERS),
        ("ring/contiguous/off", 0.8, ["ring, contiguous / zigzag"]),
        *(
            (f"{scheme}/{layout}/off/full", 0.5, [f"{scheme}, causal / full mask"])
            for scheme, layout in BALANCED.items()
        ),
        *((f"{scheme}/one rank", 1.1, [f"{scheme}, one rank / one thread"]) for scheme in BALANCED),
    ],
)
def test_every_required_line_is_there_and_can_be_short(
    name: str, factor: float, short: list[str]
) -> None:
    times = {**GOOD, name: GOOD.get(name, 1.0) * factor}
    found = list(lines.lines([launched(times)] * lines.LAUNCHES, [4096], [4096]))
    assert len(found) == 12
    assert [
        line.text.removesuffix(", 4096 tokens") for line in found if line.mark == "not reached"
    ] == short
    assert {line.mark for line in found} <= {"reached", "not reached"}


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ("--seq 30", "30 is no multiple of 4"),
        ("--seq many", "not a list of numbers"),
        ("--seq 64,64", "each length once"),
        ("--rounds 0", "pass 1 or more"),
        ("--heads 3", "no multiple of 2"),
        ("--launches 0", "must be positive"),
    ],
)
def test_bad_options_are_refused_before_anything_starts(
    options: str,
    complaint: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(launching, "run", lambda *_: pytest.fail("a launch began"))
    assert peers.peers(options.split()) == 2
    assert complaint in capsys.readouterr().err


def test_shorter_sequences_get_more_samples() -> None:
    usual = Setting()
    assert [usual.samples(seq) for seq in (1024, 4096, 8192)] == [12, 3, 3]
    assert [usual.extras(seq) for seq in (1024, 4096, 8192)] == [True, True, False]
    assert Setting(seqs=(8192,)).extras(8192)
    with pytest.raises(UsageError, match="30 is no multiple"):
        Setting(seqs=(30,))


@pytest.mark.parametrize(
    ("status", "code"),
    [
        ({"status": "wrong", "errors": {"out": None}}, 1),
        ({"status": "not installed", "reason": "no"}, 0),
    ],
)
def test_a_contestant_that_is_wrong_is_told_and_has_no_ratio(
    status: dict[str, Any],
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    record = launched({OURS: 1.0})
    record["seqs"]["4096"]["deepspeed ulysses"] = status
    monkeypatch.setattr(launching, "run", lambda *_: record)
    monkeypatch.setattr(memory, "measure", lambda: {4096: 4000, 8192: 8800})
    assert (
        peers.peers(["--seq", "4096", "--launches", "1", "--out", str(tmp_path / "peers.json")])
        == code
    )
    shown = capsys.readouterr().out
    row = next(
        line
        for line in shown.splitlines()
        if line.split()[:2] == ["deepspeed", "ulysses"] and "/" not in line
    )
    assert status["status"] in row
    assert row.split()[2:4] == ["-", "-"]
    assert "not measured" in shown


def test_states_name_how_often() -> None:
    records = [launched({OURS: 1.0}) for _ in range(2)]
    records[1]["seqs"]["4096"][OURS] = {"status": "failed", "reason": "rank 0: no"}
    assert (
        peers.state([one["seqs"]["4096"][OURS] for one in records])
        == "failed in 1 of 2 launches: rank 0: no"
    )


def test_an_interruption_keeps_what_is_complete(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    answers = iter([launched({OURS: 1.0, "deepspeed ulysses": 2.0}, 1024)])

    def run(*_: object) -> dict[str, Any]:
        try:
            return next(answers)
        except StopIteration:
            raise KeyboardInterrupt from None

    monkeypatch.setattr(launching, "run", run)
    out = tmp_path / "folder" / "peers.json"
    assert peers.peers(["--seq", "1024", "--out", str(out)]) == 130
    assert len(json.loads(out.read_text())["launches"]) == 1
    shown = capsys.readouterr()
    assert "2.000 [2.000, 2.000]" in shown.out
    assert "interrupted" in shown.err


def test_an_interrupted_comparison_can_be_resumed_but_not_by_another(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    seeds: list[int] = []

    def run(ranks: int, measure: str, chosen: Setting, launch: object) -> dict[str, Any]:
        seeds.append(chosen.seed)
        return launched({OURS: 1.0}, 1024)

    monkeypatch.setattr(launching, "run", run)
    out = tmp_path / "peers.json"
    options = ["--seq", "1024", "--out", str(out), "--resume"]
    assert [peers.peers([*options, "--launches", count]) for count in ("2", "3")] == [0, 0]
    assert seeds == [0, 1, 2]
    assert len(json.loads(out.read_text())["launches"]) == 3
    assert peers.peers([*options, "--rounds", "1"]) == 2
    assert "differs in setting" in capsys.readouterr().err
    out.write_text("{")
    assert peers.peers(options) == 2
    assert "cannot be read" in capsys.readouterr().err


def peers_program(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.contests.peers", *TINY_OPTIONS, *options]
    return subprocess.run(
        command,
        cwd=ROOT,
        env=mpi_environment(),
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )


def test_every_contestant_computes_the_same() -> None:
    """The real ones on two ranks. DeepSpeed is not among what the tests install; where it is missing its row has to say so."""
    answer = peers_program("--check")
    assert answer.returncode == 0, answer.stdout + answer.stderr
    rows = [
        line
        for line in answer.stdout.splitlines()
        if line.split()[-1:] == ["ok"] or "not installed" in line
    ]
    assert len(rows) == CONTESTANTS, answer.stdout
    missing = [row for row in rows if "not installed" in row]
    assert all("deepspeed ulysses" in row and "ModuleNotFoundError" in row for row in missing)


def test_a_measurement_from_end_to_end(tmp_path: Path) -> None:
    answer = peers_program(
        "--launches", "1", "--rounds", "1", "--out", str(tmp_path / "peers.json")
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr
    document = json.loads((tmp_path / "peers.json").read_text())
    assert set(document) == {"schema_version", "commit", "busy_before", "setting", "launches"}
    (launch,) = document["launches"]
    assert {"cpu_model", "cores", "torch"} <= set(launch["env"])
    heat = launch["seqs"]["32"]
    assert len(heat) == CONTESTANTS
    for name, entry in heat.items():
        if entry["status"] == "ok":
            assert entry["median_s"] == statistics.median(entry["samples_s"]) > 0, name
            assert len(entry["samples_s"]) == 4
        else:
            assert (name, entry["status"]) == ("deepspeed ulysses", "not installed")
