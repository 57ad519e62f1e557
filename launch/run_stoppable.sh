# shellcheck shell=bash
# The scripts in this folder and in slurm/ source this file:  run_stoppable COMMAND...  runs COMMAND and returns its exit code.
#
# If this shell receives a signal to stop (TERM, HUP, USR1, Ctrl-C), it sends SIGUSR1 to COMMAND; mpirun and srun forward this
# signal to the ranks. SIGTERM is not used: after it, Open MPI sends SIGKILL within 0.25 s, too early for results to be written.
send_stop_signal() { kill -USR1 "$1" 2>/dev/null; }
stop_requested=${stop_requested:-}

# Exit if one of these programs is not on PATH.
require_programs() {
    local program
    for program; do
        command -v "$program" >/dev/null && continue
        echo "$0: $program is not on PATH; activate the virtual environment or load the module that contains it" >&2
        exit 127
    done
}

# Print the ids of the child processes of process $1. They are read from /proc, because slim images have no pgrep; macOS has
# no /proc.
list_children() {
    local file line
    if [[ ! -r /proc/self/stat ]]; then
        pgrep -P "$1"
        return
    fi
    for file in /proc/[0-9]*/stat; do
        line=
        { IFS= read -r -d '' line <"$file"; } 2>/dev/null || true  # the process may have ended
        line=${line##*) }  # the name may contain spaces and parentheses; state and parent follow it
        line=${line#* }
        [[ ${line%% *} != "$1" ]] || { file=${file#/proc/} && echo "${file%/stat}"; }
    done
}

# Send the stop signal to the launcher $1 as soon as it has started ranks, since an earlier signal would break its start. Then
# send it twice more, for ranks that have just started. Ranks treat all signals within 10 s as one request.
repeat_stop_signal() {
    local pause ranks=
    for _ in {1..50}; do
        ranks=$(list_children "$1")
        if [[ $ranks ]] || ! kill -0 "$1" 2>/dev/null; then break; fi
        sleep 0.2
    done
    [[ $ranks ]] || kill -USR1 "$1" 2>/dev/null || true  # without ranks no results are lost; torchrun might wait for minutes
    for pause in 0 1 3; do
        sleep "$pause"
        send_stop_signal "$1" || return 0
    done
}

# Run a command, forward requests to stop to it, and return its exit code.
run_stoppable() {
    local job wait_code code=0 interrupts='' repeater=''
    require_programs "$1"
    trap 'stop_requested=yes' TERM HUP USR1
    trap 'stop_requested=yes; interrupts+=x' INT
    set -m  # gives the command its own process group, so that Ctrl-C reaches only this shell
    "$@" </dev/null &
    job=$!
    set +m
    while :; do
        if [[ $stop_requested ]]; then
            stop_requested=
            [[ $interrupts != x?* ]] || kill "$job" 2>/dev/null || true  # a second Ctrl-C ends the command at once
            if [[ ! $repeater ]] || ! kill -0 "$repeater" 2>/dev/null; then
                repeat_stop_signal "$job" </dev/null >/dev/null 2>&1 &
                repeater=$!
            fi
        fi
        wait_code=0
        wait "$job" || wait_code=$?
        [[ $wait_code -eq 127 ]] || code=$wait_code
        [[ $stop_requested ]] || break  # if set, a signal interrupted the wait; otherwise the command has ended
    done
    if [[ $repeater ]]; then
        kill "$repeater" 2>/dev/null || true
        # 138: SIGUSR1 killed a rank or a launcher that had no handler yet. No results are lost.
        [[ $code -ne 138 ]] || code=75
    fi
    return "$code"
}
