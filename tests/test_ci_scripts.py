"""Test the small scripts behind the noxfile, and some of its sessions."""

import os
import re
import runpy
import shutil
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from studies.commands import ROOT, output_of, outside, printed, program

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
    look = (
        f"import site; site.addsitedir({str(site)!r}); import numpy; import importlib.util"
        "; print(importlib.util.find_spec('torch').origin)"
    )
    told = output_of([python, "-I", "-S", "-c", look], ROOT, os.environ, 120)
    assert told.endswith("/torch/__init__.py\n")


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
    """Return the names of the noxfile, as `nox -- ARGUMENTS` reads them, and its sessions.

    The sessions are there by their names, and all together as "sessions". They prepare no
    environment; "_prepare" itself would.
    """
    sessions = dict[str, Any]()

    def session(body: Any = None, *, name: str = "", **_: Any) -> Any:
        if body is None:
            return partial(session, name=name)
        return sessions.setdefault(name or body.__name__, body)

    nox = Mock(session=session, parametrize=lambda *_: lambda body: body)
    nox.command.CommandFailed = OSError
    monkeypatch.setitem(sys.modules, "nox", nox)
    monkeypatch.setattr(sys, "argv", ["nox", "--", *arguments])
    names = runpy.run_path(str(ROOT / "noxfile.py"))
    names["_prepare"].__globals__["_prepare"] = Mock(return_value=sys.executable)
    return names | sessions | {"sessions": sessions}


@pytest.mark.parametrize(("words", "steps"), [([], ""), (["doctor", "smoke"], "doctor smoke")])
def test_the_steps_of_the_gpu_session_are_one_argument(
    words: list[str], steps: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`ci/gpu.sh` takes its steps so, and makes all of them for an empty text."""
    names = noxfile(monkeypatch)
    session = Mock(posargs=words)
    names["gpu"](session)
    assert session.run.call_args.args[2:] == (names["REPORTS"] / "gpu", steps)
    assert session.run.call_args.kwargs["interrupt_timeout"] >= 60


@pytest.mark.parametrize(
    ("name", "given", "paths"),
    [
        ("tests openmpi", ["tests/test_mask.py::test_x"], ["tests/test_mask.py::test_x"] * 2),
        ("tests mpich", ["tests/test_mask.py::test_x"], ["tests/test_mask.py::test_x"] * 2),
        ("tests mpich", [], ["every_mpi"]),
        ("hf", ["tests/hf/test_trainer.py", "-x"], ["tests/hf/test_trainer.py"]),
        ("hf", ["-x"], ["tests/hf"]),
        ("pages", [], ["tests/pages"]),
        ("report", ["reports/a.jsonl"], ["benchmarks", "report", "reports/a.jsonl"]),
        ("torchrun 2", ["tests/test_mesh.py", "-x"], ["tests/test_mesh.py"]),
        ("explore", ["--mpi", "mpich"], ["tests", "tests"]),
    ],
)
def test_only_the_named_tests_run_and_ctrl_c_leaves_them_time_to_end(
    name: str, given: list[str], paths: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nox kills a program half a second after Ctrl-C if it is not told otherwise."""
    names = noxfile(monkeypatch)
    session = Mock(posargs=given, env={})
    name, *mpi = name.split()
    names[name](session, *mpi)
    words = [str(word) for call in session.run.mock_calls for word in call.args]
    assert [word for word in words if re.match("tests|benchmarks|report|every", word)] == paths
    assert all(call.kwargs["interrupt_timeout"] >= 60 for call in session.run.mock_calls)


def test_explore_draws_the_domains_with_the_same_mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    names, session = noxfile(monkeypatch), Mock(posargs=["--mpi", "mpich"], env={})
    names["explore"](session)
    (_, given), _ = session.notify.call_args
    assert given[2:] == ["--mpi", "mpich"]


def test_a_merged_junit_file_has_no_results_of_earlier_sessions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names, session = noxfile(monkeypatch), Mock()
    names["junit"].__globals__["REPORTS"] = tmp_path
    (part := tmp_path / "mpich-ranks.xml").touch()
    names["junit"](session)
    assert session.run.call_args.args[-2:] == (str(part), str(tmp_path / "junit.xml"))
    assert not part.exists()


def test_options_alone_leave_torchrun_its_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without files pytest would collect tests that import mpi4py, which is not there."""
    names, session = noxfile(monkeypatch), Mock(posargs=["-k", "x"])
    names["torchrun"](session, 2)
    assert {"-k", "x", "tests/test_mesh.py"} <= {*session.run.call_args.args}


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
    ("programs", "is_made"),
    [
        ("python{0} pip{0}", False),
        ("", True),
        ("python{0}", True),
        ("pip{0}", True),
        ("python3.0 pip3.0", True),
    ],
    ids=["whole", "absent", "without pip", "Python was removed", "another Python"],
)
def test_an_environment_that_does_not_fit_is_made_anew(
    programs: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_made: bool
) -> None:
    home = tmp_path / "tests-mpi-openmpi"
    (home / "bin").mkdir(parents=True)
    for name in programs.format(f"3.{sys.version_info.minor}").split():
        (home / "bin" / name).touch()
    session = Mock(cache_dir=tmp_path / "cache", env={})
    noxfile(monkeypatch)["_prepare"](session, "openmpi")
    made = [call.args[1:] for call in session.run_install.mock_calls if "venv" in call.args]
    assert made == ([("-m", "venv", "--clear", str(home))] if is_made else [])


@pytest.mark.parametrize(
    ("arguments", "runs"),
    [
        ("", 2),
        ("--out mine.json", 0),
        ("--resume --out=mine.json", 0),
        ("--out mine-{mpi}.json", 2),
        ("--mpi mpich --out mine.json", 1),
        ("--show mine.json", 1),
        ("--show=mine.json", 1),
    ],
)
def test_no_record_of_an_mpi_replaces_that_of_another(
    arguments: str, runs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Programs of the benchmarks write one file. Others write a folder for both MPIs."""
    names = noxfile(monkeypatch, *arguments.split())
    several = {name: p for name, p in names["PROGRAMS"].items() if len(p.mpis) > 1}
    assert {"growth", "deaths"} <= {*several}
    for name, one in several.items():
        session = Mock(posargs=arguments.split(), error=Mock(side_effect=SystemExit))
        refused = runs == 0 and one.command.startswith("benchmarks ")
        with pytest.raises(SystemExit) if refused else nullcontext():
            names[name](session)
        assert session.run.call_count == (runs if runs or refused else 2), name


def test_a_failure_with_one_mpi_leaves_the_other_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    names, run = noxfile(monkeypatch), Mock(side_effect=[OSError("exit code 1"), None])
    with pytest.raises(OSError, match="exit code 1"):
        names["growth"](Mock(posargs=[], run=run))
    assert run.call_count == 2
