"""The other end of a TCP connection: whether it has left, and how much it has taken.

A client that leaves and one that only shuts down its sending side look alike on the wire: their data ends. A socket
that was closed answers what is written to it with a reset; nothing shows it before. So the system is asked, which knows
more in two cases. If the other end is on this machine, its socket belongs to no process any more. Or its system, which
remembers a closed socket for a minute at most, has answered a keep-alive probe with a reset.
"""

from __future__ import annotations

import socket
import struct
import sys
from contextlib import suppress

KNOWN = hasattr(socket, "AF_NETLINK") and hasattr(socket, "TCP_INFO")
"""Whether the system tells. On others the end of the data means that the client has left."""

_PROBE_S, _PROBES = 5, 3
_TCP_CLOSE = 7
_SOCK_DIAG, _ANSWERED = 4, 20
"""Linux's NETLINK_SOCK_DIAG, and SOCK_DIAG_BY_FAMILY: the type of its questions and answers."""

_REQUEST = 1
_ANY_STATE, _ANY_COOKIE = 0xFFFFFFFF, b"\xff" * 8
_BYTES_ACKED_AT = 120
"""Where a `tcp_info` has the number of bytes that the other end has acknowledged."""

_INODE_AT = 84
"""Where an `inet_diag_msg` with its `nlmsghdr` has the inode of the socket: 0 when no process has it open."""


def ask_often(sock: socket.socket) -> None:
    """Let the system probe the other end every `_PROBE_S` seconds, and give up after `_PROBES` without an answer."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, _PROBE_S),
        (socket.TCP_KEEPINTVL, _PROBE_S),
        (socket.TCP_KEEPCNT, _PROBES),
    ):
        sock.setsockopt(socket.IPPROTO_TCP, option, value)


def has_left(sock: socket.socket) -> bool:
    """Whether it is known that nobody reads at the other end of `sock`, which has received the end of its data."""
    with suppress(OSError):  # the system does not answer that
        return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _TCP_CLOSE or _abandoned(sock)
    return False


def taken_bytes(sock: socket.socket) -> int:
    """How many bytes the other end has taken so far; 0 if the system does not tell."""
    if KNOWN:
        with suppress(OSError):
            info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_ACKED_AT + 8)
            return int.from_bytes(info[_BYTES_ACKED_AT:], sys.byteorder)
    return 0


def _abandoned(sock: socket.socket) -> bool:
    """Whether the other end is a socket of this machine that no process has open. Raises OSError if it is not ours."""
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
