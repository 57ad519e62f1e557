# shellcheck shell=bash
# Sourced by the batch scripts in this folder:  again COMMAND...  runs COMMAND, which starts the ranks, and waits for it. If
# the run was stopped and can be resumed (exit code 75), this job is requeued. docs/slurm.md has the details.
# shellcheck source=launch/gently.sh
source "$(dirname "${BASH_SOURCE[0]}")/../launch/gently.sh"

me=$SLURM_JOB_ID  # within an array it may be the number of the whole array
[[ -z ${SLURM_ARRAY_TASK_ID:-} ]] || me=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID
# The name stays the same when the job is requeued, and so does the run directory, output/name.
# shellcheck disable=SC2034
goes_on=("name=${SLURM_JOB_NAME//[^[:alnum:]._-]/-}-$me" checkpoint.resume=auto)

again() {
    local code=0 told='' fresh=1 shown
    # Rank 0 writes its exit code, which torchrun does not return, and its number of new rounds to this file. It is in
    # a directory that all nodes share.
    export FEDMPI_OUTCOME=$PWD/.fedmpi-$me/outcome
    rm -rf ".fedmpi-$me"
    mkdir ".fedmpi-$me"
    gently "$@" || code=$?
    read -r told fresh 2>/dev/null <"$FEDMPI_OUTCOME" || true
    rm -rf ".fedmpi-$me"  # without the directory, a rank that outlives its launcher cannot write to it
    code=${told:-$code}   # the launcher may return the code of a rank that failed during the run (faults.on_lost_rank)
    [[ $code -eq 75 ]] || exit "$code"

    shown=$(scontrol show job "$me" 2>/dev/null) || true
    if [[ $shown != *JobState=RUNNING* && $shown != *Reason=TimeLimit* ]]; then  # scancel, requeue, preemption
        echo "$0: this job was ended by Slurm or a user, who decide what becomes of it; sbatch it again to go on" >&2
    elif [[ ${SLURM_RESTART_COUNT:-0} -gt 0 && $fresh -eq 0 ]]; then
        echo "$0: not requeued: no round was completed since job $me was started again; give it more --time" >&2
    elif scontrol requeue "$me"; then  # Slurm then ends this shell, too
        echo "$0: job $me is requeued, and will go on" >&2
    else
        echo "$0: job $me cannot be requeued" >&2
    fi
    exit 75
}
