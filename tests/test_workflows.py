"""Test the CI workflows: they run nox sessions, and only some may write, publish or use a GPU.

`nox -s workflows` has zizmor check rights, triggers, pinned actions and injected expressions.
"""

import inspect
import re
import tomllib
from unittest.mock import Mock

import pytest
import torch
from studies.commands import ROOT
from test_ci_scripts import noxfile

import sp_core

WORKFLOWS = {
    path.name: path.read_text() for path in sorted((ROOT / ".github" / "workflows").iterdir())
}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
LOWEST = [need.replace(">=", "==") for need in PROJECT["project"]["dependencies"][:2]]
BEFORE = (
    "python3 -m venv .venv && .venv/bin/python -m pip install --quiet -c ci/constraints.txt nox",
    "sudo sysctl -w kernel.apparmor_restrict_unprivileged_userns=0",
    f"python3 -m venv .venv/low && .venv/low/bin/python -m pip install --quiet {' '.join(LOWEST)}",
)
"""Commands that prepare a job."""
APART = {"tests", "mutants", "generic_mutants"}
"""Sessions that start commands in namespaces of their own: without the right, tests are skipped."""
NOX = re.compile(r"""\.venv/bin/nox -s (?:"(\w+)\([^"]*\)"|(\w+))( -- [^&|;<>`(]*)?""")
OURS = "sp-core/sp_core/.github/workflows/gpu-run.yml@main"
OF_MAIN = "github.repository == 'sp-core/sp_core' && github.ref == 'refs/heads/main'"
FORBIDDEN = ("issue_comment", "secrets.", "secrets:")


def values(key: str, text: str) -> list[str]:
    """Return the values of a YAML key, anywhere in a text. A value of several lines is '|'."""
    return re.findall(rf"^ *(?:- )?{key}: (.*)$", text, re.MULTILINE)


def jobs(text: str) -> dict[str, str]:
    """Return the text of each job, by its name."""
    parts = re.split(r"^  (\w+):$", text.partition("\njobs:\n")[2], flags=re.MULTILINE)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


def called(text: str) -> list[str | None]:
    """Return the nox session of each command but BEFORE, None if it is no single call of nox."""
    commands = [command for command in values("run", text) if command not in BEFORE]
    return [match and (match[1] or match[2]) for match in map(NOX.fullmatch, commands)]


def naming(part: str) -> list[str]:
    """Return the names of the workflows that contain a text."""
    return [name for name, text in WORKFLOWS.items() if part in text]


def triggers(text: str) -> list[str]:
    """Return the events that start a workflow."""
    section = text.partition("\non:\n")[2].partition("\n\n")[0]
    return re.findall(r"^  (\w+):", section, re.MULTILINE)


@pytest.mark.parametrize("name", WORKFLOWS)
def test_every_step_is_one_call_of_nox_for_a_session_that_exists(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = WORKFLOWS[name]
    assert {*called(text)} <= noxfile(monkeypatch)["sessions"].keys()
    assert called(text) or name == "gpu.yml"
    assert [word for word in FORBIDDEN if word in text] == []
    for title, job in jobs(text).items():
        assert re.search(r"^    timeout-minutes: \d+$", job, re.MULTILINE) or OURS in job, title
        assert (BEFORE[1] in values("run", job)) == bool(APART & {*called(job)}), title


def test_the_guide_for_contributors_lists_what_runs_every_night() -> None:
    guide = (ROOT / ".github" / "CONTRIBUTING.md").read_text()
    (row,) = re.findall(r"^\| `nightly.yml` .*\| (.*) \|$", guide, re.MULTILINE)
    assert re.findall(r"`(\w+)`", row) == called(WORKFLOWS["nightly.yml"])


@pytest.mark.parametrize("more", ["", " && make", " -- a; b", " -- `a`", " -- $(a)"])
def test_something_else_is_no_call_of_nox(more: str) -> None:
    assert called(f"run: .venv/bin/nox -s lint{more}") == [None if more else "lint"]


def test_only_the_writer_of_the_history_may_write_and_it_measures_nothing() -> None:
    writers = {
        (name, title): job
        for name, text in WORKFLOWS.items()
        for title, job in jobs(text).items()
        if ": write" in job
    }
    assert list(writers) == [("bench-history.yml", "append"), ("release.yml", "publish")]
    job = writers["bench-history.yml", "append"]
    assert called(job) == ["append_history"]
    assert "pull_request" not in WORKFLOWS["bench-history.yml"]
    assert all(OF_MAIN in part for part in jobs(WORKFLOWS["bench-history.yml"]).values())
    assert naming("github.token") == ["bench-history.yml"]


def test_no_push_to_main_takes_the_place_of_another() -> None:
    """The forge keeps one waiting run in a group, and cancels it if another one comes."""
    pushed = {
        name: text
        for name, text in WORKFLOWS.items()
        if "branches: [main" in text or name == "gpu-run.yml"  # gpu.yml calls it
    }
    assert set(pushed) == {"bench-history.yml", "ci.yml", "gpu.yml", "gpu-run.yml"}
    for name, text in pushed.items():
        (group,) = (one for one in values("group", text) if one != "gpu")
        assert "github.sha }}" in group, name


def test_a_pull_request_is_compared_with_the_commit_that_it_was_merged_onto() -> None:
    """The base that the event names may be older: its commits since would be judged, too."""
    compare = jobs(WORKFLOWS["ci.yml"])["compare"]
    assert "github.event.pull_request.base" not in compare
    assert '-s compare -- "HEAD^1" --out' in compare
    assert "          fetch-depth: 0\n" in compare
    assert values("ref", compare) == []  # HEAD is the merge


def test_a_case_that_failed_costs_no_other_record_of_its_commit() -> None:
    record, append = jobs(WORKFLOWS["bench-history.yml"]).values()
    assert re.search(r"if: \${{ !cancelled\(\) }}.*\n *uses: actions/upload-artifact@", record)
    ready = f"if: ${{{{ !cancelled() && {OF_MAIN} }}}}"
    assert f"    needs: record\n    {ready}\n" in append


@pytest.mark.parametrize("name", ["ci.yml", "gpu-run.yml"])
def test_a_comparison_that_takes_too_long_leaves_its_job_time_to_keep_the_records(
    name: str,
) -> None:
    """A job that reaches its own limit is cancelled, and a cancelled job uploads nothing."""
    (job,) = (job for job in jobs(WORKFLOWS[name]).values() if "compare" in called(job))
    begin, _, rest = job.partition("-s compare")
    limit, after = int(values("timeout-minutes", begin)[0]), r".*\n        timeout-minutes: (\d+)\n"
    assert (own := re.match(after, rest))
    assert int(own[1]) < limit
    assert "actions/upload-artifact@" in rest
    assert "actions/upload-artifact@" in begin or name == "ci.yml"


def test_only_a_tag_that_was_tested_and_approved_is_published() -> None:
    text = WORKFLOWS["release.yml"]
    publish = jobs(text)["publish"]
    assert triggers(text) == ["push"]
    assert '    tags: ["v*"]\n' in text
    assert '-s package -- "$GITHUB_REF_NAME"\n' in jobs(text)["build"]
    assert re.findall(r": write", publish) == [": write"]
    assert "id-token: write" in publish
    assert "\n    needs: build\n" in publish
    assert "\n    environment: pypi" in publish
    assert values("run", publish) == []
    assert "checkout" not in "".join(values("uses", publish))


@pytest.mark.parametrize("tag", ["v9.9", sp_core.__version__, f"v{sp_core.__version__}0"])
def test_a_tag_of_another_version_is_not_built(tag: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`nox -s package -- TAG` refuses it before it does anything."""
    package = noxfile(monkeypatch)["package"]
    session = Mock(posargs=[tag], error=Mock(side_effect=SystemExit))
    session.create_tmp = Mock(side_effect=EOFError)  # what the session does first
    with pytest.raises(SystemExit):
        package(session)
    (told,) = session.error.call_args.args
    assert f"['{tag}'] " in told
    assert f"v{sp_core.__version__}" in told
    session.posargs = [f"v{sp_core.__version__}"]
    with pytest.raises(EOFError):
        package(session)


def test_gpu_runners_serve_no_pull_request_by_itself() -> None:
    assert naming("group: gpu\n") == ["gpu-run.yml"]
    asks = WORKFLOWS["gpu.yml"].partition("\njobs:")[0]
    assert "SP_VENV: ${{ runner.temp }}/" in WORKFLOWS["gpu-run.yml"]  # of this job alone
    assert triggers(WORKFLOWS["gpu-run.yml"]) == ["workflow_call"]
    assert "pull_request" not in asks
    assert 'branches: [main, "pull-request/[0-9]+"]' in asks
    assert naming(OURS) == ["gpu.yml"]


def test_the_oldest_and_the_newest_python_are_tested() -> None:
    oldest = PROJECT["project"]["requires-python"].removeprefix(">=")
    (tested,) = re.findall(r"^ *python: \[(.*?)\]", WORKFLOWS["ci.yml"], re.MULTILINE)
    first, _ = tested.split(", ")
    assert first == f'"{oldest}"'


def test_the_lowest_torch_and_numpy_are_tested_every_night() -> None:
    job = jobs(WORKFLOWS["nightly.yml"])["lowest"]
    assert [need.partition("==")[0] for need in LOWEST] == ["torch", "numpy"]
    assert BEFORE[2] in values("run", job)
    assert values("SP_TORCH", job) == [".venv/low/bin/python"]


def test_warnings_of_torch_under_every_python_are_no_errors() -> None:
    """Some of its functions use `torch.jit.script`, whose text depends on Python's version."""
    options = PROJECT["tool"]["pytest"]["ini_options"]
    (known,) = (one.split(":")[1] for one in options["filterwarnings"] if "jit" in one)
    warned = re.findall(r'"(`torch.jit.script` is .*)"', inspect.getsource(torch.jit.script))
    assert warned
    assert [text for text in warned if not re.match(known, text)] == []
