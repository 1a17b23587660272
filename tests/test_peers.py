"""Test the contest of peers: wrong contestants get no time, and complete launches are kept."""

import functools
import json
import math
import re
import statistics
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from mpi4py import MPI
from test_scaling import program as run_program

from benchmarks import launching
from benchmarks.contests.peers import contestants as problem, models, table as program
from benchmarks.contests.peers.contestants import NAMES
from benchmarks.contests.peers.others import Contestant, masks, plain
from benchmarks.contests.peers.table import BALANCED, DUO, LAUNCHES, MASKED, PEERS, SOLO, peers
from benchmarks.statistics import FEWEST, Interval, Requirement, exact_interval
from sp_core import transport
from tests.oracle.reference.dense import visible

OURS = "ring/zigzag/off"
CONTESTANTS = 34
WHOLE = problem.draw(32, 0, 4, 8)
FAULTS: dict[str, Any] = {
    "none": lambda x: x,
    "out off by one token": lambda x: [x[0].roll(1, 1), *x[1:]],
    "dq of another token": lambda x: [x[0], x[1].roll(1, 1), *x[2:]],
    "dk a mean": lambda x: [*x[:2], x[2] / 2, x[3]],
    "dv zero": lambda x: [*x[:3], x[3] * 0],
    "not finite": lambda x: [
        *x[:3],
        x[3].clone().index_fill_(0, torch.tensor(0), math.nan),
    ],
}


def launched(times: dict[str, float], seq: int = 4096) -> dict[str, Any]:
    """Return the record of a launch in which every contestant was right."""
    heat = {
        name: {"status": "ok", "errors": dict.fromkeys(NAMES, 1e-7), "median_s": time}
        for name, time in times.items()
    }
    return {"status": "ok", "seqs": {str(seq): heat}}


def test_a_contestant_with_other_logits_is_found() -> None:
    """The first contestant gives the expected logits of the prompt and of one token."""

    def begin(scale: dict[int, float]) -> models.Step:
        return lambda tokens: torch.arange(4.0)[None] * scale.get(len(tokens), 1.0)

    want = list[torch.Tensor]()
    for scale, ends in (
        ({}, "ok ok"),
        ({}, "ok ok"),
        ({1: 1.1}, "ok wrong"),
        ({2: 1.1}, "wrong ok"),
    ):
        begun = functools.partial(begin, scale)
        told = [*models.timers(MPI.COMM_SELF, begun, [1, 2], want)]
        assert [heat for heat, *_ in told] == ["prefill", "decode"]
        assert [check["status"] for _, check, _ in told] == ends.split()


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_contestant_is_found(fault: str) -> None:
    """The order of heads and tokens in memory does not change the verdict."""
    positions = torch.tensor([*range(8), *range(24, 32)])
    expected = problem.alone(WHOLE, {"causal": True})
    results = FAULTS[fault]([x[:, positions] for x in expected])
    for heads_first in (False, True):
        mine = problem.part(WHOLE, positions, heads_first=heads_first)
        assert torch.equal(mine.qkv[0], WHOLE[0][:, positions])
        assert mine.grad.transpose(1, 2).is_contiguous() == heads_first
        found = problem.errors(results, mine.positions, expected)
        verdict = problem.verdict([("", [0.0] * len(NAMES)), ("", found)])
        assert verdict["status"] == ("ok" if fault == "none" else "wrong")
        json.dumps(verdict, allow_nan=False)


@pytest.mark.parametrize("backward", [True, False])
@pytest.mark.parametrize("mask", ["causal", "window", "documents"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_mask_off_by_one_is_found(dtype: torch.dtype, mask: str, backward: bool) -> None:
    heat = problem.Heat(MPI.COMM_SELF, tuple(x.to(dtype) for x in WHOLE))
    seen = visible(range(32), range(32), **masks(32)[mask])
    for shift, status in ((0, "ok"), (1, "wrong")):
        attend = functools.partial(plain, seen=seen.roll(shift, 1))
        check = heat.check(Contestant("", attend, mask=mask, backward=backward))
        assert check["status"] == status
        assert check["limit"] < 0.1
        assert [*check["errors"]] == [*NAMES][: 4 if backward else 1]


def test_one_rank_that_breaks_fails_the_contestant() -> None:
    fine = ("", [0.0] * len(NAMES))
    failed = problem.verdict([fine, ("TypeError: no", fine[1])])
    assert failed == {"status": "failed", "reason": "rank 1: TypeError: no"}
    right = problem.verdict([fine, fine])
    assert program.judged([right]) == ("ok", "0.0e+00")
    assert program.judged([right, failed])[0] == "failed in 1 of 2 launches: rank 1: TypeError: no"


def test_a_ratio_pairs_what_was_measured_in_one_launch() -> None:
    """In two launches all times are 10 and 100 times as long. The ratio does not change.

    `best` chooses one of our contestants for all launches together.
    """
    launches = [launched({"a": 2.0 * slow, "b": slow}) for slow in (1.0, 10.0, 100.0)]
    found = program.ratio([*launches, launched({"a": 1.0})], 4096, "a", "b")
    assert found == Interval(2.0, 2.0, 2.0, 3)
    assert program.ratio(launches, 4096, "a", "nobody") is None
    assert program.ratio(launches, 1024, "a", "b") is None
    others = {"ulysses/contiguous/off": 2.0, SOLO: 0.1}
    assert program.best([launched({OURS: x, **others}) for x in (1.0, 1.0, 9.0)], 4096) == OURS


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
    """With fewer than six values a line is open, as their range misses the median too often."""
    found = exact_interval(values * FEWEST) if values else None
    assert Requirement("", relation, bound, found).mark == mark
    if found is not None:
        open_mark = f"{mark.removesuffix(', open')}, open"
        assert Requirement("", relation, bound, exact_interval(values)).mark == open_mark
        assert Requirement("", relation, bound, found, fails=True).mark == "not reached"
        assert Requirement("", relation, None, found).mark == "-"
        few = Requirement("", relation, bound, found, found.count + 1)
        assert few.mark == f"not judged: {found.count} of {found.count + 1} launches"


GOOD = {
    **{
        f"{scheme}/{layout}/{check}": 1.0
        for scheme, layout in BALANCED.items()
        for check in ("off", "agree")
    },
    **{f"{scheme}/{layout}/off/full": 2.0 for scheme, layout in BALANCED.items()},
    **{f"{scheme}/one rank": 2.0 for scheme in BALANCED},
    **dict.fromkeys(PEERS, 1.2),
    **{f"ulysses/contiguous/off/{form}": 1.0 for form in MASKED},
    **{f"{peer}/{form}": 1.2 for form, (peer, *_) in MASKED.items()},
    "ring/contiguous/off": 1.5,
    "allgather_kv/contiguous/off": 1.5,
    SOLO: 2.0,
    DUO: 1.0,
}
BEST = "allgather_kv/zigzag"


@pytest.mark.parametrize(
    ("name", "factor", "short"),
    [
        ("nobody", 1.0, []),
        (DUO, 0.5, [f"{BEST}/off / two threads", f"{BEST}/agree / two threads"]),
        (f"{BEST}/agree", 1.1, [f"{BEST}/agree / two threads"]),
        *((peer, 0.8, [f"{peer} / {BEST}/off"]) for peer in PEERS),
        *(
            (f"{peer}/{form}", 0.8, [f"{peer}/{form} / ulysses/contiguous/off/{form}"])
            for form, (peer, *_) in MASKED.items()
        ),
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
    found = {
        line.text.removesuffix(", 4096 tokens"): line.mark
        for line in program.lines([launched(times)] * LAUNCHES, ["4096"])
    }
    assert len(found) == 15
    assert [text for text, mark in found.items() if mark == "not reached"] == short
    assert set(found.values()) <= {"reached", "not reached"}


def test_ranks_without_a_gpu_each_are_left_out_and_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """With one rank there are no peers, so schemes are compared with torch's attention only."""
    record = launched({f"{scheme}/one rank": 1.0 for scheme in BALANCED} | {SOLO: 1.0})
    run = Mock(return_value=record)
    monkeypatch.setattr(launching, "run", run)
    monkeypatch.setattr(transport, "count_devices", lambda kind: 1)
    options = "--device cuda --ranks 1,2,4 --seq 4096 --launches 2 --out"
    assert peers([*options.split(), str(tmp_path / "peers.json")]) == 0
    shown = capsys.readouterr().out
    assert [call.args[0] for call in run.call_args_list] == [1, 1]
    for count in (2, 4):
        assert f"P = {count} needs a GPU for each rank; there are 1." in shown
    assert shown.count("4096 tokens") == len(BALANCED)


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
    options = ["--seq", "4096", "--launches", "1", "--out", str(tmp_path / "peers.json")]
    assert peers(options) == code
    shown = capsys.readouterr().out
    rows = re.findall("  deepspeed ulysses +([-/]) (.*)", shown)
    assert [mark for mark, _ in rows] == ["-", "/"]
    assert (status["status"] in rows[0][1], "not measured" in shown) == (True, True)


@pytest.mark.parametrize(
    ("states", "told"),
    [
        (("ok", "ok"), "ok"),
        (("not installed", "not installed"), "not installed: 0"),
        (("ok", "failed"), "failed in 1 of 2 launches: 1"),
        (("not installed", "wrong", "not installed"), "wrong in 1 of 3 launches: 1"),
        (("not installed", "failed", "failed"), "failed in 2 of 3 launches: 1"),
        (("failed", "wrong", "ok"), "wrong in 1 of 3 launches: 1"),
    ],
)
def test_the_worst_status_of_all_launches_is_told(states: tuple[str, ...], told: str) -> None:
    found = [{"status": state, "reason": str(n)} for n, state in enumerate(states)]
    assert program.judged(found) == (told, "-")


def test_a_contest_keeps_what_is_complete_and_can_be_resumed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A resumed contest repeats failed launches and skips complete ones."""
    good = launched({OURS: 1.0, "deepspeed ulysses": 2.0}, 1024)
    died = {"status": "oom", "reason": "it died"}
    run = Mock(side_effect=[good, died, KeyboardInterrupt, good, good])
    monkeypatch.setattr(launching, "run", run)
    out = tmp_path / "folder" / "peers.json"
    options = ["--seq", "1024", "--out", str(out), "--resume", "--launches", "3"]
    assert peers(options) == 130
    shown = capsys.readouterr()
    for text in ("2.000 [2.000, 2.000]", "P = 2, seed 1: oom, 0 s\nit died", "interrupted"):
        assert text in shown.out + shown.err
    assert len(json.loads(out.read_text())["launches"]) == 2
    assert peers([*options, "--only", "seed 1"]) == 0
    assert peers(options) == 0
    assert [call.args[2]["seed"] for call in run.call_args_list] == [0, 1, 2, 1, 2]
    kept = json.loads(out.read_text())["launches"]
    assert [launch["name"] for launch in kept] == [f"P = 2, seed {n}" for n in range(3)]
    assert peers(["--list", "--launches", "2"]) == 0
    assert capsys.readouterr().out.splitlines()[-2:] == ["P = 2, seed 0", "P = 2, seed 1"]


def test_every_contestant_computes_the_same_and_is_timed(tmp_path: Path) -> None:
    """Run the real contestants on two ranks. One that lacks a library or a compiler must say so."""
    out = tmp_path / "peers.json"
    run_program("peers", *["--seq", "32", "--launches", "1", "--samples", "2", "--out"], str(out))
    (launch,) = json.loads(out.read_text())["launches"]
    assert {"cpu_model", "cores", "torch"} <= set(launch["env"])
    assert len(launch["seqs"]["32"]) == CONTESTANTS
    for name, entry in launch["seqs"]["32"].items():
        if entry["status"] == "ok":
            assert entry["median_s"] == statistics.median(entry["samples_s"]) > 0, name
            assert len(entry["samples_s"]) == 2
        else:
            missing = "ModuleNotFoundError" if name == "deepspeed ulysses" else "C++ compiler"
            assert (entry["status"], missing in entry["reason"]) == ("not installed", True)
