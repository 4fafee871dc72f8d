"""The end of a session is seen when it is committed, and not before; no turn begins in between."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from proxy.engine.interface import PauseMode
from proxy.sessions.parts import SessionParts
from proxy.settings import Settings
from proxy.store.store import Store
from proxy.telemetry.metrics import Metrics
from tests.databases import execute
from tests.support import default_url, says, serving, until, user
from tokengrove.errors import SessionClosed, StoreUnavailable
from tokengrove.options.session import SessionStatus


class HeldCommit:
    """Holds the commit of each end until `go` is set, and then fails if there is a `failure`."""

    def __init__(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        self.entered, self.go = asyncio.Event(), asyncio.Event()
        self.failure: Exception | None = None
        self._end = store.changes.end_session
        monkeypatch.setattr(store.changes, "end_session", self)

    async def __call__(self, *values: Any) -> bool:
        self.entered.set()
        await self.go.wait()
        if self.failure is not None:
            raise self.failure
        return await self._end(*values)


async def test_a_session_has_ended_for_others_when_its_end_is_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store.open(f"sqlite:///{tmp_path / 'end.db'}")
    parts = SessionParts(store, Settings(), Metrics(), lambda: 0)
    await parts.starter.start({"session_id": "s"})
    session = await parts.registry.get("s")
    held = HeldCommit(store, monkeypatch)
    end = asyncio.ensure_future(parts.endings.end(session))
    await held.entered.wait()
    assert session.record.status is SessionStatus.ACTIVE and not session.ended.is_set()
    with pytest.raises(SessionClosed):
        session.check_open()
    held.go.set()
    await end
    assert session.record.status is SessionStatus.ENDED and session.ended.is_set()
    await store.close()


async def test_a_session_whose_end_was_refused_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store.open(f"sqlite:///{tmp_path / 'end.db'}")
    parts = SessionParts(store, Settings(), Metrics(), lambda: 0)
    await parts.starter.start({"session_id": "s"})
    session = await parts.registry.get("s")
    held = HeldCommit(store, monkeypatch)
    held.failure = StoreUnavailable("the disk is full")
    held.go.set()
    with pytest.raises(StoreUnavailable):
        await parts.endings.end(session)
    session.check_open()
    assert not session.ended.is_set()
    held.failure = None
    assert await parts.endings.end(session)
    assert session.record.status is SessionStatus.ENDED
    await store.close()


async def test_whoever_holds_something_of_a_session_is_told_once_that_it_has_ended_or_was_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store.open(f"sqlite:///{tmp_path / 'end.db'}")
    forgotten: list[str] = []
    parts = SessionParts(store, Settings(), Metrics(), lambda: 0, forgotten.append)
    for name in ("a", "b"):
        await parts.starter.start({"session_id": name})
    session = await parts.registry.get("a")
    held = HeldCommit(store, monkeypatch)
    held.failure = StoreUnavailable("the disk is full")
    held.go.set()
    with pytest.raises(StoreUnavailable):
        await parts.endings.end(session)
    assert forgotten == []
    held.failure = None
    await parts.endings.end(session)
    await parts.endings.end(session)
    await parts.deletion.delete(await parts.registry.get("b"))
    assert forgotten == ["a", "b"]
    await store.close()


async def test_a_turn_that_is_committed_while_its_session_ends_gets_its_return(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tmp_path, says("late")) as server:
        held = HeldCommit(server.app.state.store, monkeypatch)
        await server.engine.pause(PauseMode.IN_PLACE)
        turn = asyncio.ensure_future(server.chat([user("a")]))
        await until(lambda: bool(server.engine.running))
        end = asyncio.ensure_future(server.ok("/s/rl/end_session", {}))
        await held.entered.wait()
        await server.engine.resume()
        await turn
        held.go.set()
        await end
    assert execute(default_url(tmp_path), "SELECT value FROM returns") == [(0.0,)]
