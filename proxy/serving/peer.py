"""The other end of a TCP connection: whether it has disconnected, and how many bytes it has received.

A client that disconnects and a client that only shuts down its sending side look the same on the wire: their data ends.
A closed socket answers data with a reset, and nothing shows that it is closed before. So the system is asked, which
knows more in two cases. If the other end is on this machine, no process has its socket open any more. Otherwise its
system, which remembers a closed socket for at most a minute, may have answered a keep-alive probe with a reset.
"""

from __future__ import annotations

import socket
import struct
import sys
from contextlib import suppress

KNOWN = hasattr(socket, "AF_NETLINK") and hasattr(socket, "TCP_INFO")
"""True if the system reports this. Otherwise the end of the data means that the client has disconnected."""

_PROBE_S, _PROBES = 5, 3
_TCP_CLOSE = 7
_SOCK_DIAG, _ANSWERED = 4, 20
"""Linux's NETLINK_SOCK_DIAG, and SOCK_DIAG_BY_FAMILY, the type of its requests and answers."""

_REQUEST = 1
_ANY_STATE, _ANY_COOKIE = 0xFFFFFFFF, b"\xff" * 8
_BYTES_ACKED_AT = 120
"""The offset in a `tcp_info` of the number of bytes that the other end has acknowledged."""

_INODE_AT = 84
"""The offset in an `inet_diag_msg` with its `nlmsghdr` of the inode of the socket: 0 if no process has it open."""


def ask_often(sock: socket.socket) -> None:
    """Make the system probe the other end every `_PROBE_S` seconds, and give up after `_PROBES` without an answer."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, _PROBE_S),
        (socket.TCP_KEEPINTVL, _PROBE_S),
        (socket.TCP_KEEPCNT, _PROBES),
    ):
        sock.setsockopt(socket.IPPROTO_TCP, option, value)


def has_left(sock: socket.socket) -> bool:
    """True if the other end of `sock` is known to have disconnected. `sock` must have received the end of its data."""
    with suppress(OSError):  # the system does not support this
        return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _TCP_CLOSE or _abandoned(sock)
    return False


def taken_bytes(sock: socket.socket) -> int:
    """The number of bytes that the other end has received so far; 0 if the system does not report it."""
    if KNOWN:
        with suppress(OSError):
            info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_ACKED_AT + 8)
            return int.from_bytes(info[_BYTES_ACKED_AT:], sys.byteorder)
    return 0


def _abandoned(sock: socket.socket) -> bool:
    """True if the other end is a socket of this machine that no process has open. Raises OSError if it is remote."""
    (host, port), (own_host, own_port) = sock.getpeername()[:2], sock.getsockname()[:2]
    addresses = (socket.inet_pton(sock.family, address).ljust(16, b"\0") for address in (host, own_host))
    ends = struct.pack("!HH16s16s", port, own_port, *addresses)
    question = struct.pack("=BBBxI", sock.family, socket.IPPROTO_TCP, 0, _ANY_STATE) + ends + struct.pack("=I", 0)
    body = question + _ANY_COOKIE
    with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, _SOCK_DIAG) as system:
        system.send(struct.pack("=IHHII", 16 + len(body), _ANSWERED, _REQUEST, 0, 0) + body)
        answer = system.recv(1024, socket.MSG_DONTWAIT)
    (kind,), (inode,) = struct.unpack_from("=H", answer, 4), struct.unpack_from("=I", answer, _INODE_AT)
    return bool(kind == _ANSWERED and inode == 0)
