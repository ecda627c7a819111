"""Bytes that this process has sent over TCP, as the kernel counts them (Linux >= 4.19)."""

from __future__ import annotations

import os
import socket
import struct

_SENT_AND_RESENT = struct.Struct("<QQ")
_OFFSET = 200  # of tcpi_bytes_sent, then tcpi_bytes_retrans, in struct tcp_info (linux/tcp.h)


def bytes_sent() -> int:
    """Payload handed to the network by all TCP connections that are open now, resends left out.

    Raises:
        RuntimeError: if the kernel does not count it.
    """
    return sum(_sent_by(int(name)) for name in os.listdir("/proc/self/fd"))


def _sent_by(descriptor: int) -> int:
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
    except OSError:  # closed meanwhile, as the listing's own descriptor is
        return 0
    if len(info) < _OFFSET + _SENT_AND_RESENT.size:
        raise RuntimeError(
            "this kernel does not count the bytes of a TCP connection: 4.19 is needed"
        )
    sent, resent = _SENT_AND_RESENT.unpack_from(info, _OFFSET)
    return sent - resent
