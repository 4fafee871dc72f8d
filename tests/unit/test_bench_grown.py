"""The grown database of a bench is one that a server could have written."""

from __future__ import annotations

import asyncio

import pytest

from proxy.commands.audit import audit
from proxy.store.inspection import inspecting
from proxy.store.store import Store
from proxy.types import SessionRecord
from tests.bench import grown_database
from tests.bench.grown_database import GROUP, TURNS, grow
from tests.databases import execute


def test_a_grown_database_has_sessions_of_all_kinds_and_no_faults(
    unmigrated_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grown_database, "OPEN_EACH", 4)
    monkeypatch.setattr(grown_database, "WAITING_GROUPS", 2)
    grow(unmigrated_url, 6 * GROUP * TURNS)
    with inspecting(unmigrated_url) as inspection:
        result = audit(inspection)
    assert (result.sessions, result.interactions, result.findings) == (6 * GROUP, 6 * GROUP * TURNS, [])
    counts = "SELECT status, acknowledged_at IS NULL, count(*) FROM sessions GROUP BY 1, 2 ORDER BY 1, 2"
    assert [tuple(row) for row in execute(unmigrated_url, counts)] == [
        ("active", True, 2 * GROUP),  # the copied group, and each fourth
        ("ended", False, 3 * GROUP),
        ("ended", True, GROUP),
    ]
    asyncio.run(write_session(unmigrated_url))  # has a new number


async def write_session(url: str) -> None:
    store = Store.open(url)
    try:
        await store.starts.create_session(SessionRecord("new"))
    finally:
        await store.close()
