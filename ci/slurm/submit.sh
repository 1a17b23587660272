#!/usr/bin/env bash
# Submit the scaling experiment as one job: 1 node, 4 GPUs, P = 1, 2, 4.
#
#   ci/slurm/submit.sh [SBATCH OPTION...] [-- EXPERIMENT OPTION...]
#   ci/slurm/submit.sh --partition=gpu --account=me -- --preset paper
#
# SP_VENV=DIR uses that environment instead of making one in the job; SP_LAUNCHER=COMMAND replaces srun (see scaling.sbatch).
set -euo pipefail

case "${1:-}" in
    -h | --help)
        sed -n '2,7s/^# \{0,1\}//p' "$0"
        exit 0
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
while [[ $# -gt 0 && $1 != -- ]]; do
    options+=("$1")
    shift
done
[[ $# -eq 0 ]] || shift

answer=$(sbatch --parsable --chdir="$root" --output="$logs/scaling-%j.log" "${options[@]}" "$root/ci/slurm/scaling.sbatch" "$@")
job=${answer%%;*} # sbatch adds ";cluster" where there are several
log=$logs/scaling-$job.log
echo "job:    $job"
echo "log:    $log"
echo "follow: tail -F $log"
