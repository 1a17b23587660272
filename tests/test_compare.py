"""Test the comparison of commits on simulated machines: every verdict, and the reason for it.

Worktrees, launches, options and interruptions are tested, too.
"""

import contextlib
import re
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import DEFAULT, Mock

import pytest
from kit.comparison import CASES, LAYER, RING, ULYSSES, Machine, compared, pair_of_sides, rows_of
from kit.git import commit, git

from benchmarks import launching
from benchmarks.compare import command
from benchmarks.compare.command import commits, sides
from benchmarks.compare.pairs import coin
from benchmarks.compare.rule import CODES, SCREEN_PAIRS, Side, cells
from benchmarks.launching import KEEP_MEMORY, UsageError

pytestmark = pytest.mark.mpi_skip  # no communication

SLOWER = {(RING, 2): 1.3}
TIMEOUT = "head in pair {} of the {} stage: timeout"
MORE = {"bytes_sent": 64, "seconds": 0.1}
WAITS = {
    "communication": {"max_s": 0.1, "mean_s": 0.1},
    "total": {"max_s": 0.12, "mean_s": 0.1},
}


def changed(side: str = "head", since: int = 0, slower: Any = None, **change: Any) -> Machine:
    """Make a machine on which one side's records change from pair `since` onwards."""
    return Machine(slower=slower or {}, changes={side: (since, change)})


def broken(stage: str, pair: int, side: str = "head", **more: Any) -> Machine:
    return Machine(broken={(side, RING, 2, stage, pair)}, **more)


@pytest.mark.parametrize(
    ("machine", "verdict", "told", "code"),
    [
        (Machine(), "no regression", "", 0),
        (Machine(slower={(RING, 2): 0.7}), "improved", "faster in attention", 0),
        (Machine(slower=SLOWER), "regressed", "slower in attention (+1.", 1),
        (
            changed(slower=SLOWER, phases=WAITS, comm={"shift": MORE}),
            "regressed",
            "slower in shift (+",
            1,
        ),
        (broken("screen", 4), "missing", "1 of 20 launches; " + TIMEOUT.format(4, "screen"), 3),
        (broken("screen", 0, "base"), "missing", "not launched again; base in pair 0", 3),
        (
            broken("confirm", 7, slower=SLOWER),
            "missing",
            "1 of 40 launches; " + TIMEOUT.format(7, "confirm"),
            3,
        ),
        (Machine(lost={("head", RING)}), "missing", "head has lost this case", 3),
        (Machine(lost={("base", RING)}), "new", "base has no such case", 0),
        (changed(env={"fingerprint": "f" * 16}), "mismatch", "the fingerprint is not the same", 3),
        (
            changed("base", 6, env={"fingerprint": "f" * 16}),
            "mismatch",
            "the fingerprint is not the same",
            3,
        ),
        (
            changed(since=3, commit={"sha": "d" * 40}),
            "mismatch",
            "the commit of head is not the same",
            3,
        ),
        (changed(since=5, harness_sha="b" * 64), "mismatch", "the harness is not the same", 3),
        (
            changed(since=SCREEN_PAIRS, slower=SLOWER, commit={"sha": "d" * 40}),
            "mismatch",
            "the commit of head is not the same",
            3,
        ),
        (changed(case={"shape": {"seq": 32}}), "mismatch", "the case is not the same", 3),
        (Machine(cores=1), "oversubscribed", "more ranks than cores", 3),
        (Machine(cores=1, slower={(RING, 2): 2.0}), "oversubscribed", "more ranks than cores", 3),
        (
            Machine(noise=0.02, slower={(RING, 2): 1.09}),
            "inconclusive",
            "pairs would decide",
            4,
        ),
        (Machine(noise=0.5), "ungateable", "base against itself varies so much", 3),
        (Machine(drift=0.3), "ungateable", "base against itself varies so much", 3),
        (Machine(drift=0.3, slower={(RING, 2): 10.0}), "regressed", "slower in attention", 1),
    ],
)
def test_every_verdict_has_its_reason(
    machine: Machine, verdict: str, told: str, code: int, tmp_path: Path
) -> None:
    result = compared(tmp_path, machine, (2,), strict=True)
    row = rows_of(result)[RING, 2]
    assert (row.verdict, result.exit_code) == (verdict, code)
    assert told in "; ".join(row.remarks)
    assert len(result.records) >= 40
    assert result.problems == []  # simulated records are valid


def test_a_slower_case_is_found_where_it_is_and_nowhere_else(tmp_path: Path) -> None:
    machine = Machine(slower={(RING, 2): 1.2, (ULYSSES, 1): 0.7, (ULYSSES, 2): 0.7})
    result = compared(tmp_path, machine)
    rows: Any = rows_of(result)
    found, unchanged = rows[RING, 2], rows[RING, 1]
    assert (found.change.count, found.slower) == (20, 20)
    assert (unchanged.change.count, unchanged.delta) == (10, 0.10)
    assert 1.15 < found.change.low < found.change.median < found.change.high < 1.25
    verdicts = Counter(str(row.verdict) for row in result.rows)
    assert verdicts == {"regressed": 1, "improved": 2, "no regression": 3}
    assert result.gateable_share == 1.0
    places = [launch[1:3] + launch[4:] for launch in machine.launches if launch[2] == "confirm"]
    assert Counter(places) == {(1, "confirm", (ULYSSES,)): 40, (2, "confirm", (RING, ULYSSES)): 40}


@pytest.mark.parametrize("dead", [{("head", 2)}, {("base", 2), ("head", 2)}])
def test_a_side_without_any_record_is_not_launched_to_the_end(
    dead: set[tuple[str, int]], tmp_path: Path
) -> None:
    machine = Machine(dead=dead)
    result = compared(tmp_path, machine)
    found = {(row.ranks, str(row.verdict)) for row in result.rows}
    assert (found, result.exit_code) == ({(2, "missing"), (1, "no regression")}, 3)
    assert sum(launch[1] == 2 for launch in machine.launches) == 2


@pytest.mark.parametrize("stage", ["screen", "confirm"])
def test_a_case_that_hangs_in_the_first_pair_is_not_launched_again(
    stage: str, tmp_path: Path
) -> None:
    """A launch would wait for it until its timeout. The other cases are measured to the end."""
    machine = broken(stage, 0, slower={(RING, 2): 1.3, (ULYSSES, 2): 1.3})
    result = compared(tmp_path, machine, (2,))
    assert [launch[2] for launch in machine.launches if RING in launch[4]].count(stage) == 2
    row, other = (rows_of(result)[case, 2] for case in (RING, ULYSSES))
    assert (row.verdict, other.verdict) == ("missing", "regressed")
    assert TIMEOUT.format(0, stage) in row.remarks[0]


def test_the_order_of_each_pair_is_its_coin(tmp_path: Path) -> None:
    machine = Machine()
    compared(tmp_path, machine, seed=5)
    first = {launch[1:4]: launch[0] for launch in reversed(machine.launches)}
    coins = {(n, "screen", i): coin(5, "screen", n, i) for n in (1, 2) for i in range(10)}
    assert first == {place: ("base", "head")[thrown] for place, thrown in coins.items()}
    throws = [coin(seed, "screen", 2, index) for seed in range(400) for index in range(10)]
    assert abs(sum(throws) - 2000) < 4 * 32  # four standard deviations of 4000 fair coins


@pytest.mark.parametrize("cases", [[], ["--cases", "ring", "layers"]])
def test_the_table_shows_everything_that_was_chosen(
    cases: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken_launch = {("head", ULYSSES, 1, "screen", 2)}
    machine = Machine(slower=SLOWER, lost={("base", LAYER)}, broken=broken_launch)
    options = launching.parse("compare", "", command.OPTIONS, ["main", "--ranks", "1,2", *cases])
    result = command.compare(pair_of_sides(), options, cast("Any", machine), tmp_path)
    shown = capsys.readouterr().out
    for text in (
        "compare: 40 of 40, screen pair 10, P=2",
        "base base (bbbbbbbbbb) against head head (cccccccccc)",
        "20 of 20",
        "slower in attention",
        "no such case",
        f"Exit code 1: {CODES[1]}",
    ):
        assert text in shown
    assert ("it hung" in shown) == (not cases)
    assert {row.case for row in result.rows} == ({RING, LAYER} if cases else set(CASES))
    screened = {launch[4] for launch in machine.launches if launch[2] == "screen"}
    assert screened == {(RING,) if cases else (RING, ULYSSES)}
    assert cells(rows_of(result)[LAYER, 1])[3:9] == ("-",) * 6
    assert "\n1 regressed, " in (tmp_path / "report.md").read_text()


FILES = {"ci/constraints.txt": "torch==2.0\nrich==1\n# note\nmpich==5\n"}


@pytest.fixture
def repository(substitute: Any, tmp_path: Path) -> Path:
    """Make a repository with one common commit, and one more on each branch, `side` and `main`."""
    folder = tmp_path / "repository"
    folder.mkdir()
    git(folder, "init", "--quiet")
    commit(folder, "first", file0="x", **FILES)
    git(folder, "branch", "side")
    commit(folder, "main", file1="x")
    git(folder, "checkout", "--quiet", "side")
    commit(folder, "side", file2="x")
    substitute(command, ROOT=folder, REPORTS=folder / "reports")
    return folder


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
        commits(base, head)


def test_a_failure_of_git_is_told_and_blames_no_commit(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cannot = pytest.raises(UsageError, match=r"git cannot check out .* git: fatal: .*abc")
    with cannot, sides("abc", "abc", ("main", "main")):
        pass
    with monkeypatch.context() as one:
        one.setattr(command, "ROOT", tmp_path)
        with pytest.raises(UsageError, match=r"git cannot read .* git: fatal: not a git repo"):
            commits("main", "side")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match=r"git cannot read .* git: .*No such file .*'git'"):
        commits("main", "side")


@pytest.mark.parametrize("end", [KeyboardInterrupt, SystemExit, UsageError])
def test_worktrees_go_however_the_block_ends(end: type[BaseException], repository: Path) -> None:
    hashes = commits("main", "side")
    tip = git(repository, "rev-parse", "side")
    assert hashes == (git(repository, "rev-parse", "side~1"), tip)
    assert commits("side", "side") == (tip, tip)
    stack = contextlib.ExitStack()
    pair = stack.enter_context(sides(*hashes, ("main", "side")))
    roots = [side.root for side in pair]
    for root, side, ref, sha in zip(roots, pair, ("main", "side"), hashes, strict=True):
        assert root.parents[1] == repository / "reports"  # which ranks on other nodes see
        assert (side.ref, side.sha) == (ref, sha)
        assert (root / "file0").exists()
        assert (root / "file2").exists() == (ref == "side")
        assert not (root / "file1").exists()
    (roots[1] / "file2").write_text("changed")
    with pytest.raises(end, match="the end"), stack:
        raise end("the end")
    assert not any(root.exists() for root in roots)
    assert len(git(repository, "worktree", "list").splitlines()) == 1


@pytest.mark.parametrize(("old", "new"), [("rich==1", "rich==2"), ("torch==2.0", "torch==3")])
def test_a_commit_with_other_packages_is_refused(old: str, new: str, repository: Path) -> None:
    """Only packages that the library computes with must be the same, not those of the harness."""
    lines = FILES["ci/constraints.txt"].replace(old, new)
    sha = commit(repository, new, **{"ci/constraints.txt": lines})
    git(repository, "checkout", "--quiet", f"{sha}~1")
    told = "new pins torch==3, but .* pins torch==2.0. Compare commits"
    refused = pytest.raises(UsageError, match=told)
    with (
        refused if "torch" in new else contextlib.nullcontext(),
        sides(sha, sha, ("new", "new")),
    ):
        pass
    assert len(git(repository, "worktree", "list").splitlines()) == 1


def test_the_harness_is_asked_for_cases_and_launches(tmp_path: Path, substitute: Any) -> None:
    """The output of a failed launch goes to a log file, which an interruption keeps."""
    made = Mock(side_effect=["it broke", KeyboardInterrupt])
    plan = {size: [SimpleNamespace(id="a"), SimpleNamespace(id="b")] for size in (1, 2)}
    substitute(command, listing=lambda setting, ranks, root: plan, run_launch=made)
    options = launching.parse("compare", "", command.OPTIONS, ["main", "--out", "a b"])
    bench, out = command.Bench(options), tmp_path / "records.jsonl"
    assert re.fullmatch(r"20\d{6}T\d{6}Z-\w{6}", bench.setting.run_id)
    side, pair = Side("head", tmp_path, "head", None), {"stage": "screen", "index": 3}
    assert bench.listed(side, [1, 2]) == {("a", 1), ("b", 1), ("a", 2), ("b", 2)}
    bench.launch(side, 2, ["b"], pair, out)
    with pytest.raises(KeyboardInterrupt):
        bench.launch(side, 1, ["a", "b"], pair, out)
    worker = ["env", KEEP_MEMORY, sys.executable, "-m", "mpi4py", "-m", "benchmarks.worker"]
    for number, (size, names) in enumerate([(2, "b"), (1, "ab")]):
        ranks, cases, setting, launch, root = made.mock_calls[number].args
        assert (ranks, [case.id for case in cases], root) == (size, [*names], tmp_path)
        assert (setting.pair, setting.launch, setting.out) == (pair, number, str(out))
        assert setting.commit["sha"] is None  # the side is no repository
        assert launch.command(ranks)[-7:] == worker
    assert [path.name for path in tmp_path.iterdir()] == ["records.log"]
    assert out.with_suffix(".log").read_text() == "head, P=2, screen pair 3\nit broke\n\n"


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ("main --ranks 0", "every number must be 1 or more"),
        ("main --ranks 1,1", "appear once"),
        ("main --cases typo", "no case has 'typo' in its name"),
        ("main --cases ring typo", "no case has 'typo' in its name"),
        ("main --out full", "is not empty"),
        ("main --launcher srun", "write {ranks} in it"),
        ("main --timeout 0", "pass more than 0"),
        ("HEAD", "the same commit twice"),
        ("side main~1", "the same commit twice"),  # main has the commit where they parted
    ],
)
def test_bad_options_are_refused(
    arguments: str,
    complaint: str,
    repository: Path,
    monkeypatch: pytest.MonkeyPatch,
    substitute: Any,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(repository.parent)
    (repository.parent / "full").mkdir()
    (repository.parent / "full" / "records.jsonl").write_text("old")
    plan = {ranks: [SimpleNamespace(id=RING)] for ranks in (1, 2)}
    substitute(command, listing=lambda setting, ranks, root: plan, REPORTS=repository.parent)
    assert command.main(arguments.split()) == 2
    assert complaint in capsys.readouterr().err
    assert (repository.parent / "full" / "records.jsonl").read_text() == "old"


@pytest.mark.parametrize(
    ("end", "code", "told"),
    [(KeyboardInterrupt(), 130, "interrupted"), (OSError(28, "the disk is full"), 3, "OSError")],
)
def test_an_early_end_keeps_the_records_and_is_no_regression(
    end: BaseException,
    code: int,
    told: str,
    tmp_path: Path,
    substitute: Any,
    capsys: pytest.CaptureFixture[str],
) -> None:
    machine = Machine()
    launches = Mock(wraps=machine.launch, side_effect=[*[DEFAULT] * 5, end])
    substitute(machine, launch=launches)
    substitute(
        command,
        Bench=lambda *_: machine,
        commits=lambda *refs: refs,
        sides=lambda *_: contextlib.nullcontext(pair_of_sides()),
    )
    assert command.main(["main", "--out", str(tmp_path)]) == code
    assert len((tmp_path / "records.jsonl").read_text().splitlines()) == 5 * len(CASES)
    assert not (tmp_path / "report.md").exists()
    assert told in capsys.readouterr().err
