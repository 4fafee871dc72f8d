"""The backlog of sessions is counted up to a limit, by what state they are in, on both databases."""

from __future__ import annotations

from dataclasses import replace

from proxy.store.leases import Acknowledgement, LeaseRequest
from proxy.store.session_query import SessionQuery
from proxy.store.sql import backlog
from proxy.store.store import Store
from proxy.types import SessionRecord
from tokengrove.options.session import Credit, SessionStatus

ACTIVE = SessionRecord("s", "t", discount=1.0, credit=Credit.TREE, created_at=1.0, updated_at=1.0)


async def start(store: Store, *names: str) -> None:
    for name in names:
        await store.starts.create_session(replace(ACTIVE, session_id=name))


async def end(store: Store, name: str, ended_at: float) -> None:
    record = replace(ACTIVE, session_id=name, status=SessionStatus.ENDED, ended_at=ended_at)
    assert await store.changes.end_session(record)


async def counted(store: Store, most: int = 100, now: float = 2e9) -> backlog.Backlog:
    return await store.database.read(backlog.count, most, now)


async def test_sessions_count_as_active_waiting_or_leased_until_they_are_acknowledged(store: Store) -> None:
    assert await counted(store) == (0, 0, 0, None, 0)
    await start(store, "a", "b", "c", "d")
    assert await counted(store) == (4, 0, 0, None, 0)
    for name, ended_at in (("a", 10.0), ("b", 20.0), ("c", 30.0)):
        await end(store, name, ended_at)
    assert await counted(store) == (1, 3, 0, 10.0, 0)
    wanted = SessionQuery()
    lease = await store.claims.claim(LeaseRequest(wanted=wanted, claim_id="c", limit=1, lease_s=60.0))
    assert lease.sessions == ("a",)
    assert await counted(store, now=lease.lease_until - 1.0) == (1, 2, 1, 20.0, 0)
    assert await counted(store, now=lease.lease_until + 1.0) == (1, 3, 0, 10.0, 0), (
        "a lease that has expired holds nothing"
    )
    await store.claims.acknowledge(Acknowledgement(session_ids=("a",), claim_id="c"))
    assert await counted(store) == (1, 2, 0, 20.0, 0)


async def test_no_count_goes_beyond_its_limit(store: Store) -> None:
    names = [f"s{number}" for number in range(5)]
    await start(store, *names)
    assert await counted(store, most=3) == (3, 0, 0, None, 0)
    for number, name in enumerate(names):
        await end(store, name, float(number))
    assert await counted(store, most=3) == (0, 3, 0, 0.0, 0)
