"""Notifies systemd when the server listens (`Type=notify`). Until then, the unit is starting.

The protocol is sd_notify(3): one datagram to the socket that `NOTIFY_SOCKET` names. Without this variable, nothing is
sent.
"""

from __future__ import annotations

import logging
import os
import socket

VARIABLE = "NOTIFY_SOCKET"

logger = logging.getLogger(__name__)


def tell_ready() -> None:
    """Notify systemd that the start is complete. A failure is only logged."""
    address = os.environ.get(VARIABLE)
    if not address:
        return
    if address.startswith("@"):  # a name in Linux's abstract namespace
        address = "\0" + address[1:]
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.sendto(b"READY=1", address)
    except OSError as error:
        logger.warning("systemd cannot be told that the server is ready: %s: %s", VARIABLE, error.strerror or error)
