# Functions for hosts that are network namespaces of this machine, on one bridge. Source it as root.
#
#     hosts_up wf 10.77.0 4     # wf0 to wf3 with eth0 at 10.77.0.1 to 10.77.0.4, frames of 9,000 bytes
#     hosts_down wf 4
#
# Needs iproute2. All traffic stays on this machine.

hosts_down() { # name, number of hosts; also removes what an earlier run left
    local host
    for ((host = 0; host < $2; host++)); do # the link first: a deleted namespace keeps its link for a while
        ip link delete "$1$host" 2>/dev/null || true
        ip netns delete "$1$host" 2>/dev/null || true
    done
    ip link delete "$1bridge" 2>/dev/null || true
}

hosts_up() { # name, first three numbers of the addresses, number of hosts
    local host
    ip link add "$1bridge" mtu 9000 type bridge
    ip link set "$1bridge" up
    for ((host = 0; host < $3; host++)); do
        ip netns add "$1$host"
        ip link add "$1$host" mtu 9000 type veth peer name eth0 mtu 9000 netns "$1$host"
        ip link set "$1$host" master "$1bridge" up
        ip -n "$1$host" address add "$2.$((host + 1))/24" dev eth0
        ip -n "$1$host" link set lo up
        ip -n "$1$host" link set eth0 up
    done
}
