"""Ids are unique among the workers of a server, forked from one process. Those of turns are in order of time."""

from __future__ import annotations

import os
import time

import pytest

from proxy.protocols import wire_protocol
from proxy.protocols.wire_protocol import new_hex, ordered_hex


def test_forked_processes_give_different_ids() -> None:
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.write(writer, new_hex().encode())
        os._exit(0)
    os.waitpid(child, 0)
    with os.fdopen(reader) as read, os.fdopen(writer, "w"):
        assert read.read(32) != new_hex()


def test_ids_of_turns_are_in_order_of_time_and_differ_within_one_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time_ns()
    found = []
    for moment in (now, now, now + 2_000_000, now + 3_600 * 10**9):
        monkeypatch.setattr(wire_protocol.time, "time_ns", lambda moment=moment: moment)
        found.append(ordered_hex())
    assert {len(name) for name in found} == {32} and len(set(found)) == 4
    assert found[1] < found[2] < found[3]
