#!/usr/bin/env bash
# Run a command as one rank on each of N hosts: network namespaces of this machine, one link each.
#
#     benchmarks/shaped_hosts.sh 4 50mbit python benchmarks/dsp.py
#
# Needs root and iproute2. Frames of 9,000 bytes, no added delay; all traffic stays on this machine.
# The output of rank 0 is printed; the hosts are taken down at the end.
set -euo pipefail

hosts=$1 rate=$2
shift 2

down() {
    for ((i = 0; i < hosts; i++)); do # the link first: a namespace's own goes some time after it
        ip link delete "wf$i" 2>/dev/null || true
        ip netns delete "wf$i" 2>/dev/null || true
    done
    ip link delete wfbridge 2>/dev/null || true
}
trap down EXIT
down
ip link add wfbridge mtu 9000 type bridge
ip link set wfbridge up
for ((i = 0; i < hosts; i++)); do
    ip netns add "wf$i"
    ip link add "wf$i" mtu 9000 type veth peer name eth0 mtu 9000 netns "wf$i"
    ip link set "wf$i" master wfbridge up
    ip -n "wf$i" address add "10.77.0.$((i + 1))/24" dev eth0
    ip -n "wf$i" link set lo up
    ip -n "wf$i" link set eth0 up
    ip netns exec "wf$i" tc qdisc add dev eth0 root tbf rate "$rate" burst 32kb latency 400ms
done
export WORLD_SIZE=$hosts LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 OMP_NUM_THREADS=1
export MASTER_ADDR=10.77.0.1 MASTER_PORT=29511 GLOO_SOCKET_IFNAME=eth0
for ((i = 1; i < hosts; i++)); do
    RANK=$i ip netns exec "wf$i" "$@" >/dev/null 2>&1 &
done
RANK=0 ip netns exec wf0 "$@"
wait
