"""Changes of a stored session after its start.

Optimistic locking: each change takes the `seen` state that it is based on (None: no other replica exists). It returns
False, and changes nothing, if the session is no longer in that state; the caller re-reads and retries.
`noted` makes the answer that is stored with a change (see `OpenDatabase.submit_noted`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from proxy.store.answer import Noted
from proxy.store.bell import Bell
from proxy.store.news import Seen
from proxy.store.open_database import OpenDatabase
from proxy.store.outbox import Outbox
from proxy.store.sql import deletions, reads, rows, writes
from proxy.types import SessionRecord
from tokengrove.options.session import Outcome, SessionStatus

_NO_OUTCOME = "none"


class SessionChanges:
    """Changes of records, rewards and returns. `ends` rings when a session ends here.

    `outbox` gets the events of ends and late rewards, in the same transaction.
    """

    def __init__(self, database: OpenDatabase, ends: Bell, outbox: Outbox) -> None:
        self._database, self._ends, self._metrics, self._outbox = database, ends, database.metrics, outbox
        self._metrics.ended.expect((outcome,) for outcome in (*Outcome, _NO_OUTCOME))

    async def set_rewards(
        self,
        session_id: str,
        updates: Mapping[str, Mapping[str, Any]],
        seen: Seen | None = None,
        noted: Noted | None = None,
    ) -> bool:
        """Set the given fields (reward, rewards, token_rewards, trainable, spans) by interaction id: all or none.

        The returns of an ended session change in the same commit.
        Raises NotFound for an interaction of another session, InvalidRequest for a value that is not finite.
        """
        change = writes.Rewards(session_id, updates, seen, self._outbox.urls)
        done: bool = await self._database.submit_noted(writes.set_rewards, change, noted)
        if done:
            self._database.changed.note(session_id)
            self._outbox.news.ring()
            self._count_rewards(updates)
        return done

    async def update_session(
        self,
        record: SessionRecord,
        seen: Seen | None = None,
        withdrawn: Sequence[str] = (),
        noted: Noted | None = None,
    ) -> bool:
        """Replace the record, and store the hashes of `withdrawn` keys as such. Raises SessionNotFound."""
        update = writes.RecordUpdate(rows.session_row(record), seen, withdrawn)
        done: bool = await self._database.submit_noted(writes.update_sessions, update, noted)
        if done:
            self._database.changed.note(record.session_id)
        return done

    async def end_session(
        self,
        record: SessionRecord,
        seen: Seen | None = None,
        rewards: Mapping[str, Mapping[str, Any]] | None = None,
        noted: Noted | None = None,
    ) -> bool:
        """Store the sealed record, rewards as in `set_rewards`, and the returns under its own rule, in one commit.

        Raises SessionNotFound, and NotFound for a reward of an unknown interaction.
        """
        end = writes.End(rows.session_row(record), seen, rewards or {}, self._outbox.urls)
        done: bool = await self._database.submit_noted(writes.end_sessions, end, noted)
        if done:
            self._ends.ring()
            self._outbox.news.ring()
            self._database.changed.note(record.session_id)
            if record.status is SessionStatus.EXPIRED:
                self._metrics.expired.by[()] += 1
            else:
                self._metrics.ended.by[(record.outcome or _NO_OUTCOME,)] += 1
            if record.withdrawn:
                self._metrics.withdrawn.by[()] += 1
            self._count_rewards(rewards or {})
        return done

    async def withdraw_session(self, session_id: str, at: float, seen: Seen | None, noted: Noted | None = None) -> bool:
        """Withdraw an ended session. `at`: Unix seconds. Raises SessionNotFound."""
        withdrawal = writes.Withdrawal(session_id, at, seen)
        done: bool = await self._database.submit_noted(writes.withdraw_sessions, withdrawal, noted)
        if done:
            self._ends.ring()  # its group may be whole without it
            self._metrics.withdrawn.by[()] += 1
            self._database.changed.note(session_id)
        return done

    async def delete_session(self, session_id: str, noted: Noted | None = None) -> int:
        """Permanently delete a session; return the number of its turns. Raises SessionNotFound."""
        turns: int = await self._database.submit_noted(
            deletions.delete_sessions, deletions.Deletion(session_id, self._outbox.urls), noted
        )
        self._metrics.deleted.by[()] += 1
        self._database.changed.note(session_id)
        await self._database.erase_log()
        return turns

    async def find_idle(self, before: float, limit: int) -> list[str]:
        """Live sessions without a running call, and with no commit, reward or call since `before` (Unix seconds)."""
        return await self._database.read(reads.find_idle, before, limit)

    async def find_episodes(self, after: int, limit: int) -> list[reads.LiveEpisode]:
        """At most `limit` live sessions that may be cut, by number, from that after `after` on."""
        return await self._database.read(reads.find_episodes, after, limit)

    def _count_rewards(self, updates: Mapping[str, Mapping[str, Any]]) -> None:
        self._metrics.rewards.by[()] += sum(not writes.REWARDS.isdisjoint(changes) for changes in updates.values())
