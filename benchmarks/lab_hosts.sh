#!/usr/bin/env bash
# Run a command as every rank of HOSTS x RANKS: network namespaces of this machine, shaped NICs.
#
#     benchmarks/lab_hosts.sh 4 2 host 40mbit python benchmarks/lab_rank.py ...
#     benchmarks/lab_hosts.sh 4 2 rank 40mbit python benchmarks/lab_rank.py ...
#
# host: one NIC a host. A namespace is a host, and its ranks reach each other over its loopback.
# rank: one NIC a rank. A namespace is a rank: eth0 is its NIC; `fast`, unshaped, leads to the other
#       ranks of its host, by routes to their addresses.
# Every NIC is shaped in both directions by tc tbf: on eth0 what leaves, on the switch's port what
# comes in. Frames of 9,000 bytes, no added delay, queues that drop nothing, TCP Reno. The rate is a
# thousandth of a real network's, so some buffers are small, too. A socket keeps 128 KiB: a send ends
# when nearly all of it has left, and a rank that is ahead does not fill the NIC with its next
# messages while the previous ones are on the way. 32 KiB of a socket stand in the NIC's queue:
# messages to several ranks share the NIC evenly. Needs root and iproute2.
# All traffic stays on this machine. The output of rank 0 is printed; if a rank fails, that of the
# others too. Names begin with LAB_NAME (default wflab): two labs at once need two names.
set -euo pipefail

hosts=$1 per_host=$2 nics=$3 rate=$4
shift 4
name=${LAB_NAME:-wflab} switch=${LAB_NAME:-wflab}sw
case $nics in
host) spaces=$hosts ;;
rank) spaces=$((hosts * per_host)) ;;
*) echo "the third argument must be host or rank, got $nics" >&2; exit 2 ;;
esac
logs=$(mktemp -d)

down() {
    for pid in $(jobs -pr); do kill "$pid" 2>/dev/null || true; done
    for ((i = 0; i < spaces; i++)); do ip netns delete "$name$i" 2>/dev/null || true; done
    ip netns delete "$switch" 2>/dev/null || true
    rm -rf "$logs"
}
trap down EXIT
trap 'exit 130' INT TERM

shape() { # namespace, device
    tc -n "$1" qdisc add dev "$2" root tbf rate "$rate" burst 20kb limit 64mb
}

settings() { # namespace
    ip netns exec "$1" sh -c '
        echo reno >/proc/sys/net/ipv4/tcp_congestion_control
        echo 32768 >/proc/sys/net/ipv4/tcp_limit_output_bytes
        echo 4096 65536 131072 >/proc/sys/net/ipv4/tcp_wmem
        echo 1 >/proc/sys/net/ipv6/conf/all/disable_ipv6'
}

plug() { # namespace, its device, the switch's port, the switch's bridge, MTU
    ip -n "$switch" link add "$3" mtu "$5" type veth peer name "$2" mtu "$5" netns "$1"
    ip -n "$switch" link set "$3" master "$4" up
    ip -n "$1" link set "$2" up
}

bridge() { # its name, MTU
    ip -n "$switch" link add "$1" mtu "$2" type bridge
    ip -n "$switch" link set "$1" up
}

ip netns add "$switch"
settings "$switch"
bridge between 9000
for ((i = 0; i < spaces; i++)); do
    ip netns add "$name$i"
    settings "$name$i"
    ip -n "$name$i" link set lo up
    plug "$name$i" eth0 "port$i" between 9000
    ip -n "$name$i" link set eth0 gso_max_segs 2
    ip -n "$name$i" address add "10.78.0.$((i + 1))/24" dev eth0
    shape "$name$i" eth0
    shape "$switch" "port$i"
done
if [ "$nics" = rank ]; then
    for ((i = 0; i < spaces; i++)); do
        host=$((i / per_host))
        if ((i % per_host == 0)); then bridge "inside$host" 65000; fi
        plug "$name$i" fast "fast$i" "inside$host" 65000
        for ((j = host * per_host; j < (host + 1) * per_host; j++)); do
            if ((j != i)); then
                ip -n "$name$i" route add "10.78.0.$((j + 1))/32" dev fast src "10.78.0.$((i + 1))"
            fi
        done
    done
fi

export WORLD_SIZE=$((hosts * per_host)) LOCAL_WORLD_SIZE=$per_host OMP_NUM_THREADS=1
export MASTER_ADDR=10.78.0.1 MASTER_PORT=29512 GLOO_SOCKET_IFNAME=eth0
export LAB_HOSTS=$hosts LAB_NICS=$nics LAB_RATE=$rate
start() { # rank
    local space=$(($1 * spaces / WORLD_SIZE))
    exec env RANK="$1" LOCAL_RANK=$(($1 % per_host)) ip netns exec "$name$space" "${command[@]}"
}
command=("$@")
for ((rank = 0; rank < WORLD_SIZE; rank++)); do
    if [ "$rank" = 0 ]; then start 0 & else start "$rank" >"$logs/$rank" 2>&1 & fi
done
failed=0
for ((left = WORLD_SIZE; left > 0; left--)); do
    wait -n || { failed=$?; break; }
done
if [ "$failed" != 0 ]; then
    echo "a rank ended with $failed; the last lines of the others:" >&2
    tail -n 15 "$logs"/* >&2
fi
exit "$failed"
