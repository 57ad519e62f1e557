#!/usr/bin/env bash
# Start ranks with mpirun (Open MPI or MPICH, whichever is first on PATH), on one machine or in a batch allocation.
#
#   launch/mpirun.sh RANKS CONFIG.yaml [key=value ...]
#   launch/mpirun.sh 5 configs/quickstart.yaml rounds=3
#
# Rank 0 is the server, the others train. OMP_NUM_THREADS is 1 unless it is set, because ranks share the cores.
# FEDMPI_ULFM=1 keeps mpirun from ending the job when a rank dies (Open MPI 5).
# When the script is stopped (TERM, Ctrl-C), the ranks write their results. Exit code 75: run it again to resume.
set -euo pipefail
[[ $# -ge 2 && $1 =~ ^[1-9][0-9]*$ ]] || { sed -n '2,9s/^# \{0,1\}//p' "$0" >&2; exit 2; }
ranks=$1
shift

# Use fedmpi on PATH if there is one; otherwise .venv in the working directory or beside launch/.
for place in . "$(dirname "$0")/.."; do
    # shellcheck source=/dev/null
    if ! command -v fedmpi >/dev/null && [[ -f $place/.venv/bin/activate ]]; then source "$place/.venv/bin/activate"; fi
done
# shellcheck source=launch/run_stoppable.sh
source "$(dirname "$0")/run_stoppable.sh"
require_programs mpirun fedmpi
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
options=(-n "$ranks")
if [[ ${FEDMPI_ULFM:-0} == 1 && -z ${FEDMPI_OUTCOME:-} ]]; then
    FEDMPI_OUTCOME=$(mktemp)
    trap 'rm -f "$FEDMPI_OUTCOME"' EXIT
    export FEDMPI_OUTCOME
fi
if [[ $(mpirun --version) == *'Open MPI'* ]]; then  # MPICH does not have these options, and does not need them
    options+=(--bind-to none)                       # Open MPI pins ranks by default, so that several would share one core
    [[ ${FEDMPI_ULFM:-0} != 1 ]] || options+=(--with-ft ulfm)
    [[ -z ${FEDMPI_OUTCOME:-} ]] || options+=(-x FEDMPI_OUTCOME)
    [[ $EUID -ne 0 ]] || options+=(--allow-run-as-root)
    [[ -n ${SLURM_JOB_ID:-} ]] || options+=(--oversubscribe)  # allows more ranks than cores; mpirun counts fewer cores than nproc
fi
# Open MPI stores files in a folder that is named by its process id. If a killed mpirun left such a folder, the next mpirun
# with that id would end with "The PMIx server's listener thread failed to start".
# shellcheck disable=SC2329  # called by run_stoppable
start() {
    rm -rf "${TMPDIR:-/tmp}/ompi.$BASHPID"
    exec mpirun "$@"
}
code=0
run_stoppable start "${options[@]}" fedmpi run "$@" || code=$?
if [[ ${FEDMPI_ULFM:-0} == 1 ]]; then  # mpirun may return the code of a failed rank, or 0 if the ranks did not connect
    rank_0_code=
    read -r rank_0_code _ 2>/dev/null <"$FEDMPI_OUTCOME" || true
    if [[ ! $rank_0_code && $code -eq 0 ]]; then
        echo "$0: the run did not finish; see the messages of rank 0 above" >&2
        rank_0_code=1
    fi
    code=${rank_0_code:-$code}
fi
exit "$code"
