"""Test `ci/append_history.py`, which writes the history of benchmark records to a branch.

A bare repository stands in for the server.
"""

import base64
import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from kit.git import git as run_git

from benchmarks import records
from ci import append_history
from ci.git import GitFailed, git
from tests.test_records import GOOD

COMMIT = "c" * 40


def record(**changes: Any) -> dict[str, Any]:
    commit = {**GOOD["commit"], "sha": COMMIT, **changes.pop("commit", {})}
    return {**GOOD, "pair": None, "commit": commit, **changes}


class Branch:
    """A bare repository as the server, a clone of it, and the history branch on the server."""

    def __init__(self, folder: Path) -> None:
        self.bare, self.clone, self.file = folder / "bare", folder / "clone", folder / "new.jsonl"
        run_git(folder, "init", "--quiet", "--bare", "bare")
        run_git(folder, "clone", "--quiet", "bare", "clone")

    def write(self, *made: dict[str, Any]) -> str:
        self.file.unlink(missing_ok=True)
        for one in made:
            records.append(self.file, one)
        return str(self.file)

    def append(self, *made: dict[str, Any]) -> int:
        """Run the program to append records of COMMIT; return its exit code."""
        return append_history.main([COMMIT, self.write(*made)])

    def lines(self, name: str = "2026-11.jsonl") -> list[dict[str, Any]]:
        shown = run_git(self.bare, "show", f"{append_history.BRANCH}:{name}")
        return [json.loads(line) for line in shown.splitlines()]


@pytest.fixture
def branch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Branch:
    for name in ("GIT_CONFIG_GLOBAL", "GIT_CONFIG_SYSTEM"):
        monkeypatch.setenv(name, "/dev/null")
    for name in ("GITHUB_TOKEN", "GITHUB_SERVER_URL"):
        monkeypatch.delenv(name, raising=False)
    branch = Branch(tmp_path)
    monkeypatch.chdir(branch.clone)
    return branch


def test_records_are_appended_once_and_in_order_to_a_file_a_month(
    branch: Branch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A job that appends the same records again does not add them twice."""
    first, second, later = record(), record(launch=1), record(run_id="20261130T000000Z-x")
    december = record(run_id="20261201T000000Z-x")
    assert append_history.main([COMMIT, branch.write(first, first), "--dry-run"]) == 0
    assert "would append 1 records" in capsys.readouterr().out
    assert run_git(branch.bare, "branch") == ""
    for made in ((first, first), (first,), (first, second), (later,), (december,)):
        assert branch.append(*made) == 0
        assert ("already" in capsys.readouterr().out) == (made == (first,))
    assert branch.lines() == [first, second, later]
    assert branch.lines("2026-12.jsonl") == [december]
    titles = run_git(branch.bare, "log", "--format=%s", append_history.BRANCH).splitlines()
    assert titles == [f"Records of {COMMIT}"] * 4
    assert list(branch.clone.iterdir()) == [branch.clone / ".git"]


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"commit": {"sha": "d" * 40}}, "measured at d"),
        ({"commit": {"sha": None}}, "measured at None"),
        ({"commit": {"dirty": True}}, "changes that are not in the commit"),
        ({"commit": {"dirty": None}}, "changes that are not in the commit"),
        ({"pair": GOOD["pair"]}, "half of a comparison"),
        ({"run_id": "..-evil"}, "does not begin with its time"),
        ({"run_id": "20261320T131500Z-1"}, "does not begin with its time"),
    ],
)
def test_records_of_something_else_are_left_out(
    branch: Branch, changes: dict[str, Any], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert branch.append(record(**changes)) == 1
    assert complaint in capsys.readouterr().err
    assert run_git(branch.bare, "branch") == ""
    path = branch.write(record(**changes), record())
    Path(path).write_bytes(b'{"schema": 1}\n' + Path(path).read_bytes())
    assert append_history.main([COMMIT, path, str(branch.clone / "absent.jsonl")]) == 1
    assert branch.lines() == [record()]
    said = capsys.readouterr().err
    assert [place in said for place in ("new.jsonl, line 1:", "absent.jsonl")] == [True, True]


def test_a_line_of_the_branch_that_is_no_record_is_kept_and_told(
    branch: Branch, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another version may have written it; its last line may have been cut off."""
    assert branch.append(record()) == 0
    foreign = [b'{"schema": 2}\n', b"\n", b'{"schema": 1, "run']
    with monkeypatch.context() as patched:
        patched.setattr(append_history, "added", lambda text, *_: (text + b"".join(foreign), 1))
        assert branch.append(record(launch=1)) == 0
    for launch in (1, 1, 2):
        assert branch.append(record(launch=launch)) == 0
    shown = run_git(branch.bare, "show", f"{append_history.BRANCH}:2026-11.jsonl").encode()
    lines = shown.splitlines()
    kept = [json.loads(line) for line in (lines[0], *lines[-2:])]
    assert kept == [record(launch=n) for n in range(3)]
    assert b"\n".join(lines[1:-2]) == b"".join(foreign)
    said = capsys.readouterr().err
    assert [said.count(f"2026-11.jsonl of the branch, line {n}: ") for n in (2, 3, 4)] == [3, 0, 3]


def test_a_writer_that_was_faster_is_not_overwritten(
    branch: Branch, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert branch.append(record()) == 0
    ours, pushes = branch.write(record(launch=1)), []

    def interrupted(*arguments: str, **options: Any) -> bytes:
        if arguments[0] == "push":
            pushes.append(arguments)
            if len(pushes) == 1:
                append_history.append(
                    [records.parse(json.dumps(record(launch=2)).encode())],
                    "Other",
                    "origin",
                    dry_run=False,
                )
        return git(*arguments, **options)

    monkeypatch.setattr(append_history, "git", interrupted)
    assert append_history.main([COMMIT, ours]) == 0
    assert [one["launch"] for one in branch.lines()] == [0, 2, 1]
    assert len(pushes) == 3


def test_a_server_that_refuses_is_an_error_and_not_an_endless_loop(
    branch: Branch, capsys: pytest.CaptureFixture[str]
) -> None:
    hook = branch.bare / "hooks" / "pre-receive"
    hook.parent.mkdir(exist_ok=True)
    hook.write_text("#!/bin/sh\necho no thanks >&2\nexit 1\n")
    hook.chmod(0o755)
    assert branch.append(record()) == 2
    assert "no thanks" in capsys.readouterr().err
    assert append_history.main([COMMIT, branch.write(record()), "--remote", "nowhere"]) == 2


def test_the_token_goes_to_its_server_alone_and_is_never_shown(
    branch: Branch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GITHUB_TOKEN", "s3cret")
    assert append_history.authorisation() == {}
    monkeypatch.setenv("GITHUB_SERVER_URL", "https://forge.example")
    ((name, value),) = access = append_history.authorisation().items()
    assert name == "http.https://forge.example/.extraheader"
    assert base64.b64decode(value.split()[-1]) == b"x-access-token:s3cret"
    ask = ("config", "--get-urlmatch", "http.extraheader")
    assert git(*ask, "https://forge.example/a", settings=dict(access)).decode().strip() == value
    for elsewhere in ((*ask, "https://other.example/a"), ("push", "nowhere")):
        with pytest.raises(GitFailed) as failed:
            git(*elsewhere, settings=dict(access))
        assert "s3cret" not in str(failed.value)
        assert value.split()[-1] not in str(failed.value)


def test_every_call_that_talks_to_the_server_shows_the_token(
    branch: Branch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GITHUB_TOKEN", "s3cret")
    monkeypatch.setenv("GITHUB_SERVER_URL", "https://forge.example")
    watched = Mock(side_effect=git)
    monkeypatch.setattr(append_history, "git", watched)
    for launch in (0, 1):
        assert branch.append(record(launch=launch)) == 0
    names = {"ls-remote", "fetch", "push"}
    made = [call for call in watched.mock_calls if call.args[0] in names]
    assert {call.args[0] for call in made} == names
    access = append_history.authorisation()
    assert all(call.kwargs["settings"] == access for call in made)
