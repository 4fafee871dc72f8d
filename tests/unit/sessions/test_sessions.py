"""A session whose row comes to the store while somebody looks for it there."""

from __future__ import annotations

from typing import Any

import pytest

from proxy.errors import SessionNotFound
from proxy.metrics import Metrics
from proxy.sessions.keys import Keyring
from proxy.sessions.session import Session
from proxy.sessions.sessions import Sessions
from proxy.settings import Settings
from proxy.trajectory.cache import InteractionCache
from proxy.types import SessionRecord


class EmptyStore:
    """Shared with other replicas, and holds nothing; `meanwhile` gets its row while it is asked."""

    shared = True

    def __init__(self) -> None:
        self.meanwhile: Session | None = None

    async def load_news(self, session_id: str, seen: Any) -> None:
        if self.meanwhile is not None:
            self.meanwhile.confirmed = True


def live(store: Any, *, confirmed: bool) -> tuple[Sessions, Session]:
    sessions = Sessions(store, Settings(), Metrics(), Keyring(store, None))
    session = Session(SessionRecord("s"), InteractionCache(), confirmed=confirmed)
    sessions._live["s"] = session
    return sessions, session


async def test_a_row_that_comes_while_it_is_looked_for_leaves_the_session_as_it_is() -> None:
    store = EmptyStore()
    sessions, session = live(store, confirmed=False)
    store.meanwhile = session
    assert await sessions.get("s") is session
    assert sessions._live == {"s": session} and not session.ended.is_set()


async def test_a_row_that_was_there_and_is_gone_ends_the_session() -> None:
    sessions, session = live(EmptyStore(), confirmed=True)
    with pytest.raises(SessionNotFound):
        await sessions.get("s")
    assert not sessions._live and session.ended.is_set()
