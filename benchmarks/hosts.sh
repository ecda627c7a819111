# Hosts that are network namespaces of this machine, on one bridge: to be sourced, as root.
#
#     hosts_up wf 10.77.0 4     # wf0 to wf3 with eth0 at 10.77.0.1 to 10.77.0.4, frames of 9,000 bytes
#     hosts_down wf 4
#
# Needs iproute2. All traffic stays on this machine.

hosts_down() { # name, how many; also what an earlier run left
    local at
    for ((at = 0; at < $2; at++)); do # the link first: a namespace's own goes some time after it
        ip link delete "$1$at" 2>/dev/null || true
        ip netns delete "$1$at" 2>/dev/null || true
    done
    ip link delete "$1bridge" 2>/dev/null || true
}

hosts_up() { # name, first three numbers of the addresses, how many
    local at
    ip link add "$1bridge" mtu 9000 type bridge
    ip link set "$1bridge" up
    for ((at = 0; at < $3; at++)); do
        ip netns add "$1$at"
        ip link add "$1$at" mtu 9000 type veth peer name eth0 mtu 9000 netns "$1$at"
        ip link set "$1$at" master "$1bridge" up
        ip -n "$1$at" address add "$2.$((at + 1))/24" dev eth0
        ip -n "$1$at" link set lo up
        ip -n "$1$at" link set eth0 up
    done
}
