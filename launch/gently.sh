# shellcheck shell=bash
# Sourced by the scripts beside it and in slurm/:  gently COMMAND...  runs COMMAND and returns its exit code.
#
# Whoever tells this shell to stop (TERM, HUP, USR1, Ctrl-C) asks the ranks, by `tell PID`: with SIGUSR1, which mpirun and
# srun hand on. SIGTERM Open MPI follows up with SIGKILL after a quarter of a second, too soon to write anything.
# Again 1, 3 and 6 s later, for a launcher that had no ranks yet; ranks take what comes within 10 s for one request.
tell() { kill -USR1 "$1" 2>/dev/null; }
asked=${asked:-}

gently() {
    local job now code=0 interrupts='' repeating='' pause
    trap 'asked=yes' TERM HUP USR1
    trap 'asked=yes; interrupts+=x' INT
    set -m  # a process group of its own: Ctrl-C reaches this shell alone
    "$@" </dev/null &
    job=$!
    set +m
    while :; do
        if [[ $asked ]]; then
            asked=
            tell "$job" || true
            [[ $interrupts != x?* ]] || kill "$job" 2>/dev/null || true  # Ctrl-C, again: who types it means it
            if [[ ! $repeating ]]; then
                for pause in 1 2 3; do sleep "$pause"; tell "$job" || break; done </dev/null >/dev/null 2>&1 &
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
