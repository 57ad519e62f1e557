#!/usr/bin/env bash
# A real Slurm of one node on this machine, for tests: munged, slurmctld and slurmd with a configuration of their own, without systemd.
#
#   export SLURM_CONF=$(tests/slurm_cluster.sh start)      idempotent; prints the configuration's path when the node is idle
#   tests/slurm_cluster.sh stop
#
# Needs root and: apt-get install slurm-wlm munge. All files lie in $FEDMPI_SLURM_DIR (default /tmp/fedmpi-slurm).
set -euo pipefail
export PATH=$PATH:/usr/sbin:/sbin

dir=${FEDMPI_SLURM_DIR:-/tmp/fedmpi-slurm}
node=$(hostname -s)
export SLURM_CONF=$dir/slurm.conf

alive() {  # does the process of this pid file run?
    [[ -s $dir/$1.pid ]] && kill -0 "$(<"$dir/$1.pid")" 2>/dev/null
}

gone() {  # has this process ended? In a container without an init it may stay as a zombie.
    [[ ! -e /proc/$1/stat || $(</proc/"$1"/stat) == *") Z "* ]]
}

configure() {
    mkdir -p "$dir"/{state,spool}
    chmod 755 "$dir"
    [[ -s $dir/munge.key ]] || (umask 077 && head -c 1024 /dev/urandom >"$dir/munge.key")
    # 8 processors whatever the machine has (config_overrides), and shared: tests start more tasks than cores. Its GPUs are
    # /dev/null: Slurm hands them out, and says in CUDA_VISIBLE_DEVICES which a task sees.
    for number in {0..7}; do ln -sf /dev/null "$dir/gpu$number"; done
    echo "Name=gpu File=$dir/gpu[0-7]" >"$dir/gres.conf"
    cat >"$SLURM_CONF" <<EOF
ClusterName=fedmpi
SlurmctldHost=$node(127.0.0.1)
SlurmctldPort=16817
SlurmdPort=16818
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$dir/munge.socket,cred_expire=10
StateSaveLocation=$dir/state
SlurmdSpoolDir=$dir/spool
SlurmctldPidFile=$dir/slurmctld.pid
SlurmdPidFile=$dir/slurmd.pid
SlurmctldLogFile=$dir/slurmctld.log
SlurmdLogFile=$dir/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_min_interval=10000,batch_sched_delay=0
SlurmdParameters=config_overrides
MpiDefault=none
ReturnToService=2
KillWait=30
InactiveLimit=0
MinJobAge=300
GresTypes=gpu
NodeName=$node NodeAddr=127.0.0.1 CPUs=8 RealMemory=16000 Gres=gpu:8 State=UNKNOWN
PartitionName=test Nodes=$node Default=YES MaxTime=INFINITE OverSubscribe=FORCE:4 State=UP
EOF
}

start() {
    configure
    alive munged || munged --force --key-file="$dir/munge.key" --socket="$dir/munge.socket" --pid-file="$dir/munged.pid" \
        --log-file="$dir/munged.log" --seed-file="$dir/munged.seed" >&2
    alive slurmctld || slurmctld >&2
    alive slurmd || slurmd >&2
    for _ in {1..60}; do
        if [[ $(sinfo --noheader --format=%T 2>/dev/null) =~ ^(idle|mixed|allocated)$ ]]; then
            echo "$SLURM_CONF"
            return
        fi
        sleep 0.5
    done
    echo "slurm_cluster.sh: the node is not idle after 30 s:" >&2
    sinfo >&2 || true
    tail -n 20 "$dir"/{slurmctld,slurmd,munged}.log >&2
    exit 1
}

stop() {
    if alive slurmctld; then
        timeout 5 scancel --full --user="$(id -un)" || true
        for _ in {1..100}; do [[ -n $(timeout 5 squeue --noheader) ]] || break; sleep 0.1; done
    fi
    for daemon in slurmd slurmctld munged; do
        alive "$daemon" || continue
        pid=$(<"$dir/$daemon.pid")
        kill "$pid"
        for _ in {1..100}; do gone "$pid" && break; sleep 0.1; done
    done
    [[ ! -f $SLURM_CONF ]] || rm -rf "$dir"
}

case ${1:-} in
    start | stop) "$1" ;;
    *) sed -n '2,7s/^# \{0,1\}//p' "$0"; exit 2 ;;
esac
