"""Test the command of a launch without a launch: its programs, arguments and signals."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from studies.commands import ROOT, outside, printed

from sp_core.launch import command as command_module, signals, terminal, watch as watch_module
from sp_core.launch.bounded import LAUNCH_PROBLEMS
from sp_core.launch.command import AS_ROOT, ENVIRONMENT, SESSION_DIR, SESSION_DIR_HERE, environment
from sp_core.transport.groups import GroupComm

POLICY = "PRTE_MCA_rmaps_default_mapping_policy"
OLD_POLICY = "OMPI_MCA_rmaps_base_oversubscribe"
OLD_BINDING = "OMPI_MCA_hwloc_base_binding_policy"
"""Open MPI 4 reads only this variable, and Open MPI 5 only the other."""


@pytest.mark.parametrize(
    ("given", "home", "expected"),
    [
        ({}, "~", {SESSION_DIR_HERE: "/run", SESSION_DIR: None, "HOME": "/run"}),
        ({}, "/home/of-the-user", {"HOME": "/home/of-the-user"}),
        ({"HOME": "/given"}, "/home/of-the-user", {"HOME": "/given"}),
        ({SESSION_DIR_HERE: "/here"}, "~", {SESSION_DIR_HERE: "/here", SESSION_DIR: None}),
        ({SESSION_DIR: "/there"}, "~", {SESSION_DIR_HERE: None, SESSION_DIR: "/there"}),
    ],
)
def test_a_launch_has_folders_of_its_own_unless_they_are_named(
    given: dict[str, str],
    home: str,
    expected: dict[str, str | None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Open MPI does not start without a home folder. "~": the system knows none."""
    monkeypatch.setattr(os, "environ", given)
    monkeypatch.setattr(os.path, "expanduser", lambda _: home)
    found = environment(Path("/run"))
    assert {name: found.get(name) for name in expected} == expected


def test_mpiexec_is_the_one_beside_python_else_that_on_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beside, on_path = tmp_path / "mpiexec", tmp_path / "path" / "mpiexec"
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(on_path.parent))
    with pytest.raises(FileNotFoundError, match="Install one of the wheels"):
        command_module.find_mpiexec()
    on_path.parent.mkdir()
    for mpiexec in (on_path, beside):
        mpiexec.touch(mode=0o700)
        assert command_module.find_mpiexec() == str(mpiexec)


@pytest.mark.parametrize("name", ["mpiexec (Open MPI) 5.0", "HYDRA build details:"])
def test_only_mpiexec_of_open_mpi_is_told_to_pass_on_parts_of_lines(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mpiexec = tmp_path / "mpiexec"
    mpiexec.touch(mode=0o700)
    mpiexec.write_text(f"#!/bin/sh\necho '{name}'\necho \"$@\" >&2\n")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert command_module.mpiexec_version() == f"{name}\n--version\n"
    expected = ["--stream-buffering", "0"] if "Open MPI" in name else []
    assert command_module.streaming() == expected


LETTERS = "-bBdEiIOPqRsSuv"
"""All options of one letter with which Python runs a program, but -x: it skips a line of it."""


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("hostname -s", "hostname -s"),
        ("python -V", "PYTHON -V"),
        ("python a.py -m b", "PYTHON WATCH a.py -m b"),
        *(
            (f"/opt/python3.11 {flags} -m a -c", f"/opt/python3.11 {flags} WATCH -m a -c")
            for flags in ("-u -X dev -W error", "-uX dev", "-Werror -i", "-iuXdev -Wm", LETTERS)
        ),
        ("python -Werror a.py b", "PYTHON -Werror WATCH a.py b"),
        ("python3 -c pass", "PYTHON WATCH -c pass"),
        ("python3.14t -c pass", "python3.14t WATCH -c pass"),
        ("python -cpass -um", "PYTHON WATCH -c pass -um"),
        ("python -um a -um", "PYTHON -u WATCH -m a -um"),
        ("python -uma -W", "PYTHON -u WATCH -m a -W"),
        ("python -u -W", "PYTHON -u -W"),
        ("python -m", "PYTHON -m"),
        ("python -c", "PYTHON -c"),
        ("python --help", "PYTHON --help"),
        ("pythonic -c pass", "pythonic -c pass"),
        ("python -", "PYTHON -"),
        ("python -u", "PYTHON -u"),
        ("python -x a.py", "PYTHON -x a.py"),
    ],
)
def test_python_programs_are_watched(command: str, expected: str) -> None:
    names = {"PYTHON": sys.executable, "WATCH": watch_module.__file__}
    words = [names.get(word, word) for word in expected.split()]
    assert command_module.watched(command.split()) == words


@pytest.mark.parametrize(
    ("first", "expected"),
    [
        ("#!/usr/bin/env python", "PYTHON WATCH SCRIPT -c"),
        ("#!/usr/bin/env -S /opt/python3.11 -u", "/opt/python3.11 -u WATCH SCRIPT -c"),
        ("#!/opt/bin/python3", "/opt/bin/python3 WATCH SCRIPT -c"),
        ("#!/opt/python3.14t", "/opt/python3.14t WATCH SCRIPT -c"),
        ("#!/bin/sh", "NAME -c"),
        ("python", "NAME -c"),
        ("#!/opt/pythonic", "NAME -c"),
        ("#!", "NAME -c"),
        ("\udcff", "NAME -c"),
    ],
)
def test_scripts_that_name_python_are_watched(
    first: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "a-tool"
    script.write_bytes(os.fsencode(first) + b"\nprint()\n")
    assert command_module.watched([str(script)]) == [str(script)]  # it cannot be run
    script.chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path))
    names = {"PYTHON": sys.executable, "WATCH": watch_module.__file__, "NAME": "a-tool"}
    words = [(names | {"SCRIPT": str(script)}).get(word, word) for word in expected.split()]
    assert command_module.watched(["a-tool", "-c"]) == words


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["-n", "0"], "0 ranks and a time limit of 86400 s were given"),
        (["-n", "2", "layout.py"], "'layout.py' is no program. Write -- python layout.py"),
        (["-n", "2", "--timeout", "nan"], "2 ranks and a time limit of nan s were given"),
        (["-n", "2", "--timeout", "0"], "Both must be above 0"),
        (["-n", "2", "--mpi-args", '"open'], "--mpi-args"),
        (["-n", "2"], "no mpiexec beside this Python"),
    ],
)
def test_a_launch_that_cannot_be_is_refused(
    arguments: list[str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(SystemExit) as end:
        command_module.main([*arguments, "--", "true"])
    assert end.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    "begin",
    [
        lambda: command_module.Launch(1, ["true"], [], Path("/nowhere")),
        lambda: GroupComm(None, "of torchrun", 0, 1, timedelta(seconds=1)),
    ],
)
def test_other_systems_are_refused(
    begin: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They lack the calls by which a launch, and a rank of torchrun, see that a rank has died."""
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(OSError, match="sp_core needs Linux, and this system is darwin"):
        begin()


@pytest.mark.mpi_skip
@pytest.mark.every_mpi
@pytest.mark.starts_mpi
def test_ranks_get_every_argument_as_it_is(capfd: pytest.CaptureFixture[str]) -> None:
    """A lone ":" separates the programs of mpiexec."""
    words = [":", "a b", "", "'\"$x", "--", "-n", "\\", "*", ":"]
    says = "import sys; print(sys.argv[2:] == eval(sys.argv[1]))"
    for given in (words, words[1:-1]):
        program = ["python", "-c", says, repr(given), *given]
        assert command_module.run(2, program, timeout=60) == 0
        assert capfd.readouterr().out.count("True") == 2


@pytest.mark.parametrize("ending", ["TERM", "HUP", "QUIT", "USR1", "USR2", "XCPU"])
@pytest.mark.parametrize("handler", [signal.SIG_DFL, signal.SIG_IGN, lambda *_: None])
def test_a_signal_to_the_launcher_ends_the_launch_unless_it_is_ignored_or_handled(
    ending: str, handler: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    number, is_default = signal.Signals[f"SIG{ending}"], handler is signal.SIG_DFL
    launch = Mock(run_dir=tmp_path, report=str)
    launch.ended.return_value = None

    def trouble(seconds: float) -> str:
        os.kill(os.getpid(), number)
        return "its time is up"

    launch.trouble = trouble
    monkeypatch.setattr(command_module, "Launch", Mock(return_value=launch))
    with signals.handled([number], handler):
        with pytest.raises(SystemExit, match=str(128 + number)) if is_default else nullcontext():
            command_module.run(1, ["true"], timeout=1)
        assert signal.getsignal(number) is handler
    launch.end.assert_called_once_with()


@pytest.mark.parametrize(
    ("arguments", "more"),
    [
        ([], {}),
        (["--timeout", "2.5"], {"timeout": 2.5}),
        (["--mpi-args", "--map-by 'a b'"], {"mpi_args": ["--map-by", "a b"]}),
        (["--mpi-args=--oversubscribe"], {"mpi_args": ["--oversubscribe"]}),
    ],
)
@pytest.mark.parametrize("dashes", [["--"], []])
def test_the_words_of_the_command_reach_the_launch(
    dashes: list[str], arguments: list[str], more: dict[str, Any], substitute: Any
) -> None:
    """Options behind the command are the command's, also without "--"."""
    run = Mock(side_effect=[7, KeyboardInterrupt])
    substitute(command_module, run=run, typed=lambda: 5)
    command = ["tool", "-n", "4", "--timeout", "9", "--"]
    assert command_module.main(["-n", "3", *arguments, *dashes, *command]) == 7
    usual = {"timeout": 86400.0, "mpi_args": [], "source": 5}
    run.assert_called_once_with(3, command, **(usual | more))
    assert command_module.main(["-n", "3", "--", "tool"]) == 128 + signal.SIGINT


def test_what_is_typed_is_read_in_the_foreground_until_its_end(substitute: Any) -> None:
    """In the background the system would stop this process. The terminal may have no owner."""
    calls, (reading, writing) = Mock(), os.pipe()
    calls.tcgetpgrp.side_effect = [7, 5, OSError, 5]
    calls.read.side_effect = [b"a", b"b", b""]
    system = {"getpgrp": lambda: 5, "tcgetpgrp": calls.tcgetpgrp, "read": calls.read}
    substitute(terminal, time=calls, select=Mock(), os=Mock(fdopen=os.fdopen, **system))
    terminal._copy(writing)
    with os.fdopen(reading) as pipe:
        assert pipe.read() == "ab"
    done = [name for name, *_ in calls.mock_calls]
    assert done == ["tcgetpgrp", "sleep", *["tcgetpgrp", "read"] * 3]


@pytest.mark.parametrize("user", [0, 1000])
def test_variables_that_are_set_stay_and_the_others_have_defaults(
    user: int, substitute: Any
) -> None:
    given = {"HOME": "/home", "OMP_NUM_THREADS": "7", "SP_RUN_DIR": "/other", "X": "y"}
    substitute(os, geteuid=lambda: user, environ={**given})
    defaults = command_module.ENVIRONMENT | {SESSION_DIR_HERE: "/run"}
    as_root = {} if user else command_module.AS_ROOT
    passed = {"SP_RUN_DIR": "/run", "SP_RUN_HOST": watch_module.this_host()}
    remote = {"OMPI_MCA_mca_base_env_list": "SP_RUN_DIR;SP_RUN_HOST"}
    assert environment(Path("/run")) == defaults | as_root | given | passed | remote


@pytest.mark.parametrize("given", [{}, {"OMPI_MCA_mca_base_env_list": "MINE"}])
def test_ranks_get_variables_by_options_if_other_variables_are_given_so(
    given: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Open MPI 4 does not start with both such an option and a list of variables.

    mpiexec leads a session of its own.
    """
    monkeypatch.setattr(os, "environ", {**given})
    monkeypatch.setattr(command_module, "find_mpiexec", lambda: "mpiexec")
    monkeypatch.setattr(subprocess, "Popen", started := Mock())
    files: Any = {"output": 7, "source": 5}
    launch = command_module.Launch(3, ["tool", "-n"], ["-x", "A=1"], tmp_path, **files)
    launch.deaths.close()
    passed = [] if given else ["-x", "SP_RUN_DIR", "-x", "SP_RUN_HOST"]
    (command,), how = started.call_args
    assert command == ["mpiexec", "-x", "A=1", *passed, "-n", "3", "tool", "-n"]
    env = how.pop("env")
    found = {name: env[name] for name in env if name.endswith(("env_list", "RUN_DIR"))}
    assert found == {**given, "SP_RUN_DIR": str(tmp_path)}
    assert how == {"start_new_session": True, "stdin": 5, "stdout": 7, "stderr": 7}


def test_all_places_give_the_same_defaults_for_open_mpi() -> None:
    """They stand in the launcher, in ci/env.openmpi and in the remedy of the doctor.

    The launcher also has the names by which Open MPI 4 reads them.
    """
    lines = (ROOT / "ci" / "env.openmpi").read_text().splitlines()
    given = dict(line.split("=", 1) for line in lines if not line.startswith("#"))
    defaults = ENVIRONMENT | AS_ROOT
    assert {**defaults, **given} == {**given, **defaults}
    assert defaults.keys() ^ given.keys() == {
        *("OMPI_MCA_osc", "RES_OPTIONS"),  # only CI sets these, only the launcher the others
        *(OLD_POLICY, OLD_BINDING),
        *("HYDRA_LAUNCHER", "MPIR_CVAR_POLLS_BEFORE_YIELD", "PYTHONUNBUFFERED"),
    }
    assert defaults["OMP_NUM_THREADS"] == "1"
    allow = f"{POLICY}={given[POLICY]} {OLD_POLICY}={ENVIRONMENT[OLD_POLICY]}"
    assert f"export {allow}" == LAUNCH_PROBLEMS["not enough slots"][1]
    assert ENVIRONMENT[OLD_BINDING] == "none"


@pytest.mark.mpi_skip
def test_a_node_gets_as_many_ranks_as_it_has_slots_and_more_only_if_all_are_full() -> None:
    """Open MPI prints where it would start the ranks; nothing is started."""
    if not command_module.streaming():
        pytest.skip("only Open MPI reads these variables")
    for ranks, wanted in ((4, [2, 2]), (6, [3, 3])):
        words = ["--host", "a:2,b:2", "--display", "map", "--do-not-launch", "-n", str(ranks)]
        command = [command_module.find_mpiexec(), *words, "hostname"]
        code, text = printed(command, ROOT, {**outside(), **ENVIRONMENT, **AS_ROOT}, 60)
        assert [int(n) for n in re.findall(r"Num procs: (\d+)", text)] == wanted, (code, text)
