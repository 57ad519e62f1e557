#!/usr/bin/env bash
# Start ranks on one machine with torchrun.
#
#   launch/torchrun.sh RANKS CONFIG.yaml [key=value ...]
#   launch/torchrun.sh 5 configs/quickstart.yaml rounds=3
#
# Rank 0 is the server, the others train. For several machines see slurm/torchrun.sbatch.
# When the script is stopped (TERM, Ctrl-C), the ranks write their results. Exit code 75: run it again to resume.
set -euo pipefail
[[ $# -ge 2 && $1 =~ ^[1-9][0-9]*$ ]] || { sed -n '2,8s/^# \{0,1\}//p' "$0" >&2; exit 2; }
ranks=$1
shift

# Use fedmpi on PATH if there is one; otherwise .venv in the working directory or beside launch/.
for place in . "$(dirname "$0")/.."; do
    # shellcheck source=/dev/null
    if ! command -v fedmpi >/dev/null && [[ -f $place/.venv/bin/activate ]]; then source "$place/.venv/bin/activate"; fi
done
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
# shellcheck source=launch/run_stoppable.sh
source "$(dirname "$0")/run_stoppable.sh"
require_programs torchrun fedmpi
# torchrun does not forward SIGUSR1, and returns 1 for any exit code of the ranks. Therefore this script sends the signal
# to the ranks itself, and reads the exit code that rank 0 wrote to a file.
send_stop_signal() {
    local pid code=1
    for pid in $(list_children "$1"); do
        if kill -USR1 "$pid" 2>/dev/null; then code=0; fi
    done
    return "$code"
}
outcome=$(mktemp)
trap 'rm -f "$outcome"' EXIT
export FEDMPI_OUTCOME=${FEDMPI_OUTCOME:-$outcome}
code=0
# --standalone chooses a free port, and --local-addr keeps torchrun from looking up this host's name, which may be unknown
# within a container. A failed rank is not restarted; it ends the job, which reports the reason.
options=(--standalone --local-addr 127.0.0.1 --max-restarts 0 --nproc-per-node "$ranks")
run_stoppable torchrun "${options[@]}" --no-python fedmpi run "$@" || code=$?
read -r rank_0_code _ <"$FEDMPI_OUTCOME" || true
[[ ${rank_0_code:-0} -eq 0 ]] || code=$rank_0_code
exit "$code"
