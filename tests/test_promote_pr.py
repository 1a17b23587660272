"""Test the script that lets reviewed pull requests run on GPUs. A bare repository is the server."""

from pathlib import Path

import pytest
from kit.git import commit, git

from ci import promote_pr

NEW_BRANCH = "refs/heads/pull-request/7"


class Server:
    """A bare repository with pull request 7, and its clones of a stranger and of a maintainer."""

    def __init__(self, folder: Path) -> None:
        self.stranger, self.maintainer = folder / "stranger", folder / "maintainer"
        git(folder, "init", "--quiet", "--bare", "bare")
        git(folder, "clone", "--quiet", "bare", "stranger")
        files = {"sp_core/a.py": "1", "ci/constraints.txt": "torch==1"}
        commit(self.stranger, "Start", **files, **{".github/workflows/ci.yml": "on: push"})
        self.git("push", "--quiet", "origin", "main")
        git(folder, "clone", "--quiet", "bare", "maintainer")

    def git(self, *arguments: str) -> str:
        return git(self.stranger, *arguments)

    def propose(self, **files: str) -> str:
        """Push a new commit as the head of the pull request. Return its hash."""
        head = commit(self.stranger, "Change", **files)
        self.git("push", "--quiet", "--force", "origin", "HEAD:refs/pull/7/head")
        return head

    def promoted(self) -> str:
        return self.git("ls-remote", "origin", NEW_BRANCH).partition("\t")[0]


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Server:
    for name in ("GIT_CONFIG_GLOBAL", "GIT_CONFIG_SYSTEM"):
        monkeypatch.setenv(name, "/dev/null")
    server = Server(tmp_path)
    monkeypatch.chdir(server.maintainer)
    return server


def test_a_reviewed_commit_is_pushed(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    head = server.propose(**{"sp_core/a.py": "2"})
    before = git(server.maintainer, "for-each-ref", "refs/heads", "refs/tags")
    assert promote_pr.main(["7", head, "--dry-run"]) == 0
    assert f"would push {head} to pull-request/7 (a new branch)" in capsys.readouterr().out
    assert server.promoted() == ""
    assert promote_pr.main(["7", head]) == 0
    assert server.promoted() == head
    shown = capsys.readouterr().out
    assert 'changes 1 files against main:\n  "sp_core/a.py"\n' in shown
    assert f"pushed {head} to pull-request/7" in shown
    assert git(server.maintainer, "for-each-ref", "refs/heads", "refs/tags") == before
    assert git(server.maintainer, "status", "--porcelain") == ""


def test_a_second_promotion_replaces_the_first_also_after_a_rebase(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    for content in "23":
        server.git("reset", "--quiet", "--hard", "origin/main")
        head = server.propose(**{"sp_core/a.py": content})
        for told in ("pushed", "nothing to do"):
            assert promote_pr.main(["7", head]) == 0
            assert told in capsys.readouterr().out
        assert server.promoted() == head


GUARDED = [
    ".github/workflows/new.yml",
    ".github/zizmor.yml",
    ".ci/run",
    "ci/env.mpich",
    "ci/constraints.txt",
    "ci/slurm/deep/er.sh",
    "ci/\x1b[2J",
    "constraints-gpu.txt",
    "docs/requirements.txt",
    "uv.lock",
    ".gitmodules",
    "noxfile.py",
    "pyproject.toml",
    "setup.py",
    "pytest.ini",
    "pip.py",
    "tests/conftest.py",
    "tests/device/startup/sitecustomize.py",
    "sp_core/usercustomize.py",
]
FREE = ["ci_tools/a.py", "sp_core/ci/a.py", "sp_core/github.py", "tests/test_a.py", "README.md"]


def test_what_ci_runs_is_guarded_and_nothing_else() -> None:
    assert list(promote_pr.guarded([*GUARDED, *FREE])) == GUARDED


def test_changes_of_what_ci_runs_and_of_what_was_reviewed_are_refused(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    reviewed = server.propose(**{"ci/\x1b[2J": "evil"})
    head = server.propose(**{"sp_core/a.py": "2"})
    for arguments, told in (
        ([head], "changes how CI runs"),
        ([reviewed, "--allow-ci"], f"you reviewed {reviewed}, it is now {head}"),
    ):
        assert promote_pr.main(["7", *arguments]) == 1
        shown = capsys.readouterr()
        assert told in shown.err
        assert "\x1b" not in shown.err + shown.out
    assert server.promoted() == ""
    assert promote_pr.main(["7", head, "--allow-ci"]) == 0
    assert server.promoted() == head


@pytest.mark.parametrize(
    "disguise",
    [
        ["mv", "ci/constraints.txt", "sp_core/b.txt"],
        ["rm", ".github/workflows/ci.yml"],
        ["rm", "-r", "--quiet", "ci"],
    ],
)
def test_moving_deleting_and_linking_are_changes(
    server: Server, disguise: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The maintainer's git setting `diff.relative` hides none of these changes."""
    server.git(*disguise)
    if "-r" in disguise:
        server.propose()
        (server.stranger / "ci").symlink_to("sp_core")
    git(server.maintainer, "config", "diff.relative", "true")
    monkeypatch.chdir(server.maintainer / "sp_core")
    assert promote_pr.main(["7", server.propose()]) == 1


def test_what_main_changed_meanwhile_is_not_held_against_it(server: Server) -> None:
    server.propose(**{"sp_core/a.py": "2"})
    server.git("checkout", "--quiet", "main")
    server.git("reset", "--quiet", "--hard", "origin/main")
    commit(server.stranger, "Newer packages", **{"ci/constraints.txt": "torch==2"})
    server.git("push", "--quiet", "origin", "main")
    server.git("fetch", "--quiet", "origin", "refs/pull/7/head")
    server.git("checkout", "--quiet", "FETCH_HEAD")
    assert promote_pr.main(["7", server.git("rev-parse", "HEAD")]) == 0
    server.git("merge", "--quiet", "-m", "Merge", "origin/main")
    assert promote_pr.main(["7", server.propose(**{"sp_core/a.py": "3"})]) == 0


def test_somebody_else_who_pushes_at_the_same_time_is_not_overwritten(
    server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    head = server.propose(**{"sp_core/a.py": "2"})
    other = server.git("rev-parse", "origin/main")
    plain = vars(promote_pr)["say"]

    def interrupted(*arguments: str) -> str:
        if arguments[0] == "push":
            server.git("push", "--quiet", "origin", f"{other}:{NEW_BRANCH}")
        return str(plain(*arguments))

    monkeypatch.setattr(promote_pr, "say", interrupted)
    assert promote_pr.main(["7", head]) == 2
    assert "git push" in capsys.readouterr().err
    assert server.promoted() == other


def test_what_git_cannot_do_is_said(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    server.git("checkout", "--quiet", "--orphan", "fresh")
    head = server.propose(**{"sp_core/a.py": "2"})
    for arguments, told in (
        (["8", head], "refs/pull/8/head"),
        (["7", head, "--remote", "nowhere"], "nowhere"),
        (["7", head, "--base", "nowhere"], "nowhere"),
        (["7", head], "git merge-base"),
    ):
        assert promote_pr.main(arguments) == 2
        assert told in capsys.readouterr().err
    assert server.promoted() == ""


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["7", "0123456"], "no full commit"),
        (["7", "HEAD"], "no full commit"),
        (["7", "A" * 40], "no full commit"),
        (["0", "a" * 40], "no number of a pull request"),
        (["7/../main", "a" * 40], "no number of a pull request"),
        (["--dry-run"], "required"),
    ],
)
def test_bad_arguments_are_refused(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        promote_pr.main(arguments)
    assert complaint in capsys.readouterr().err
