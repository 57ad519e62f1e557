# shellcheck shell=bash
# Sourced by the batch scripts beside it:  again COMMAND...  runs COMMAND, which starts the ranks, to its end; where the run
# was told to stop and can be gone on with (exit code 75), Slurm is asked to start this job again. docs/slurm.md says more.
# shellcheck source=launch/gently.sh
source "$(dirname "${BASH_SOURCE[0]}")/../launch/gently.sh"

me=$SLURM_JOB_ID  # in an array it may be the number of the whole array
[[ -z ${SLURM_ARRAY_TASK_ID:-} ]] || me=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID
# The same over requeues: the run directory is output/name.
# shellcheck disable=SC2034
goes_on=("name=${SLURM_JOB_NAME//[^[:alnum:]._-]/-}-$me" checkpoint.resume=auto)

again() {
    local code=0 told='' fresh=1 shown
    # Rank 0's exit code, which torchrun does not hand on, and the rounds it completed; in a directory that all nodes see.
    export FEDMPI_OUTCOME=$PWD/.fedmpi-$me/outcome
    rm -rf ".fedmpi-$me"
    mkdir ".fedmpi-$me"
    gently "$@" || code=$?
    read -r told fresh 2>/dev/null <"$FEDMPI_OUTCOME" || true
    rm -rf ".fedmpi-$me"  # a rank that outlives its launcher writes nothing any more
    code=${told:-$code}   # the launcher's may be that of a rank that was lost on the way (faults.on_lost_rank)
    [[ $code -eq 75 ]] || exit "$code"

    shown=$(scontrol show job "$me" 2>/dev/null) || true
    if [[ $shown != *JobState=RUNNING* && $shown != *Reason=TimeLimit* ]]; then  # scancel, requeue, preemption
        echo "$0: this job was ended by Slurm or a user, who decide what becomes of it; sbatch it again to go on" >&2
    elif [[ ${SLURM_RESTART_COUNT:-0} -gt 0 && $fresh -eq 0 ]]; then
        echo "$0: not requeued: no round was completed since job $me was started again; give it more --time" >&2
    elif scontrol requeue "$me"; then  # Slurm ends this shell, too
        echo "$0: job $me is requeued, and will go on" >&2
    else
        echo "$0: job $me cannot be requeued" >&2
    fi
    exit 75
}
