#!/usr/bin/env bash
# Run a command as one rank on each of N hosts: network namespaces of this machine, one link each.
#
#     benchmarks/shaped_hosts.sh 4 50mbit python benchmarks/dsp.py
#
# Needs root and iproute2. No added delay; all traffic stays on this machine. The output of rank 0
# is printed; the hosts are taken down at the end.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/hosts.sh"

hosts=$1 rate=$2
shift 2

trap 'hosts_down wf "$hosts"' EXIT
hosts_down wf "$hosts"
hosts_up wf 10.77.0 "$hosts"
for ((i = 0; i < hosts; i++)); do
    ip netns exec "wf$i" tc qdisc add dev eth0 root tbf rate "$rate" burst 32kb latency 400ms
done
export WORLD_SIZE=$hosts LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 OMP_NUM_THREADS=1
export MASTER_ADDR=10.77.0.1 MASTER_PORT=29511 GLOO_SOCKET_IFNAME=eth0
for ((i = 1; i < hosts; i++)); do
    RANK=$i ip netns exec "wf$i" "$@" >/dev/null 2>&1 &
done
RANK=0 ip netns exec wf0 "$@"
wait
