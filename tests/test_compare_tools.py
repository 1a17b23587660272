"""Around the comparison: worktrees come and go, launches start, wrong options are refused."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kit.comparison import CASES, Machine, pair_of_sides
from kit.git import commit, git

from benchmarks.cases.setting import Setting
from benchmarks.compare import __main__ as command
from benchmarks.compare.__main__ import commits, sides
from benchmarks.compare.rule import Side
from benchmarks.launching import KEEP_MEMORY, Launch, UsageError

pytestmark = pytest.mark.mpi_skip  # no communication

FILES = {"ci/constraints.txt": "torch==2.0\nrich==1\n# note\nmpich==5\n"}


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A commit, then `side` with another one, and `main` with another one."""
    folder = tmp_path / "repository"
    folder.mkdir()
    git(folder, "init", "--quiet")
    commit(folder, "first", file0="x", **FILES)
    git(folder, "branch", "side")
    commit(folder, "main", file1="x")
    git(folder, "checkout", "--quiet", "side")
    commit(folder, "side", file2="x")
    return folder


@pytest.fixture
def alike(monkeypatch: pytest.MonkeyPatch, repository: Path) -> Path:
    """The made-up repository counts as the present tree."""
    monkeypatch.setattr(command, "ROOT", repository)
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
        ("main", "alone", "no commit in common"),
    ],
)
def test_commits_that_cannot_be_compared(
    base: str, head: str, complaint: str, repository: Path
) -> None:
    git(repository, "checkout", "--quiet", "--orphan", "alone")
    git(repository, "commit", "--quiet", "--allow-empty", "--message", "alone")
    with pytest.raises(UsageError, match=complaint):
        commits(base, head, repository)


@pytest.mark.parametrize("end", [KeyboardInterrupt, SystemExit, UsageError])
def test_worktrees_go_however_the_block_ends(end: type[BaseException], alike: Path) -> None:
    hashes = commits("main", "side", alike)
    stack = contextlib.ExitStack()
    pair = stack.enter_context(sides(*hashes, ("main", "side"), alike))
    roots = [side.root for side in pair]
    for root, side, ref, sha in zip(roots, pair, ("main", "side"), hashes, strict=True):
        assert (side.ref, side.sha) == (ref, sha)
        assert (root / "file0").exists()
        assert (root / "file2").exists() == (ref == "side")
        assert not (root / "file1").exists()
    (roots[1] / "file2").write_text("changed")
    with pytest.raises(end, match="the end"), stack:
        raise end("the end")
    assert not any(root.exists() for root in roots)
    assert len(git(alike, "worktree", "list").splitlines()) == 1


def test_a_commit_with_other_packages_is_refused(alike: Path) -> None:
    """Only what the library computes with counts, not what the harness needs."""
    for pin, told in (
        ("rich==2", None),
        ("torch==3", "new pins torch==3, but .* pins torch==2.0. Compare commits"),
    ):
        package = pin.partition("==")[0]
        lines = FILES["ci/constraints.txt"].replace(f"{package}==1", pin)
        lines = lines.replace(f"{package}==2.0", pin)
        sha = commit(alike, pin, **{"ci/constraints.txt": lines})
        git(alike, "checkout", "--quiet", f"{sha}~1")
        refused = pytest.raises(UsageError, match=told) if told else contextlib.nullcontext()
        with refused, sides(sha, sha, ("new", "new"), alike):
            pass
        assert len(git(alike, "worktree", "list").splitlines()) == 1


def test_the_harness_is_asked_for_cases_and_launches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Records are kept, also of an interruption; the output of a failure goes to a log."""
    asked: list[Any] = []

    def run_launch(
        ranks: int, cases: list[Any], setting: Setting, launch: Launch, root: Path
    ) -> str:
        sha = setting.commit["sha"]  # None: the side is no repository
        told = (ranks, [case.id for case in cases], setting.pair, setting.launch, sha)
        asked.append((*told, launch.command(ranks)[-7:], root))
        with Path(setting.out).open("a") as file:
            file.write(f"line {setting.launch}\n")
        if setting.launch == 1:
            raise KeyboardInterrupt
        return "it broke"

    plan = {size: [SimpleNamespace(id="a"), SimpleNamespace(id="b")] for size in (1, 2)}
    monkeypatch.setattr(command, "listing", lambda setting, ranks, root: plan)
    monkeypatch.setattr(command, "run_launch", run_launch)
    bench, out, pair = (
        command.Bench(Setting(run_id="run"), Launch()),
        tmp_path / "records.jsonl",
        {"stage": "screen", "index": 3},
    )
    side = Side("head", tmp_path, "head", None)
    assert bench.listed(side, [1, 2]) == {("a", 1), ("b", 1), ("a", 2), ("b", 2)}
    bench.launch(side, 2, ["b"], pair, out)
    with pytest.raises(KeyboardInterrupt):
        bench.launch(side, 1, ["a", "b"], pair, out)
    worker = ["env", KEEP_MEMORY, sys.executable, "-m", "mpi4py", "-m", "benchmarks.worker"]
    assert asked == [
        (2, ["b"], pair, 0, None, worker, tmp_path),
        (1, ["a", "b"], pair, 1, None, worker, tmp_path),
    ]
    assert out.read_text() == "line 0\nline 1\n"
    assert out.with_suffix(".log").read_text() == "head, P=2, screen pair 3\nit broke\n\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["records.jsonl", "records.log"]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ("nowhere", "'nowhere' is no commit"),
        ("HEAD --ranks 0", "every number must be 1 or more"),
        ("HEAD --ranks 1,1", "appear once"),
        ("HEAD --cases nothing-like-it", "no case has nothing-like-it in its name"),
        ("HEAD --out full", "is not empty"),
        ("HEAD --launcher srun", "write {ranks} in it"),
        ("HEAD --timeout 0", "pass more than 0"),
    ],
)
def test_bad_options_are_refused(
    arguments: str,
    complaint: str,
    alike: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(alike.parent)
    (alike.parent / "full").mkdir()
    (alike.parent / "full" / "records.jsonl").write_text("old")
    monkeypatch.setattr(command, "Bench", lambda *_: Machine())
    monkeypatch.setattr(command, "REPORTS", alike.parent)
    monkeypatch.setattr(command, "commits", lambda base, head: commits(base, head, alike))
    monkeypatch.setattr(command, "sides", lambda base, head, refs: sides(base, head, refs, alike))
    assert command.main(arguments.split()) == 2
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
    monkeypatch.setattr(command, "bench", lambda *_: machine)
    monkeypatch.setattr(command, "commits", lambda *refs: refs)
    monkeypatch.setattr(command, "sides", lambda *_: contextlib.nullcontext(pair_of_sides()))
    assert command.main(["main", "--out", str(tmp_path)]) == 130
    assert len((tmp_path / "records.jsonl").read_text().splitlines()) == 5 * len(CASES)
    assert not (tmp_path / "report.md").exists()
    assert "interrupted" in capsys.readouterr().err
