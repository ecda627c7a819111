"""Bytes that this process has sent over TCP, by the kernel's count (Linux >= 4.19)."""

from __future__ import annotations

import os
import socket
import struct

_SENT_AND_RETRANSMITTED = struct.Struct("<QQ")
_OFFSET = 200  # of tcpi_bytes_sent, then tcpi_bytes_retrans, in struct tcp_info (linux/tcp.h)


def bytes_sent() -> int:
    """Payload bytes sent by all open TCP connections, without retransmissions.

    Raises:
        RuntimeError: if the kernel does not count it.
    """
    return sum(_bytes_sent_by(int(name)) for name in os.listdir("/proc/self/fd"))


def _bytes_sent_by(descriptor: int) -> int:
    """Bytes sent by one file descriptor; 0 if it is no TCP connection."""
    try:
        if not os.readlink(f"/proc/self/fd/{descriptor}").startswith("socket:"):
            return 0
        with socket.socket(fileno=os.dup(descriptor)) as copy:
            if copy.family not in (socket.AF_INET, socket.AF_INET6):
                return 0
            if copy.type != socket.SOCK_STREAM:
                return 0
            info = copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 512)
    except OSError:  # closed since the listing, as its own descriptor is
        return 0
    if len(info) < _OFFSET + _SENT_AND_RETRANSMITTED.size:
        raise RuntimeError(
            "this kernel does not count the bytes of a TCP connection: 4.19 is needed"
        )
    sent, retransmitted = _SENT_AND_RETRANSMITTED.unpack_from(info, _OFFSET)
    return sent - retransmitted
