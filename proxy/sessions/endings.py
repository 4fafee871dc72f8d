"""The end of a session: it takes no more turns, its returns are stored, and its keys are forgotten in memory."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
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

    def __init__(self, registry: Registry, named: NamedSessions, changes: SessionChanges, keys: Keyring) -> None:
        self._registry, self._named, self._changes, self._keys = registry, named, changes, keys

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
        """Seal a session, and store the last rewards and the returns with it; False if it has ended before.

        `rewards` decides on them by what is known of the session then. One commit has all: an end that fails rewards
        no turn, so that it can be sent again, whatever was committed meanwhile. If the session has ended, nothing
        changes. Raises EndedOtherwise if a given field differs from what its end said then.
        `noted` makes the answer that is stored with the end. `withdrawn`: it is withdrawn as it ends.
        A session that is `in_use` once it has been read stays open; one that is to expire, too, if another replica
        changed it meanwhile.
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
        if status is not SessionStatus.EXPIRED:  # to expire a session that ended meanwhile is no other end
            _check_same(session.record, said)
        return False

    async def _seal(self, session: LiveSession, sealed: SessionRecord, changes: Changes, noted: Noted | None) -> bool:
        """Store the sealed record; no turn begins meanwhile. Return False if another replica changed the session.

        Until the commit the session is shown as active: what its end gives back, such as capacity, is not there before.
        """
        session.ending = True
        try:
            done = await self._changes.end_session(
                sealed, session.returns(changes), self._registry.seen(session), changes, noted
            )
        except asyncio.CancelledError:
            session.record = sealed  # its commit goes on
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
        return done


def _check_same(record: SessionRecord, said: Mapping[str, Any]) -> None:
    """Raise EndedOtherwise for the first field that is said and is not what the end of the session said."""
    for name, value in said.items():
        if value is not None and value != {} and value != getattr(record, name):
            raise ended_otherwise(record, name)


def ended_otherwise(record: SessionRecord, name: str) -> EndedOtherwise:
    """The error for an end that says something else in the field `name` than the first."""
    how = "ended" if record.status is SessionStatus.ENDED else "expired"
    way_out = "rewards are changed with /rl/set_reward"
    if name == "score":
        way_out = "a named reward (/rl/set_reward) takes its place in exports with its 'reward_name'"
    return EndedOtherwise(
        f"session {brief(record.session_id)} has {how} already, with another '{name}'; what its end "
        f"said stays, {way_out}",
        param=name,
    )
