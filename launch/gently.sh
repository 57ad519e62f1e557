# shellcheck shell=bash
# Sourced by the scripts beside it and in slurm/:  gently COMMAND...  runs COMMAND and returns its exit code.
#
# Whoever tells this shell to stop (TERM, HUP, USR1, Ctrl-C) asks the ranks, by `tell PID`: with SIGUSR1, which mpirun and
# srun hand on. SIGTERM Open MPI follows up with SIGKILL after a quarter of a second, too soon to write anything.
tell() { kill -USR1 "$1" 2>/dev/null; }
asked=${asked:-}

# End the script where one of these programs is missing.
need() {
    local program
    for program; do
        command -v "$program" >/dev/null && continue
        echo "$0: there is no $program on PATH; activate the virtual environment, or load the module, that has it" >&2
        exit 127
    done
}

# Print the numbers of the processes that process $1 has started. They are read from /proc, because slim images have no
# pgrep; macOS has no /proc.
children() {
    local file line
    if [[ ! -r /proc/self/stat ]]; then
        pgrep -P "$1"
        return
    fi
    for file in /proc/[0-9]*/stat; do
        line=
        { IFS= read -r -d '' line <"$file"; } 2>/dev/null || true  # the process may have ended
        line=${line##*) }  # after the name, which may hold spaces and parentheses: the state, then the parent
        line=${line#* }
        [[ ${line%% *} != "$1" ]] || { file=${file#/proc/} && echo "${file%/stat}"; }
    done
}

# As soon as the launcher PID has ranks, for a signal before that breaks its own start; then twice more, for ranks that
# have just begun. They take what comes within 10 s for one request.
tell_ranks() {
    local pause ranks=
    for _ in {1..50}; do
        ranks=$(children "$1")
        if [[ $ranks ]] || ! kill -0 "$1" 2>/dev/null; then break; fi
        sleep 0.2
    done
    [[ $ranks ]] || kill -USR1 "$1" 2>/dev/null || true  # without ranks nothing is lost, and torchrun may wait for minutes
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
    set -m  # a process group of its own: Ctrl-C reaches this shell alone
    "$@" </dev/null &
    job=$!
    set +m
    while :; do
        if [[ $asked ]]; then
            asked=
            [[ $interrupts != x?* ]] || kill "$job" 2>/dev/null || true  # Ctrl-C, again: who types it means it
            if [[ ! $repeating ]] || ! kill -0 "$repeating" 2>/dev/null; then
                tell_ranks "$job" </dev/null >/dev/null 2>&1 &
                repeating=$!
            fi
        fi
        now=0
        wait "$job" || now=$?
        [[ $now -eq 127 ]] || code=$now
        [[ $asked ]] || break  # else it was the signal that ended the wait
    done
    if [[ $repeating ]]; then
        kill "$repeating" 2>/dev/null || true
        # 138: SIGUSR1 has ended a rank or a launcher that was not listening yet. Nothing is lost by that.
        [[ $code -ne 138 ]] || code=75
    fi
    return "$code"
}
