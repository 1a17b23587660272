#!/usr/bin/env bash
# Submit one job on 1 node with 4 GPUs: the scaling experiment (P = 1, 2, 4), or any sessions of nox.
#
#   ci/slurm/submit.sh [scaling] [SBATCH OPTION...] [-- EXPERIMENT OPTION...]
#   ci/slurm/submit.sh nox [SBATCH OPTION...] -- NOX OPTION...
#   ci/slurm/submit.sh --partition=gpu --account=me -- --preset paper
#   ci/slurm/submit.sh nox --partition=gpu -- -s compare -- main --device cuda --ranks 1,2,4
#
# scaling: SP_VENV=DIR uses that environment instead of making one in the job; SP_LAUNCHER=COMMAND replaces srun (see scaling.sbatch).
#          Results are in reports/scaling/JOB; every task of an array has a JOB of its own.
# nox: SP_TORCH=PYTHON names the interpreter whose torch is used (see nox.sbatch).
set -euo pipefail

job=scaling
case "${1:-}" in
    -h | --help)
        sed -n '2,11s/^# \{0,1\}//p' "$0"
        exit 0
        ;;
    scaling | nox)
        job=$1
        shift
        ;;
esac
if ! command -v sbatch >/dev/null; then
    echo "submit.sh: no sbatch on the PATH. Run this on a login node of a Slurm cluster; elsewhere: nox -s scaling" >&2
    exit 1
fi

root=$(cd "$(dirname "$0")/../.." && pwd)
logs=$root/reports/slurm
mkdir -p "$logs"

options=()
log=$logs/$job-%j.log
given=
while [[ $# -gt 0 && $1 != -- ]]; do
    case $1 in
        --array* | -a*) log=$logs/$job-%A_%a.log ;; # %j of a task is not the number that sbatch tells
        --output=*) given=${1#*=} ;;
        --output | -o) given=${2-} ;;
        -o*) given=${1#-o} ;;
    esac
    options+=("$1")
    shift
done
[[ $# -eq 0 ]] || shift

answer=$(sbatch --parsable --chdir="$root" --output="$log" "${options[@]}" "$root/ci/slurm/$job.sbatch" "$@")
number=${answer%%;*} # sbatch adds ";cluster" where there are several
[[ -n $number ]] || exit 0 # --test-only submits nothing
log=${given:-$log}
[[ $log == /* ]] || log=$root/$log
log=${log//%[jA]/$number}
log=${log//%a/\*}
echo "job:    $number"
echo "log:    $log"
echo "follow: tail -F $log"
