#!/usr/bin/env bash
# Start ranks with mpirun (Open MPI or MPICH, whichever is first on PATH), on one machine or in an allocation it knows.
#
#   launch/mpirun.sh RANKS CONFIG.yaml [key=value ...]
#   launch/mpirun.sh 5 configs/quickstart.yaml rounds=3
#
# Rank 0 is the server, the others train. OMP_NUM_THREADS is 1 unless set: ranks share the cores.
# FEDMPI_ULFM=1 keeps mpirun from ending the job when a rank dies (Open MPI 5).
# Told to stop (TERM, Ctrl-C), it lets the ranks write what they have; exit code 75: start it again.
set -euo pipefail
[[ $# -ge 2 && $1 =~ ^[1-9][0-9]*$ ]] || { sed -n '2,9s/^# \{0,1\}//p' "$0" >&2; exit 2; }
ranks=$1
shift

# A fedmpi that is on PATH is taken; else .venv, of the working directory or from beside launch/.
for place in . "$(dirname "$0")/.."; do
    # shellcheck source=/dev/null
    if ! command -v fedmpi >/dev/null && [[ -f $place/.venv/bin/activate ]]; then source "$place/.venv/bin/activate"; fi
done
# shellcheck source=launch/gently.sh
source "$(dirname "$0")/gently.sh"
need mpirun fedmpi
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
options=(-n "$ranks")
if [[ ${FEDMPI_ULFM:-0} == 1 && -z ${FEDMPI_OUTCOME:-} ]]; then
    FEDMPI_OUTCOME=$(mktemp)
    trap 'rm -f "$FEDMPI_OUTCOME"' EXIT
    export FEDMPI_OUTCOME
fi
if [[ $(mpirun --version) == *'Open MPI'* ]]; then  # MPICH needs, and knows, none of these
    options+=(--bind-to none)                       # Open MPI pins ranks by default, and several would share one core
    [[ ${FEDMPI_ULFM:-0} != 1 ]] || options+=(--with-ft ulfm)
    [[ -z ${FEDMPI_OUTCOME:-} ]] || options+=(-x FEDMPI_OUTCOME)
    [[ $EUID -ne 0 ]] || options+=(--allow-run-as-root)
    [[ -n ${SLURM_JOB_ID:-} ]] || options+=(--oversubscribe)  # more ranks than cores, which are fewer than nproc says
fi
# Open MPI keeps files in a folder named by its process number. One that a killed mpirun has left would end the next of
# that number with "The PMIx server's listener thread failed to start".
# shellcheck disable=SC2329  # called by gently
start() {
    rm -rf "${TMPDIR:-/tmp}/ompi.$BASHPID"
    exec mpirun "$@"
}
code=0
gently start "${options[@]}" fedmpi run "$@" || code=$?
if [[ ${FEDMPI_ULFM:-0} == 1 ]]; then  # mpirun's code is that of ranks which may die, and 0 where none has met another
    told=
    read -r told _ 2>/dev/null <"$FEDMPI_OUTCOME" || true
    if [[ ! $told && $code -eq 0 ]]; then
        echo "$0: the run did not come to its end; what rank 0 said of it stands above" >&2
        told=1
    fi
    code=${told:-$code}
fi
exit "$code"
