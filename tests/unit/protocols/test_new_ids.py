"""Ids of replies are unique among the workers of a server, which are forked from one process."""

from __future__ import annotations

import os

from proxy.protocols.wire_protocol import new_hex


def test_forked_processes_give_different_ids() -> None:
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.write(writer, new_hex().encode())
        os._exit(0)
    os.waitpid(child, 0)
    with os.fdopen(reader) as read, os.fdopen(writer, "w"):
        assert read.read(32) != new_hex()
