#!/usr/bin/env bash
# Start ranks with torchrun, on one machine.
#
#   launch/torchrun.sh RANKS CONFIG.yaml [key=value ...]
#   launch/torchrun.sh 5 configs/quickstart.yaml rounds=3
#
# Rank 0 is the server, the others train. For several machines see slurm/torchrun.sbatch.
# Told to stop (TERM, Ctrl-C), it lets the ranks write what they have; exit code 75: start it again.
set -euo pipefail
[[ $# -ge 2 && $1 =~ ^[1-9][0-9]*$ ]] || { sed -n '2,8s/^# \{0,1\}//p' "$0" >&2; exit 2; }
ranks=$1
shift

# A fedmpi that is on PATH is taken; else .venv, of the working directory or from beside launch/.
for place in . "$(dirname "$0")/.."; do
    # shellcheck source=/dev/null
    if ! command -v fedmpi >/dev/null && [[ -f $place/.venv/bin/activate ]]; then source "$place/.venv/bin/activate"; fi
done
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
# shellcheck source=launch/gently.sh
source "$(dirname "$0")/gently.sh"
need torchrun fedmpi
# torchrun knows no SIGUSR1, and would make any exit code 1: the ranks are told, and asked for theirs, by this script.
tell() {
    local pid code=1
    for pid in $(children "$1"); do
        if kill -USR1 "$pid" 2>/dev/null; then code=0; fi
    done
    return "$code"
}
outcome=$(mktemp)
trap 'rm -f "$outcome"' EXIT
export FEDMPI_OUTCOME=${FEDMPI_OUTCOME:-$outcome}
code=0
# --standalone takes a free port by itself, and --local-addr keeps torchrun from looking up this host's name, which
# containers may not know. A failed rank is not restarted: it ends the job, which says why.
options=(--standalone --local-addr 127.0.0.1 --max-restarts 0 --nproc-per-node "$ranks")
gently torchrun "${options[@]}" --no-python fedmpi run "$@" || code=$?
read -r told _ <"$FEDMPI_OUTCOME" || true
[[ ${told:-0} -eq 0 ]] || code=$told
exit "$code"
