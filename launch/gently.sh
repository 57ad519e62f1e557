# shellcheck shell=bash
# Sourced by the scripts in this folder and in slurm/:  gently COMMAND...  runs COMMAND and returns its exit code.
#
# If this shell receives a signal to stop (TERM, HUP, USR1, Ctrl-C), `tell PID` sends SIGUSR1, which mpirun and srun forward
# to the ranks. After SIGTERM, Open MPI would send SIGKILL within a quarter of a second, too soon to write anything.
tell() { kill -USR1 "$1" 2>/dev/null; }
asked=${asked:-}

# End the script if one of these programs is missing.
need() {
    local program
    for program; do
        command -v "$program" >/dev/null && continue
        echo "$0: there is no $program on PATH; activate the virtual environment, or load the module, that has it" >&2
        exit 127
    done
}

# Print the ids of the child processes of process $1. They are read from /proc, because slim images have no pgrep; macOS has
# no /proc.
children() {
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

# Send the signal when the launcher PID has started ranks, because an earlier one would break its start; then send it twice
# more, for ranks that have just started. Ranks count all signals within 10 s as one request.
tell_ranks() {
    local pause ranks=
    for _ in {1..50}; do
        ranks=$(children "$1")
        if [[ $ranks ]] || ! kill -0 "$1" 2>/dev/null; then break; fi
        sleep 0.2
    done
    [[ $ranks ]] || kill -USR1 "$1" 2>/dev/null || true  # without ranks nothing is lost; torchrun might wait for minutes
    for pause in 0 1 3; do
        sleep "$pause"
        tell "$1" || return 0
    done
}

gently() {
    local job now code=0 interrupts='' repeating=''
    need "$1"
    trap 'asked=yes' TERM HUP USR1
    trap 'asked=yes; interrupts+=x' INT
    set -m  # gives the command its own process group, so that Ctrl-C reaches only this shell
    "$@" </dev/null &
    job=$!
    set +m
    while :; do
        if [[ $asked ]]; then
            asked=
            [[ $interrupts != x?* ]] || kill "$job" 2>/dev/null || true  # a second Ctrl-C ends the command at once
            if [[ ! $repeating ]] || ! kill -0 "$repeating" 2>/dev/null; then
                tell_ranks "$job" </dev/null >/dev/null 2>&1 &
                repeating=$!
            fi
        fi
        now=0
        wait "$job" || now=$?
        [[ $now -eq 127 ]] || code=$now
        [[ $asked ]] || break  # if not set, the command has ended; otherwise the signal interrupted the wait
    done
    if [[ $repeating ]]; then
        kill "$repeating" 2>/dev/null || true
        # 138: SIGUSR1 killed a rank or a launcher that had no handler yet. No results are lost.
        [[ $code -ne 138 ]] || code=75
    fi
    return "$code"
}
