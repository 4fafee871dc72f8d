"""`/rl/withdraw_session`: a session that counts for nothing any more, but stays to be read.

It leaves its group, the queue of claims and the exports that do not name it, in one commit; a live one ends with it.
Its id stays taken, and its turns stay as they are.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from proxy.sessions.endings import Endings
from proxy.sessions.live_session import LiveSession
from proxy.sessions.registry import Registry
from proxy.store.answer import Noted
from proxy.store.session_changes import SessionChanges
from tokengrove.errors import EndedOtherwise
from tokengrove.options.session import SessionStatus


class Withdrawal:
    """Withdraws sessions, for good. `session.lock` is held meanwhile."""

    def __init__(self, registry: Registry, endings: Endings, changes: SessionChanges) -> None:
        self._registry, self._endings, self._changes = registry, endings, changes

    async def withdraw(self, session: LiveSession, ending: Mapping[str, Any], noted: Noted | None = None) -> None:
        """Withdraw a session; a live one ends with the fields of `ending`. One that is withdrawn stays as it is.

        `noted` makes the answer that is stored with it. Turns that run are left to the caller. Raises SessionNotFound.
        """
        await self._registry.refresh(session)
        while not session.record.withdrawn:
            if session.record.status is SessionStatus.ACTIVE:
                with suppress(EndedOtherwise):  # another replica ended it meanwhile: that end stays
                    await self._endings.end(session, **ending, withdrawn=True, noted=noted)
            else:
                await self._withdraw_ended(session, noted)
            await self._registry.refresh(session)

    async def _withdraw_ended(self, session: LiveSession, noted: Noted | None) -> None:
        now = time.time()
        withdrawn, seen = replace(session.record, withdrawn_at=now, updated_at=now), self._registry.seen(session)
        try:
            done = await self._changes.withdraw_session(session.id, now, seen, noted)
        except asyncio.CancelledError:
            session.record = withdrawn  # its commit goes on
            raise
        if done and not self._registry.shared:
            session.record = withdrawn
