# shellcheck shell=bash
# The batch scripts in this folder source this file:  run_and_requeue COMMAND...  runs COMMAND, which starts the ranks. If the
# run was stopped and can be resumed (exit code 75), the job is requeued. See docs/slurm.md for details.
# shellcheck source=launch/run_stoppable.sh
source "$(dirname "${BASH_SOURCE[0]}")/../launch/run_stoppable.sh"

job=$SLURM_JOB_ID  # within an array this may be the id of the whole array
[[ -z ${SLURM_ARRAY_TASK_ID:-} ]] || job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID
# The name stays the same when the job is requeued, and so does the run directory, output/name.
# shellcheck disable=SC2034
resume_options=("name=${SLURM_JOB_NAME//[^[:alnum:]._-]/-}-$job" checkpoint.resume=auto)

run_and_requeue() {
    local code=0 rank_0_code='' new_rounds=1 job_state
    # Rank 0 writes its exit code, which torchrun does not return, and its number of new rounds to this file. It is in
    # a directory that all nodes share.
    export FEDMPI_OUTCOME=$PWD/.fedmpi-$job/outcome
    rm -rf ".fedmpi-$job"
    mkdir ".fedmpi-$job"
    run_stoppable "$@" || code=$?
    read -r rank_0_code new_rounds 2>/dev/null <"$FEDMPI_OUTCOME" || true
    rm -rf ".fedmpi-$job"  # without the directory, a rank that outlives its launcher cannot write to it
    code=${rank_0_code:-$code}   # the launcher may return the code of a rank that failed during the run (faults.on_lost_rank)
    [[ $code -eq 75 ]] || exit "$code"

    job_state=$(scontrol show job "$job" 2>/dev/null) || true
    if [[ $job_state != *JobState=RUNNING* && $job_state != *Reason=TimeLimit* ]]; then  # scancel, requeue, preemption
        echo "$0: this job was stopped by Slurm or a user and is not requeued here; submit it again to resume the run" >&2
    elif [[ ${SLURM_RESTART_COUNT:-0} -gt 0 && $new_rounds -eq 0 ]]; then
        echo "$0: not requeued: no round was completed since job $job was restarted; increase --time" >&2
    elif scontrol requeue "$job"; then  # Slurm then ends this shell, too
        echo "$0: job $job is requeued and will resume" >&2
    else
        echo "$0: job $job cannot be requeued" >&2
    fi
    exit 75
}
