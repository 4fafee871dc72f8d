"""Ends, deletes and withdraws sessions.

An ended session takes no more turns; its returns are stored, and its keys are dropped from memory. A deletion is
permanent. A withdrawn session is excluded from training and can still be read.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from proxy.sessions.keys import Keyring
from proxy.sessions.live_session import Changes, LiveSession
from proxy.sessions.named_sessions import NamedSessions
from proxy.sessions.registry import Registry
from proxy.store.answer import Noted
from proxy.store.session_changes import SessionChanges
from proxy.types import SessionRecord
from tokengrove.errors import EndedOtherwise, brief
from tokengrove.options.session import Outcome, SessionStatus


class Endings:
    """Seals sessions."""

    def __init__(
        self,
        registry: Registry,
        named: NamedSessions,
        changes: SessionChanges,
        keys: Keyring,
        forget: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`forget` is called with the id of each session that was ended here."""
        self._registry, self._named, self._changes, self._keys = registry, named, changes, keys
        self._forget = forget

    async def end(
        self,
        session: LiveSession,
        *,
        status: SessionStatus = SessionStatus.ENDED,
        outcome: Outcome | None = None,
        exit_reason: str | None = None,
        metrics: Mapping[str, Any] | None = None,
        finished: bool | None = None,
        score: float | None = None,
        withdrawn: bool = False,
        rewards: Callable[[], Changes] = dict,
        noted: Noted | None = None,
        in_use: Callable[[], bool] = lambda: False,
    ) -> bool:
        """Seal a session, and store the last rewards and the returns with it. Return False if it stays as it was.

        `rewards` returns the last rewards; it is called after the session was refreshed. Everything is one commit: an
        end that fails rewards no turn, so it can be sent again, whatever was committed meanwhile. If the session has
        already ended, nothing changes; raises EndedOtherwise if a given field differs from the first end.
        `noted` makes the answer that is stored with the end. `withdrawn`: the end also withdraws the session.
        A session that is `in_use` after the refresh stays open. A session that is to expire also stays open if another
        replica changed it meanwhile.
        """
        said: Mapping[str, Any] = {"outcome": outcome, "exit_reason": exit_reason, "metrics": metrics}
        said = {**said, "finished": finished, "score": score}
        await self._registry.refresh(session)
        while session.record.status is SessionStatus.ACTIVE:
            if in_use():
                return False
            changes = rewards()
            self._named.ensure_stored(session)
            now = time.time()
            sealed = replace(
                session.record,
                status=status,
                ended_at=now,
                updated_at=now,
                outcome=outcome,
                exit_reason=exit_reason,
                metrics=metrics or {},
                finished=finished,
                score=score,
                withdrawn_at=now if withdrawn else None,
            )
            if await self._seal(session, sealed, changes, noted):
                return True
            await self._registry.refresh(session)
            if status is SessionStatus.EXPIRED:
                return False
        if status is not SessionStatus.EXPIRED:  # expiry of an ended session does not conflict with its end
            _check_same(session.record, said)
        return False

    async def _seal(self, session: LiveSession, sealed: SessionRecord, changes: Changes, noted: Noted | None) -> bool:
        """Store the sealed record; no turn begins meanwhile. Return False if another replica changed the session.

        The session appears as active until the commit, which also returns its capacity.
        """
        session.ending = True
        try:
            done = await self._changes.end_session(sealed, self._registry.seen(session), changes, noted)
        except asyncio.CancelledError:
            session.record = sealed  # the commit continues
            session.reward(changes)
            raise
        finally:
            session.ending = False
        if done:
            if session.record.status is SessionStatus.ACTIVE:  # a record that was read since the commit is newer
                session.record = sealed
                session.reward(changes)
            session.ended.set()
            self._keys.release(sealed)
            self._forget(session.id)
        return done


def _check_same(record: SessionRecord, said: Mapping[str, Any]) -> None:
    """Raise EndedOtherwise for the first given field that differs from the end of the session."""
    for name, value in said.items():
        if value is not None and value != {} and value != getattr(record, name):
            raise ended_otherwise(record, name)


def ended_otherwise(record: SessionRecord, name: str) -> EndedOtherwise:
    """The error for an end whose field `name` differs from the first end."""
    how = "ended" if record.status is SessionStatus.ENDED else "expired"
    way_out = "rewards are changed with /rl/set_reward"
    if name == "score":
        way_out = "a named reward (/rl/set_reward) takes its place in exports with its 'reward_name'"
    return EndedOtherwise(
        f"session {brief(record.session_id)} has {how} already, with another '{name}'; what its end "
        f"said stays, {way_out}",
        param=name,
    )


class Deletion:
    """Deletes sessions from the store and from memory."""

    def __init__(self, registry: Registry, changes: SessionChanges, forget: Callable[[str], None]) -> None:
        """`forget` is called with the id of each session that was deleted here."""
        self._registry, self._changes, self._forget = registry, changes, forget

    async def delete(self, session: LiveSession, noted: Noted | None = None) -> int:
        """Delete a session; return the number of its turns. Raises SessionNotFound.

        The session takes no turns meanwhile. Running turns are left to the caller: they can no longer be stored.
        """
        async with session.lock:
            session.ending = True
            try:
                turns = await self._changes.delete_session(session.id, noted)
            finally:
                session.ending = False
            self._registry.forget_deleted(session)
            self._forget(session.id)
        return turns


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
