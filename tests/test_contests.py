"""Test the contests of growth, documents and balance: figures, and when they fail."""

import io
import json
import os
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from kit.meshed import meshed

import sp_core as sp
from benchmarks import launching
from benchmarks.contests import balance, contest, documents, growth
from benchmarks.contests.contest import Contest, Wrong
from benchmarks.contests.netlab.table import netlab
from benchmarks.reporting import tables
from benchmarks.sample import ABSENT, race
from benchmarks.statistics import FEWEST, WITHIN, Interval
from sp_core.llama import create
from sp_core.scheduling.assignment import imbalance
from sp_core.testing import spmd

SIZES = (64, 256, 1024, 4096)
SOME = balance.workload()[::18]
LINEAR, QUADRATIC = [float(P) for P in SIZES], [1e-6 * P * P for P in SIZES]


def wrong(contest: Any, *launches: dict[str, Any]) -> list[Wrong]:
    """Return the complaints in a contest's report of these launches."""
    shown = contest.show({"launches": launches})
    return [part for part in shown if isinstance(part, Wrong)]


CHEAP = growth.line("a cost", SIZES, LINEAR, allowed=growth.LINEAR)
RIGHT = {"name": "computed", "ranks": 1, "status": "ok", "lines": [CHEAP]}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (None, "FileNotFoundError"),
        ("{", "JSONDecodeError"),
        ("[]", "TypeError"),
        ("{}", "KeyError('launches')"),
        ('{"launches": [1]}', "TypeError"),
        ('{"launches": [{"status": "ok", "lines": [{}]}]}', "KeyError('sizes')"),
        ("[" * 100_000, "RecursionError"),
    ],
)
@pytest.mark.parametrize("option", ["--show", "--resume --out"])
def test_a_file_that_is_no_record_is_refused_in_one_line(
    text: str | None,
    told: str,
    option: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(launching, "run", lambda *_: {**RIGHT})
    path = tmp_path / "record.json"
    if text is not None:
        path.write_text(text)
    is_begun = option != "--show" and text is None  # there is nothing to resume yet
    assert growth.growth([*option.split(), str(path)]) == (0 if is_begun else 2)
    said = capsys.readouterr().err
    assert said.count("\n") == (not is_begun)
    assert is_begun or "sizes" in told or f"{path} is no record of a contest: {told}" in said


@pytest.mark.parametrize(
    ("launch", "code"),
    [
        (RIGHT, 0),
        ({**RIGHT, "lines": []}, 1),  # nothing can be shown, as of a record of another contest
        ({**RIGHT, "status": "oom"}, 1),
        ({**RIGHT, "lines": [growth.line("a cost", SIZES, QUADRATIC, allowed=1)]}, 1),
    ],
)
def test_a_record_is_shown_with_the_exit_code_of_its_measurement(
    launch: Any, code: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of a file's name only {mpi} is filled in."""
    found = Mock(side_effect=lambda *_: {"reason": "it failed", **launch})
    monkeypatch.setattr(launching, "run", found)
    monkeypatch.setattr(contest, "installed", lambda: "an mpi")
    (chosen, out) = (str(tmp_path / f"{{}}-{mpi}-{{0.json") for mpi in ("{mpi}", "an mpi"))
    assert growth.growth(["--only", "computed", "--out", chosen]) == code
    assert growth.growth(["--show", out]) == code
    assert growth.growth(["--show", out, out]) == code


@pytest.mark.parametrize("program", [growth.growth, balance.balance, netlab])
def test_other_rounds_or_code_or_another_machine_are_not_resumed(
    program: Contest,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(Contest, "_tell", lambda *_: False)
    out = tmp_path / "record.json"
    more = ["--link-model"] * (program is netlab)

    def again(rounds: str) -> int:
        chosen = "computed" if program is growth.growth else "P = 2"
        return program([*more, "--only", chosen, "--resume", "--out", str(out), "--rounds", rounds])

    run = Mock(return_value={"status": "failed", "reason": "it failed"})
    monkeypatch.setattr(launching, "run", run)
    assert again("3") == 0
    launches = run.call_count
    assert (again("3"), run.call_count) == (0, 2 * launches)  # a launch that failed is made again
    assert again("4") == 2
    assert "differs in rounds from what" in capsys.readouterr().err
    with monkeypatch.context() as edited:
        edited.setattr(contest, "ROOT", tmp_path)
        assert again("3") == 2
    assert "differs in code from what" in capsys.readouterr().err
    monkeypatch.setattr(contest, "machine", lambda device: "another")
    assert again("3") == 2
    assert "differs in machine from what" in capsys.readouterr().err


def test_measurements_on_two_kinds_of_gpus_are_not_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    names = []
    for gpus in ("H100, 550.1, 700.00", "A100, 550.1, 400.00"):
        monkeypatch.setattr(contest, "gpus", lambda gpus=gpus: gpus)
        names.append([contest.machine(device) for device in ("cpu", "cuda")])
    (processor, one), (same, other) = names
    assert processor == same
    assert len({processor, one, other}) == 3


def test_the_code_that_a_contest_runs_is_compared() -> None:
    """Contestants of other libraries, the model of a link and the emulated hosts are part of it."""
    files = {path for pattern in contest.CODE for path in launching.ROOT.glob(pattern)}
    needed = ("sp_core/mesh.py", "tests/oracle/link.py", "tests/conformance/gloo.py")
    assert {
        launching.ROOT / name for name in (*needed, "benchmarks/contests/netlab/agent.sh")
    } <= files


def test_earlier_records_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """So are the plots beside them."""
    monkeypatch.setattr(launching, "run", lambda *_: RIGHT)
    out, texts = tmp_path / "record.json", []
    out.with_suffix(".png").write_text("a plot")
    for hour in range(2):
        out.write_text(f"record {hour}")
        os.utime(out, (3600 * hour, 3600 * hour))
        assert growth.growth(["--only", "computed", "--out", str(out)]) == 0
        assert contest.read(out)["launches"]
        assert contest.read(out)["env"]["cores"] >= 1
    texts = [path.read_text() for path in sorted(tmp_path.glob("record.19700*.json"))]
    assert texts == ["record 0", "record 1"]
    assert [path.name for path in tmp_path.glob("*.png")] == ["record.19700101T000000Z.png"]


@pytest.mark.parametrize("degree", [-1.0, 0.0, 0.5, 1.0, 2.0])
def test_the_exponent_of_a_power_is_found_beside_a_constant_at_small_sizes(degree: float) -> None:
    values = [1e9, *(3 * size**degree for size in SIZES[1:])]
    assert growth.exponent(SIZES, values) == pytest.approx(degree)


@pytest.mark.parametrize(
    ("rounds", "more", "texts"),
    [
        ([LINEAR, LINEAR], {"allowed": growth.LINEAR}, []),
        ([QUADRATIC, LINEAR, QUADRATIC], {"allowed": 1.1}, ["2.000"]),
        ([[21.0] * 4], {"allowed": growth.FLAT, "bound": 20.0}, ["at 4096"]),
    ],
    ids=("linear", "quadratic", "slow, though it grows slowly"),
)
def test_a_cost_above_its_limit_or_bound_is_told(
    rounds: list[list[float]], more: dict[str, float], texts: list[str]
) -> None:
    lines = [growth.line("a cost (ms)", SIZES, *rounds, **more)]
    told = wrong(growth, {"name": "computed", "lines": lines})
    assert [text in one for text, one in zip(texts, told, strict=True)] == [True] * len(texts)


@pytest.mark.parametrize("rounds", [1, 5, 6])
def test_few_rounds_leave_a_time_open_and_one_value_decides_a_count(rounds: int) -> None:
    lines = [growth.line(f"plan (ms): {rounds}", SIZES, *[LINEAR] * rounds, allowed=1.1), CHEAP]
    (table,) = growth.show({"launches": [{"name": "computed", "lines": lines}]})
    assert isinstance(table, tables.Table)
    mark = "reached, open" if rounds < FEWEST else "reached"
    assert [row[-1] for row in table.rows] == [mark, "reached"]
    assert table.note == WITHIN


@pytest.mark.parametrize(
    ("name", "peaks", "complaints"),
    [
        ("ring", (400, 205, 105), 0),
        ("ring", (400, 300, 200), 1),
        ("allgather_kv", (400, 400, 400), 0),
        ("allgather_kv", (400, 800, 1600), 1),
    ],
)
def test_live_bytes_must_fall_with_the_ranks(
    name: str, peaks: tuple[float, ...], complaints: int
) -> None:
    """Peaks may exceed S/P by a tenth. For AllGather-KV, which holds S keys, they may not grow."""
    launches = [
        {"name": f"P = {size}", "ranks": size, "peaks": {name: peak}, "own": 1}
        for size, peak in zip((16, 32, 64), peaks, strict=True)
    ]
    assert len(wrong(growth, {"name": "computed", "lines": []}, *launches)) == complaints


def test_costs_of_one_rank_follow_their_limits() -> None:
    """Costs are computed for fewer ranks than the command uses. Nothing is timed."""
    few, more = (growth.computed_for(size) for size in (64, 256))
    for what, allowed in few:
        if not what.startswith("bytes"):  # with few ranks, constants dominate the sizes of objects
            found = (few[what, allowed], more[what, allowed])
            assert growth.exponent((64, 256), found) <= allowed + 0.05, what


@pytest.mark.parametrize(
    ("mask", "quickest", "others", "faulty", "complaints"),
    [
        ("8 documents", 1.1, {}, "none", 0),
        ("8 documents", 1.2, {}, "none", len(documents.LAYOUTS)),
        ("8 documents", 1.1, {"ring/striped": 1.2}, "none", 1),
        ("8 documents", 1.1, {}, "ring/zigzag", 2),  # `slow` is judged
        ("window", 1.15, {}, "none", 0),  # twice the ideal on one rank is the time of `ALONE` here
        ("window", 1.25, {}, "none", 1),
        ("window", 1.2, {}, "/", 2 * len(documents.LAYOUTS)),  # all are wrong
        ("skewed", 1.0, {}, "none", 0),
        ("skewed", 1.0, {"ring/zigzag": 0.9}, "none", 1),  # quicker than balanced
        ("skewed", 1.0, {"ring/zigzag": 0.9}, "/zigzag", 2),
        ("skewed", 1.0, {"ring/zigzag": 0.9}, "/balanced", 2),
    ],
)
def test_the_quickest_right_scheme_of_each_layout_is_judged(
    mask: str, quickest: float, others: dict[str, float], faulty: str, complaints: int
) -> None:
    """All but `slow` and `others` take `quickest` times the ideal. `faulty` names are wrong."""
    times = {f"ring/{layout}": quickest for layout in documents.LAYOUTS}
    times |= {f"slow/{layout}": 9.0 for layout in documents.LAYOUTS}
    times |= {documents.IDEAL: 1.0, documents.ALONE: 2.0, **others}
    bad = {name for name in times if faulty in name}
    checks = {one: {"status": "wrong" if one in bad else "ok"} for one in times if "/" in one}
    samples = {name: [seconds] * 3 for name, seconds in times.items()}
    launch = {"ranks": 2, "mask": mask, "checks": checks, "samples_s": samples}
    assert len(wrong(documents, launch)) == complaints
    shown = next(x for x in documents.show({"launches": [launch]}) if isinstance(x, tables.Table))
    assert {row[1] for row in shown.rows} == {*times} - bad


def test_balanced_shares_the_work() -> None:
    masks = documents.masks()
    assert max(documents.work("balanced", 2, mask) for mask in masks.values()) <= documents.WORK
    assert documents.work("contiguous", 2, masks["1 documents"]) > 1.4


@pytest.mark.mpi_skip
@spmd(1)
@meshed("ring", check="off")
def test_what_is_counted_while_computing_is_what_the_cost_model_says(mesh: sp.Mesh) -> None:
    """On one rank, the operations of every policy are exactly those that the model predicts."""
    few, model = SOME[::7], create(balance.CONFIG, mesh)
    for plan in balance.plans(few, 1).values():
        assert [balance.count(model, few, plan)[0]] == balance.predicted(plan)["loads"]


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_workload_is_balanced_by_plan_and_naive_policies_are_not(ranks: int) -> None:
    found = balance.planned(balance.workload(), ranks)["planned"]
    shares = {name: imbalance(policy["loads"]) for name, policy in found.items()}
    assert max(shares["balanced"], shares["dynamic"]) < balance.BOUND
    assert min(shares["contiguous"], shares["round_robin"]) > balance.BOUND


@pytest.fixture
def balanced() -> dict[str, Any]:
    """Return the record of a launch in which "balanced" took half the time of other policies."""
    known = {"setting": {"ranks": 2}, **balance.planned(SOME, 2)}
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


def test_throughput_is_a_ratio_of_the_same_round_and_tables_show_it(
    balanced: dict[str, Any],
) -> None:
    assert balance.throughput(balanced, "round_robin") == Interval(2.0, 2.0, 2.0, 2)
    assert balance.throughput(balanced, "padded") is None
    assert wrong(balance, balanced) == []
    shown = str(list(balance.show({"launches": [balanced]})))
    assert ("2.000 [2.000, 2.000]" in shown, "bubble: 20.0%" in shown) == (True, True)


@pytest.mark.parametrize(
    ("part", "value", "text"),
    [
        ("error", 1.0, "differ by 1.00e+00"),
        ("error", float("nan"), "differ by nan"),
        ("counted", [3, 1], "1.500 ["),
    ],
)
def test_a_wrong_result_and_an_unbalanced_count_are_told(
    part: str, value: Any, text: str, balanced: dict[str, Any]
) -> None:
    balanced["policies"]["balanced"][part] = value
    assert text in wrong(balance, balanced)[0]


def test_the_page_of_results_tells_the_committed_balance() -> None:
    """A record whose clock readings were rounded tells other ratios."""
    document = json.loads((launching.ROOT / "benchmarks" / "results" / "balance.json").read_text())
    (record, _) = document["launches"]
    page = (launching.ROOT / "docs" / "results.md").read_text()
    (text,) = (part for part in page.split("\n## ") if "`nox -s balance`" in part)
    for name, power in (("round_robin", 1), ("contiguous", 1), ("dynamic", -1)):
        found = balance.throughput(record, name)
        assert found
        assert f" {found.median**power:.2f} " in text, name


def test_the_times_of_a_race_count_from_its_first_sample() -> None:
    """Readings of a clock that runs for days would lose a short duration when they are rounded."""
    spans = iter([(1e6 + 1, 1e6 + 2), (1e6 + 3, 1e6 + 4)])
    other = {"a": [ABSENT, ABSENT]}
    assert race(Mock(bcast=float, allgather=lambda mine: [mine]), {}, 2, 0) == {}
    world = Mock(bcast=float, allgather=lambda mine: [mine, other])
    assert race(world, {"a": lambda: next(spans)}, 2, 0) == {"a": [[(0, 1), (2, 3)], other["a"]]}


def test_a_terminal_that_is_not_utf_8_gets_escapes() -> None:
    out = io.TextIOWrapper(io.BytesIO(), "ascii")
    with redirect_stdout(out), pytest.raises(SystemExit):
        launching.main(Mock(side_effect=lambda _: tables.say("\N{BULLET}")))
    assert out.buffer.getvalue() == rb"\u2022" + b"\n"
