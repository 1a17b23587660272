"""Around the comparison: worktrees come and go, launches are started as they should be, the self-test and the resampling can fail."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kit.comparison import CASES, RING, Machine, compared, pair_of_sides

from benchmarks.compare import __main__ as command
from benchmarks.compare import resample, selftest
from benchmarks.compare import sides as sides_module
from benchmarks.compare.launches import RecordRunner
from benchmarks.compare.sides import CompareError, Side, commits, needs, sides
from benchmarks.records import check

pytestmark = pytest.mark.mpi_skip  # no communication

PROJECT = '[project]\nname = "p"\ndependencies = ["torch>=2", "mpi4py"]\n'
GIT = ("git", "-c", "user.name=a", "-c", "user.email=a@b", "-c", "init.defaultBranch=main")


def git(folder: Path, *arguments: str) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    answer = subprocess.run([*GIT, *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=60, check=True)
    return answer.stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Commits 0 and 1, then `side` with 2, and `main` with 3."""
    folder = tmp_path / "repository"
    (folder / "ci").mkdir(parents=True)
    (folder / "pyproject.toml").write_text(PROJECT)
    (folder / "ci" / "constraints.txt").write_text("torch==2.0\nrich==1\n# note\nmpich==5\n")
    git(folder, "init", "--quiet")
    for number, branch in enumerate(("main", "main", "side", "main")):
        git(folder, "checkout", "--quiet", *(("-b",) if branch == "side" else ()), branch) if number > 1 else None
        (folder / f"file{number}").write_text("x")
        git(folder, "add", "--all")
        git(folder, "commit", "--quiet", "--message", str(number))
    return folder


@pytest.fixture
def alike(monkeypatch: pytest.MonkeyPatch, repository: Path) -> Path:
    """The made-up repository counts as the present tree."""
    monkeypatch.setattr(sides_module, "ROOT", repository)
    return repository


def test_base_is_where_head_left_it(repository: Path) -> None:
    first, tip = git(repository, "rev-parse", "side~1"), git(repository, "rev-parse", "side")
    assert commits("main", "side", repository) == (first, tip)
    assert commits("side", "side", repository) == (tip, tip)


@pytest.mark.parametrize(
    ("base", "head", "complaint"),
    [
        ("nowhere", "main", "'nowhere' is no commit"),
        ("main", "--help", "'--help' is no commit"),
        ("main", "alone", "nothing in common|no commit in common"),
    ],
)
def test_commits_that_cannot_be_compared(base: str, head: str, complaint: str, repository: Path) -> None:
    git(repository, "checkout", "--quiet", "--orphan", "alone")
    git(repository, "commit", "--quiet", "--allow-empty", "--message", "alone")
    with pytest.raises(CompareError, match=complaint):
        commits(base, head, repository)


@pytest.mark.parametrize("end", [None, KeyboardInterrupt, SystemExit, CompareError])
def test_worktrees_go_however_the_block_ends(end: type[BaseException] | None, alike: Path) -> None:
    hashes = commits("main", "side", alike)
    roots: list[Path] = []
    with pytest.raises(end or ZeroDivisionError), sides(*hashes, ("main", "side"), alike) as pair:
        roots += [side.root for side in pair]
        assert [sorted(p.name for p in root.glob("file*")) for root in roots] == [["file0", "file1"], ["file0", "file1", "file2"]]
        assert [side.told for side in pair] == [
            {"ref": ref, "sha": sha, "environment": "shared"} for ref, sha in zip(("main", "side"), hashes, strict=True)
        ]
        (roots[1] / "file2").write_text("changed")
        raise (end or ZeroDivisionError)("the end")
    assert not any(root.exists() for root in roots)
    assert len(git(alike, "worktree", "list").splitlines()) == 1


def test_a_library_with_other_needs_gets_an_environment_of_its_own(alike: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what the library itself needs counts; the harness comes from the present tree with its own needs."""
    commands: list[tuple[str, ...]] = []
    monkeypatch.setattr(sides_module, "_install", lambda *command: commands.append(command))
    monkeypatch.setattr(sides_module, "_harness_needs", lambda: ["rich", "mpich"])
    monkeypatch.setattr(Path, "write_text", lambda path, text: commands.append((path.name, *text.split())))
    other = alike.parent / "other"
    shutil.copytree(alike, other)
    with (other / "ci" / "constraints.txt").open("a") as file:
        file.write("matplotlib==3\n")
    assert sides_module._interpreter(other, Path("folder")) == (sys.executable, "shared")
    with (other / "ci" / "constraints.txt").open("a") as file:
        file.write("mpi4py==4\n")
    python, told = sides_module._interpreter(other, Path("folder"))
    assert (python, told.split(":")[0]) == ("folder/bin/python", "its own")
    assert commands[0][1:3] == ("-m", "venv")
    assert commands[1] == ("constraints.txt", "mpi4py==4", "mpich==5", "torch==2.0", "rich==1")
    assert commands[2][-4:] == ("mpi4py", "torch>=2", "rich", "mpich")


def test_what_a_library_needs_has_to_be_said(tmp_path: Path) -> None:
    with pytest.raises(CompareError, match="does not say what it needs"):
        needs(tmp_path)


PROGRAM = """
import sys
print(sys.argv[1:])
if "--list" in sys.argv: print("case/a 1\\ncase/b 2")
raise SystemExit({code})
"""


def program(tmp_path: Path, code: int) -> tuple[str]:
    path = tmp_path / f"program{code}.py"
    path.write_text(PROGRAM.format(code=code) if code else PROGRAM.format(code=0).replace("print(sys.argv[1:])", ""))
    return (str(path),)


def test_the_runner_is_asked_for_cases_and_launches(tmp_path: Path) -> None:
    side = Side("head", Path("root"), sys.executable, {})
    assert RecordRunner((), 20, program(tmp_path, 0)).listed(side, [1, 2]) == {("case/a", 1), ("case/b", 2)}
    out = tmp_path / "records.jsonl"
    pair = {"stage": "screen", "index": 3}
    RecordRunner(("--quick",), 20, program(tmp_path, 1)).launch(side, 2, ["case/b"], pair, out)
    told = out.with_suffix(".log").read_text()
    assert told.startswith("head, P=2, screen pair 3: exit code 1\n")
    for argument in ("'--root', 'root'", "'--ranks', '2'", "'--only', 'case/b'", "'--quick'", '{"stage": "screen", "index": 3}'):
        assert argument in told
    with pytest.raises(CompareError, match="refuses its options"):
        RecordRunner((), 20, program(tmp_path, 2)).launch(side, 2, ["case/b"], pair, out)
    with pytest.raises(CompareError, match="cases of head cannot be listed"):
        RecordRunner((), 20, program(tmp_path, 1)).listed(side, [1])


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ("nowhere", "'nowhere' is no commit"),
        ("HEAD --ranks 0", "no list of different numbers"),
        ("HEAD --ranks 1,1", "no list of different numbers"),
        ("HEAD --cases nothing-like-it", "no case has nothing-like-it in its name"),
        ("HEAD --out full", "is not empty"),
    ],
)
def test_bad_options_are_refused(
    arguments: str, complaint: str, alike: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(alike.parent)
    (alike.parent / "full").mkdir()
    (alike.parent / "full" / "records.jsonl").write_text("old")
    monkeypatch.setattr(command, "runner", lambda options: Machine())
    monkeypatch.setattr(command, "REPORTS", alike.parent / "reports")
    monkeypatch.setattr(command, "commits", lambda base, head: commits(base, head, alike))
    monkeypatch.setattr(command, "uncommitted", lambda: True)
    monkeypatch.setattr(command, "sides", lambda *arguments: sides(*arguments, alike))
    assert command.main(arguments.split()) == command.USAGE
    assert complaint in capsys.readouterr().err
    assert (alike.parent / "full" / "records.jsonl").read_text() == "old"


def test_an_interruption_keeps_the_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    machine = Machine()

    def launch(*arguments: Any) -> None:
        if len(machine.launches) == 5:
            raise KeyboardInterrupt
        Machine.launch(machine, *arguments)

    monkeypatch.setattr(machine, "launch", launch)
    monkeypatch.setattr(command, "runner", lambda options: machine)
    monkeypatch.setattr(command, "commits", lambda *refs: refs)
    monkeypatch.setattr(command, "sides", lambda *arguments: Still(pair_of_sides()))
    assert command.main(["main", "--out", str(tmp_path)]) == 130
    assert len((tmp_path / "records.jsonl").read_text().splitlines()) == 5 * len(CASES)
    assert not (tmp_path / "result.json").exists()
    assert "interrupted" in capsys.readouterr().err


class Still(tuple[Side, Side]):
    """Sides that need no worktree."""

    def __enter__(self) -> tuple[Side, ...]:
        return tuple(self)

    def __exit__(self, *_: object) -> None:
        pass


@pytest.fixture
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Path]]:
    """Three comparisons of a commit with itself."""
    monkeypatch.setattr(check, "validate", lambda record: None)
    monkeypatch.setattr("kit.comparison.pair_of_sides", same_sides)
    folders = [tmp_path / str(number) for number in range(3)]
    for number, folder in enumerate(folders):
        folder.mkdir()
        compared(folder, Machine(number, noise=0.02), seed=number)
    yield folders


def same_sides() -> tuple[Side, Side]:
    base, head = pair_of_sides()
    return base, Side("head", head.root, head.python, {**head.told, "sha": base.told["sha"]})


def test_resampling_finds_no_regression_and_a_delay(stored: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert resample.main([*map(str, stored), "--comparisons", "50", "--case", RING]) == 0
    shown = capsys.readouterr().out
    assert "50 comparisons of identical commits, 6 cases each: 0 say regressed" in shown
    assert f"{RING}, P=2, 20% more: found 100 of 100" in shown


def test_resampling_can_fail(stored: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = [*map(str, stored), "--comparisons", "5"]
    assert resample.main([*chosen, "--case", RING, "--extra", "0.05"]) == 1
    monkeypatch.setattr(resample, "judge", lambda screen, confirm, delta: argparse.Namespace(verdict=resample.Verdict.REGRESSED))
    assert resample.main(chosen) == 1
    (tmp_path / "different").mkdir()
    monkeypatch.setattr("kit.comparison.pair_of_sides", pair_of_sides)
    compared(tmp_path / "different", Machine(), (1,))
    assert resample.main([str(tmp_path / "different")]) == 2
    assert resample.main([str(tmp_path)]) == 2


def row(case: str, ranks: int, verdict: str) -> dict[str, Any]:
    return {"case": case, "ranks": ranks, "verdict": verdict, "delta": 0.12}


PLANTED = selftest.PLANTED_CASE


@pytest.mark.parametrize(
    ("rows", "wrong"),
    [
        ([row(PLANTED, 1, "regressed"), row(PLANTED, 2, "regressed"), row("other", 2, "inconclusive")], 0),
        ([row(PLANTED, 1, "ungateable"), row(PLANTED, 2, "regressed"), row(PLANTED, 4, "oversubscribed")], 0),
        ([row(PLANTED, 1, "regressed"), row(PLANTED, 2, "inconclusive")], 1),
        ([row(PLANTED, 1, "regressed"), row("other", 2, "regressed")], 1),
        ([row(PLANTED, 1, "ungateable")], 1),
        ([], 1),
    ],
)
def test_the_selftest_knows_what_must_be_found(rows: list[dict[str, Any]], wrong: int) -> None:
    assert len(selftest.planted_found({"rows": rows})) == wrong


@pytest.mark.parametrize("verdict", ["regressed", "improved", "missing", "mismatch", "new"])
def test_the_selftest_knows_what_must_not_be_found(verdict: str) -> None:
    rows = [row("a", 1, "no regression"), row("b", 1, verdict)]
    assert len(list(selftest.nothing_found({"rows": rows, "gateable_share": 1.0}))) == 1
    assert len(list(selftest.nothing_found({"rows": rows[:1], "gateable_share": 0.5}))) == 1
    assert list(selftest.nothing_found({"rows": rows[:1], "gateable_share": 0.8})) == []


def test_the_planted_work_takes_its_share(tmp_path: Path) -> None:
    """On the last rank only, forward only, and as long as it says at least."""
    (tmp_path / "sp_core" / "schemes").mkdir(parents=True)
    path = tmp_path / selftest.PLANTED_IN
    path.write_text("import time\nimport torch\n\n\ndef ring_attention(*, comm):\n    time.sleep(0.02)\n    return comm.rank\n")
    side = selftest.plant(Side("head", tmp_path, "python", {"ref": "HEAD", "sha": "a" * 40}), 1.5)
    assert (side.told["sha"], "50% more work" in side.told["ref"]) == (None, True)
    program = (
        "import time, types, ring, torch\n"
        "def took(rank):\n"
        "    start = time.perf_counter()\n"
        "    assert ring.ring_attention(comm=types.SimpleNamespace(rank=rank, size=2)) == rank\n"
        "    return time.perf_counter() - start\n"
        "with torch.no_grad():\n"
        "    print(took(1) >= 0.03, min(took(0) for _ in range(20)) < 0.03)\n"
        "print(min(took(1) for _ in range(20)) < 0.03)\n"
    )
    answer = subprocess.run(
        [sys.executable, "-c", program], cwd=path.parent, capture_output=True, text=True, timeout=120, check=True
    )
    assert answer.stdout.split() == ["True", "True", "True"]
    assert selftest.planted_delta([{"rows": [row(PLANTED, 2, "no regression")]}]) == 0.12
    assert selftest.planted_delta([]) == 0.10
    path.write_text("")
    with pytest.raises(CompareError, match="plant the work elsewhere"):
        selftest.plant(side, 1.5)
