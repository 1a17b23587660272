"""Test the small scripts behind the noxfile, and the CI workflows.

Workflows run nox sessions, and only some may write, publish or use a GPU. `nox -s workflows` has
zizmor check rights, triggers, pinned actions and injected expressions.
"""

import ast
import os
import re
import runpy
import shutil
import subprocess
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from studies.commands import ROOT, outside, printed

import sp_core
from ci import borrow_torch, measure_coverage, summary

PINS = "torch==2.13.0\nnumpy==2.4.6\nmpi4py==4.1.2\ntorchvision==1\n"


NEEDS = {"append_history": "msgspec", "wheels": "packaging"}
"""For each script that needs one, the package that is in its environment beside Python."""
BARE = """
import importlib, sys
class Bare:
    def find_spec(name, path, target=None):
        here = {*sys.stdlib_module_names, "ci", "benchmarks", *sys.argv[2:]}
        if name.partition(".")[0] not in here:
            raise ModuleNotFoundError(f"{name} is not installed")
sys.meta_path.insert(0, Bare)
importlib.import_module(sys.argv[1])
"""


@pytest.mark.parametrize("script", [path.stem for path in (ROOT / "ci").glob("*.py")])
def test_a_script_imports_only_what_its_environment_has(script: str) -> None:
    words = filter(None, (f"ci.{script}", NEEDS.get(script)))
    assert printed([sys.executable, "-c", BARE, *words], ROOT, outside(), 60) == (0, "")


def program(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make the site-packages of an environment without torch; pip only records its arguments."""
    folder = tmp_path / "site"
    folder.mkdir()
    (tmp_path / "pins.txt").write_text(PINS)
    pip = program(tmp_path / "python", f'echo "$@" >"{tmp_path}/pip"')
    monkeypatch.setattr("ci.borrow_torch.sysconfig.get_path", lambda _: str(folder))
    monkeypatch.setattr("ci.borrow_torch.sys.executable", pip)
    return folder


def borrow(site: Path, *interpreter: str) -> int:
    return borrow_torch.main([str(site.parent / "pins.txt"), *interpreter])


def test_torch_of_another_interpreter_can_be_imported_and_is_not_installed(
    site: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    python = str(Path(sys.prefix) / "bin" / "python3")
    assert borrow(site, python) == 0
    pins = Path(capsys.readouterr().out.splitlines()[-1])
    assert pins.read_text() == "mpi4py==4.1.2\ntorchvision==1\n"
    assert (site.parent / "pip").read_text() == "-m pip uninstall --quiet --yes torch numpy\n"
    look = f"import site; site.addsitedir({str(site)!r}); import numpy; import importlib.util"
    look += "; print(importlib.util.find_spec('torch').origin)"
    bare = subprocess.run(
        [python, "-I", "-S", "-c", look], capture_output=True, text=True, timeout=120, check=False
    )
    assert bare.stdout.strip().endswith("/torch/__init__.py"), bare.stderr


def test_what_was_borrowed_is_given_back(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (site / borrow_torch.LINK).write_text("/somewhere\n")
    for _ in range(2):
        assert borrow(site) == 0
        assert not (site / borrow_torch.LINK).exists()
        assert capsys.readouterr().out.strip() == str(site.parent / "pins.txt")


@pytest.mark.parametrize(
    ("answer", "complaint"),
    [
        (
            "echo no torch here >&2; exit 1",
            "has no torch and NumPy that can be imported (no torch here)",
        ),
        (
            "echo a greeting; echo '[[3, 7], [\"/somewhere\"]]'",
            "is Python 3.7, this environment Python 3.",
        ),
    ],
)
def test_an_interpreter_that_does_not_fit_is_refused(
    site: Path, answer: str, complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert borrow(site, program(site.parent / "other", answer)) == 1
    assert complaint in capsys.readouterr().err
    assert borrow(site, str(site / "absent")) == 1
    assert "absent cannot be run" in capsys.readouterr().err
    assert list(site.iterdir()) == []
    assert not (site.parent / "pip").exists()


@pytest.mark.parametrize("in_a_job", [True, False])
def test_a_report_is_added_to_the_summary_or_printed_on_a_desk(
    in_a_job: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    (tmp_path / "summary").write_text("before\n")
    (tmp_path / "report.md").write_bytes(b"# Times\n\xff\n")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary") if in_a_job else "")
    assert summary.main(str(tmp_path / "report.md")) == 0
    added, printed = ("# Times\n\ufffd\n", "") if in_a_job else ("", "# Times\n\ufffd\n\n")
    assert (tmp_path / "summary").read_text() == f"before\n{added}"
    assert capsys.readouterr().out == printed
    assert summary.main(str(tmp_path / "absent.md")) == 1
    assert "absent.md" in capsys.readouterr().err


@pytest.mark.parametrize("letter", ["a", "\u00e9"])
def test_a_long_report_is_cut_at_a_line_and_says_so(letter: str) -> None:
    text = "".join(f"{letter * 10}{number}\n" for number in range(100))
    short = summary.shortened(text, 400)
    assert len(short.encode()) <= 400
    kept, cut, rest = short.partition(summary.CUT)
    assert (cut, rest) == (summary.CUT, "")
    assert text.startswith(f"{kept}\n")
    assert len(kept) > 100
    assert summary.shortened(text, len(text.encode())) == text


def test_help_of_coverage_needs_no_coverage(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ci.measure_coverage.subprocess.run", None)
    assert measure_coverage.main(["--help"]) == 0
    assert "Arguments go to pytest" in capsys.readouterr().out


@pytest.mark.parametrize("red", [False, True])
def test_coverage_is_told_also_of_tests_that_are_red(
    red: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Mock(side_effect=lambda command, **_: Mock(returncode=int("pytest" in command and red)))
    monkeypatch.setattr("ci.measure_coverage.subprocess.run", run)
    assert measure_coverage.main(["tests/test_x.py"]) == int(red)
    steps = [call.args[0][1:] for call in run.mock_calls]
    told = [step[2] for step in steps if step[1] == "coverage"]
    assert told == ["erase", "run", "combine", "report", "xml"]
    assert [step[-1] for step in steps if "pytest" in step] == ["tests/test_x.py"] * 2


def noxfile(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> dict[str, Any]:
    """Return the names of the noxfile and its sessions, as `nox -- ARGUMENTS` reads them."""
    sessions = dict[str, Any]()

    def session(body: Any = None, *, name: str = "", **_: Any) -> Any:
        if body is None:
            return partial(session, name=name)
        return sessions.setdefault(name or body.__name__, body)

    nox = Mock(session=session, parametrize=lambda *_: lambda body: body)
    monkeypatch.setitem(sys.modules, "nox", nox)
    monkeypatch.setattr(sys, "argv", ["nox", "--", *arguments])
    names = runpy.run_path(str(ROOT / "noxfile.py"))
    return names | sessions


@pytest.mark.parametrize(("words", "steps"), [([], ""), (["doctor", "smoke"], "doctor smoke")])
def test_the_steps_of_the_gpu_session_are_one_argument(
    words: list[str], steps: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`ci/gpu.sh` takes its steps so, and makes all of them for an empty text."""
    names = noxfile(monkeypatch)
    names["gpu"].__globals__["_prepare"] = Mock(return_value=sys.executable)
    session = Mock(posargs=words)
    names["gpu"](session)
    assert session.run.call_args.args[2:] == (names["REPORTS"] / "gpu", steps)


@pytest.mark.parametrize("given", ["python3", "a folder/python3", "absent", ""])
def test_torch_is_borrowed_from_the_python_of_the_caller(
    given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A session's own programs come first on its PATH. SP_TORCH never names one of them."""
    ours, theirs = tmp_path / "tests-mpi-openmpi" / "bin", tmp_path / "a folder"
    for place in (ours / "python3", ours / "absent", theirs / "python3"):
        place.parent.mkdir(parents=True, exist_ok=True)
        program(place, "")
    names = noxfile(monkeypatch)
    monkeypatch.setenv("PATH", str(theirs))
    monkeypatch.setenv("SP_TORCH", str(tmp_path / given) if "/" in given else given)
    session = Mock(cache_dir=tmp_path / "cache", env={})
    names["_prepare"](session, "openmpi")
    assert session.env["PATH"] == f"{ours}{os.pathsep}{theirs}"
    calls = [call.args for call in session.run_install.mock_calls if call.args]
    (borrowed,) = (call[3:] for call in calls if "borrow_torch.py" in str(call[1]))
    found = [shutil.which(one, path=session.env["PATH"]) for one in borrowed]
    expected = str(theirs / "python3") if "python3" in given else None
    assert found == ([expected] if given else [])


@pytest.mark.parametrize(
    ("arguments", "runs"),
    [
        ("", 2),
        ("--out mine.json", 0),
        ("--resume --out=mine.json", 0),
        ("--out mine-{mpi}.json", 2),
        ("--mpi mpich --out mine.json", 1),
        ("--show mine.json", 1),
    ],
)
def test_no_record_of_an_mpi_replaces_that_of_another(
    arguments: str, runs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Programs of the benchmarks write one file. Others write a folder for both MPIs."""
    names = noxfile(monkeypatch, *arguments.split())
    names["_prepare"].__globals__["_prepare"] = Mock(return_value=sys.executable)
    several = {name: p for name, p in names["PROGRAMS"].items() if len(p.mpis) > 1}
    assert {"growth", "deaths"} <= {*several}
    for name, one in several.items():
        session = Mock(posargs=arguments.split(), error=Mock(side_effect=SystemExit))
        refused = runs == 0 and one.command.startswith("benchmarks ")
        with pytest.raises(SystemExit) if refused else nullcontext():
            names[name](session)
        assert session.run.call_count == (runs if runs or refused else 2), name


WORKFLOWS = {
    path.name: path.read_text() for path in sorted((ROOT / ".github" / "workflows").iterdir())
}
INSTALL = (
    "python3 -m venv .venv && .venv/bin/python -m pip install --quiet -c ci/constraints.txt nox"
)
NOX = re.compile(r"""\.venv/bin/nox -s (?:"(\w+)\([^"]*\)"|(\w+))( -- [^&|;<>`(]*)?""")
OURS = "sp-core/sp_core/.github/workflows/gpu-run.yml@main"
FORBIDDEN = ("issue_comment", "secrets.", "secrets:")


def sessions() -> set[str]:
    """Return the sessions of the noxfile: functions that nox runs, and the table of programs."""
    found = set()
    for node in ast.parse((ROOT / "noxfile.py").read_text()).body:
        if isinstance(node, ast.FunctionDef) and node.decorator_list:
            found.add(node.name)
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "PROGRAMS":
            assert isinstance(node.value, ast.Dict)
            found |= {ast.literal_eval(key) for key in node.value.keys if key}
    return found


def values(key: str, text: str) -> list[str]:
    """Return the values of a YAML key, anywhere in a text. A value of several lines is '|'."""
    return re.findall(rf"^ *(?:- )?{key}: (.*)$", text, re.MULTILINE)


def jobs(text: str) -> dict[str, str]:
    """Return the text of each job, by its name."""
    parts = re.split(r"^  (\w+):$", text.partition("\njobs:\n")[2], flags=re.MULTILINE)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


def called(text: str) -> list[str | None]:
    """Return the nox session of each command but INSTALL, None if it is no single call of nox."""
    commands = [command for command in values("run", text) if command != INSTALL]
    return [match and (match[1] or match[2]) for match in map(NOX.fullmatch, commands)]


def naming(part: str) -> list[str]:
    """Return the names of the workflows that contain a text."""
    return [name for name, text in WORKFLOWS.items() if part in text]


def triggers(text: str) -> list[str]:
    """Return the events that start a workflow."""
    section = text.partition("\non:\n")[2].partition("\n\n")[0]
    return re.findall(r"^  (\w+):", section, re.MULTILINE)


@pytest.mark.parametrize("name", WORKFLOWS)
def test_every_step_is_one_call_of_nox_for_a_session_that_exists(name: str) -> None:
    text = WORKFLOWS[name]
    assert {*called(text)} <= sessions()
    assert called(text) or name == "gpu.yml"
    assert [word for word in FORBIDDEN if word in text] == []
    for title, job in jobs(text).items():
        assert re.search(r"^    timeout-minutes: \d+$", job, re.MULTILINE) or OURS in job, title


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
    assert naming("github.token") == ["bench-history.yml"]


def test_no_push_to_main_takes_the_place_of_another() -> None:
    """The forge keeps one waiting run in a group, and cancels it if another one comes."""
    pushed = {name: text for name, text in WORKFLOWS.items() if "branches: [main" in text}
    pushed["gpu-run.yml"] = WORKFLOWS["gpu-run.yml"]  # gpu.yml calls it
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
    ready = "if: ${{ !cancelled() && github.ref == 'refs/heads/main' }}"
    assert f"    needs: record\n    {ready}\n" in append


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
    assert triggers(WORKFLOWS["gpu-run.yml"]) == ["workflow_call"]
    assert "pull_request" not in asks
    assert 'branches: [main, "pull-request/[0-9]+"]' in asks
    assert naming(OURS) == ["gpu.yml"]


def test_the_oldest_and_the_newest_python_are_tested() -> None:
    (oldest,) = re.findall(r'requires-python = ">=(.*)"', (ROOT / "pyproject.toml").read_text())
    (tested,) = re.findall(r"^ *python: \[(.*?)\]", WORKFLOWS["ci.yml"], re.MULTILINE)
    first, _ = tested.split(", ")
    assert first == f'"{oldest}"'
