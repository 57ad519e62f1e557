#!/usr/bin/env bash
# Start ranks with torchrun, on one machine.
#
#   launch/torchrun.sh RANKS CONFIG.yaml [key=value ...]
#   launch/torchrun.sh 5 configs/quickstart.yaml rounds=3
#
# Rank 0 is the server, the others train. For several machines see slurm/torchrun.sbatch.
set -euo pipefail
[[ $# -ge 2 && $1 =~ ^[1-9][0-9]*$ ]] || { sed -n '2,7s/^# \{0,1\}//p' "$0" >&2; exit 2; }
ranks=$1
shift

# A fedmpi that is on PATH is taken; else .venv, of the working directory or from beside launch/.
for place in . "$(dirname "$0")/.."; do
    # shellcheck source=/dev/null
    if ! command -v fedmpi >/dev/null && [[ -f $place/.venv/bin/activate ]]; then source "$place/.venv/bin/activate"; fi
done
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
# --standalone takes a free port by itself. A failed rank is not restarted: it ends the job, which says why.
exec torchrun --standalone --max-restarts 0 --nproc-per-node "$ranks" --no-python fedmpi run "$@"
