#!/usr/bin/env bash
# Run a command on the first node of a real Slurm cluster whose nodes are made on this machine.
#
#     tests/slurm_hosts.sh 2 2 srun -n 4 python examples/attention.py    # 2 nodes of 2 CPUs
#
# A node is a network namespace with a host name of its own (node0, node1, ...), and a slurmd in it;
# slurmctld runs on node0. Needs root, iproute2, and slurmctld, slurmd, slurm-client and munge
# (`apt-get install slurmctld slurmd slurm-client munge`). Nothing of the machine's own Slurm, if it
# has one, is read or written; everything is taken down at the end.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/../benchmarks/hosts.sh"

nodes=$1 cpus=$2
shift 2
at=$(mktemp -d) name=wfslurm

down() {
    for file in "$at"/*.pid; do kill "$(cat "$file")" 2>/dev/null || true; done
    wait
    hosts_down $name "$nodes"
    rm -rf "$at"
}
trap down EXIT

on() { # which node, command
    local node=$1
    shift
    ip netns exec "$name$node" unshare --uts --mount sh -c \
        'hostname "$1" && mount --bind "$2" /etc/hosts && shift 2 && exec "$@"' \
        - "node$node" "$at/hosts" "$@"
}

hosts_down $name "$nodes"
hosts_up $name 10.79.0 "$nodes"
echo "127.0.0.1 localhost" >"$at/hosts"
for ((i = 0; i < nodes; i++)); do
    echo "10.79.0.$((i + 1)) node$i" >>"$at/hosts"
    mkdir "$at/spool.node$i"
done
mkdir "$at/state"
head -c 1024 /dev/urandom >"$at/munge.key"
chmod 600 "$at/munge.key"
chmod 755 "$at" # munge wants its socket where all may look
echo "CgroupPlugin=cgroup/v1" >"$at/cgroup.conf" # none is used, but one must be named
cat >"$at/slurm.conf" <<CONF
ClusterName=wallfacer
SlurmctldHost=node0
AuthType=auth/munge
AuthInfo=socket=$at/munge.sock
SlurmUser=root
SlurmdUser=root
StateSaveLocation=$at/state
SlurmdSpoolDir=$at/spool.%n
SlurmctldPidFile=$at/slurmctld.pid
SlurmdPidFile=$at/slurmd.%n.pid
MailProg=/bin/true
ProctrackType=proctrack/pgid
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
KillWait=2
NodeName=node[0-$((nodes - 1))] CPUs=$cpus State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
CONF
export SLURM_CONF=$at/slurm.conf
munged --force --key-file="$at/munge.key" --socket="$at/munge.sock" --pid-file="$at/munged.pid" \
    --log-file="$at/munged.log" --seed-file="$at/munged.seed"
on 0 slurmctld -D >"$at/slurmctld.log" 2>&1 &
for ((i = 0; i < nodes; i++)); do on "$i" slurmd -D -N "node$i" >"$at/slurmd.$i.log" 2>&1 & done
for ((tries = 0; tries < 150; tries++)); do
    [[ $(on 0 sinfo --noheader --states=idle --format=%D 2>/dev/null) == "$nodes" ]] && break
    sleep 0.1
done
if ((tries == 150)); then
    tail -n 20 "$at"/*.log >&2
    echo "the nodes did not come up" >&2
    exit 1
fi
on 0 "$@"
