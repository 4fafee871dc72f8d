"""`/rl/withdraw_session`: excludes a session from training; it can still be read.

One commit removes it from its group, from the claim queue and from exports that do not name it, and ends it if it is
live. Its id stays taken, and its turns do not change.
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
    """Withdraws sessions permanently. The caller holds `session.lock`."""

    def __init__(self, registry: Registry, endings: Endings, changes: SessionChanges) -> None:
        self._registry, self._endings, self._changes = registry, endings, changes

    async def withdraw(self, session: LiveSession, ending: Mapping[str, Any], noted: Noted | None = None) -> None:
        """Withdraw a session; a live session ends with the fields of `ending`. A withdrawn session does not change.

        `noted` makes the answer that is stored with it. Running turns are left to the caller. Raises SessionNotFound.
        """
        await self._registry.refresh(session)
        while not session.record.withdrawn:
            if session.record.status is SessionStatus.ACTIVE:
                with suppress(EndedOtherwise):  # another replica ended it meanwhile; that end stays
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
            session.record = withdrawn  # the commit continues
            raise
        if done and not self._registry.shared:
            session.record = withdrawn
