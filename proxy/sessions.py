"""Live sessions: how they begin, what they hold and when they end; `access` says who may reach them.

A session is in memory while it is used and can be loaded again from the store at any time: both give the same tree.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from proxy.attempts import Attempt, recall
from proxy.errors import (
    InvalidRequest,
    KeyInUse,
    ProxyError,
    SessionClosed,
    SessionNotFound,
)
from proxy.keys import Keyring, hash_key
from proxy.metrics import Metrics
from proxy.session_ids import check_session_id, is_session_id
from proxy.settings import Settings
from proxy.store.store import Store
from proxy.trajectory.cache import InteractionCache
from proxy.trajectory.rewards import compute_returns
from proxy.types import Credit, Interaction, Outcome, SessionRecord, SessionStatus, Status

_PAGE = 1000
LIMIT_COUNTS = frozenset({"max_turns", "max_tokens_per_turn", "max_context_tokens", "max_total_tokens"})
LIMITS = LIMIT_COUNTS | {"deadline_s", "on_context_overflow"}


@dataclass(slots=True, eq=False)
class Session:
    """A live session: its record, its tree, and the turns that run in it.

    `attempts` are by request hash, oldest first. `turns_taken` counts complete turns and running ones. A session that
    was only named is not `stored` before its first turn. Rewards and the end take the `lock`, one after the other.
    """

    record: SessionRecord
    cache: InteractionCache
    sampled_tokens: int = 0
    turns_taken: int = 0
    running: int = 0
    waiting: int = 0
    stored: bool = True
    attempts: dict[str, list[Attempt]] = field(default_factory=dict)
    used_at: float = field(default_factory=time.monotonic)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def id(self) -> str:
        return self.record.session_id

    def check_open(self) -> None:
        """Raise SessionClosed when the session takes no more turns."""
        if self.record.status is not SessionStatus.ACTIVE:
            raise SessionClosed(f"session {self.id!r} has ended; start a new one")

    def complete(self) -> list[Interaction]:
        """The committed complete interactions in order of `seq`."""
        nodes = (node.interaction for node in self.cache.nodes.values())
        return sorted((i for i in nodes if i.seq >= 0), key=lambda i: i.seq)


@dataclass(frozen=True, slots=True)
class StartedSession:
    """A new session and its keys in the clear: nobody can read them again."""

    record: SessionRecord
    api_key: str
    control_key: str
    path_key: str


class Sessions:
    """All sessions of this server."""

    def __init__(self, store: Store, settings: Settings, metrics: Metrics, keys: Keyring) -> None:
        self._store = store
        self._settings = settings
        self._metrics = metrics
        self._live: dict[str, Session] = {}
        self._loading: dict[str, asyncio.Task[Session]] = {}
        self._keys = keys
        self._next_number: dict[str, int] = {}
        self._choosing = asyncio.Lock()

    async def get(self, session_id: str) -> Session:
        """A session from memory or from the store. Raises SessionNotFound."""
        session = self._live.get(session_id)
        if session is not None:
            return session
        task = self._loading.get(session_id)
        if task is None:
            task = self._loading[session_id] = asyncio.create_task(self._load(session_id))
            task.add_done_callback(lambda _: self._loading.pop(session_id, None))
        return await asyncio.shield(task)

    async def start(self, body: Mapping[str, Any]) -> StartedSession:
        """A new session with fresh keys. Raises InvalidRequest naming the field, KeyInUse."""
        task_id = body.get("task_id", "")
        if body.get("session_id") is None and task_id not in self._next_number:
            self._next_number[task_id] = await self._store.count_sessions(task_id)
        record = self._new_record(body)
        api_key = body.get("api_key")
        if api_key is None:
            return await self._start(record, _new_key("sk"), body.get("session_id") is not None)
        async with self._choosing:  # of two that choose the same key at once, the second finds it in use
            await self._check_chosen(api_key)
            return await self._start(record, api_key, body.get("session_id") is not None)

    async def _start(self, record: SessionRecord, api_key: str, chosen_id: bool) -> StartedSession:
        keys = StartedSession(record, api_key, _new_key("ck"), secrets.token_urlsafe(12))
        record.api_key_hash, record.control_key_hash = hash_key(keys.api_key), hash_key(keys.control_key)
        record.path_key_hash = hash_key(keys.path_key)
        while True:
            try:
                await self._create(record)
                return keys
            except InvalidRequest as error:
                if chosen_id or error.param != "session_id":
                    raise
                record.session_id = self._number(record.task_id)

    async def reward(self, session: Session, changes: Mapping[str, Mapping[str, Any]]) -> None:
        """Set raw rewards: for each interaction id those of reward, rewards, token_rewards that change."""
        await self._store.set_rewards(session.id, changes)
        for interaction_id, change in changes.items():
            for name, value in change.items():
                setattr(session.cache.nodes[interaction_id].interaction, name, value)
        await self.refresh_returns(session)

    async def end(
        self,
        session: Session,
        *,
        outcome: Outcome | None = None,
        exit_reason: str | None = None,
        metrics: Mapping[str, Any] | None = None,
        finished: bool | None = None,
    ) -> int:
        """Seal a session and persist its returns. Idempotent; returns the count of complete interactions."""
        record = session.record
        if record.status is SessionStatus.ACTIVE:
            self.ensure_stored(session)
            now = time.time()
            session.record = replace(
                record,
                status=SessionStatus.ENDED,
                ended_at=now,
                updated_at=now,
                outcome=outcome,
                exit_reason=exit_reason,
                metrics=metrics or {},
                finished=finished,
            )
            try:
                await self._store.end_session(session.record, self.returns(session))
            except ProxyError:
                session.record = record
                raise
            session.ended.set()
            self._keys.release(session.record)
        return len(session.complete())

    async def page(self, after: str | None) -> list[SessionRecord]:
        """A page of sessions, oldest first, after the session id `after`."""
        return await self._store.find_sessions(after=after, limit=_PAGE)

    async def look_at(self, session_id: str) -> tuple[Session, list[Interaction], int]:
        """A session, all its stored interactions (failed ones too) by `seq`, and how many calls have not ended."""
        session = await self.get(session_id)
        begun = await self.begun(session_id)
        return session, await self._store.load_interactions(session_id), begun

    async def begun(self, session_id: str) -> int:
        """How many calls have begun and not ended. Ask before the interactions are read: none is then missed."""
        live = self._live.get(session_id)
        return max(len(await self._store.load_begun(session_id)), live.running if live is not None else 0)

    async def wait_ended(self, session_ids: Sequence[str], wait_s: float) -> None:
        """Wait until all of these sessions have ended, for `wait_s` at most."""
        sessions = [await self.get(session_id) for session_id in session_ids]
        waits = [asyncio.ensure_future(session.ended.wait()) for session in sessions]
        for session in sessions:
            session.waiting += 1
        try:
            if waits:
                await asyncio.wait(waits, timeout=wait_s)
        finally:
            for session, task in zip(sessions, waits, strict=True):
                session.waiting -= 1
                task.cancel()

    def returns(self, session: Session) -> dict[str, float]:
        """The returns of a session by its own discount and credit rule."""
        return compute_returns(session.complete(), session.record.discount, session.record.credit)

    async def refresh_returns(self, session: Session) -> None:
        """Persist the returns of an ended session anew: a reward or a late interaction changed them."""
        record = session.record
        if record.status is not SessionStatus.ACTIVE:
            await self._store.set_returns(record.session_id, record.discount, record.credit, self.returns(session))

    def forget_idle(self, idle_s: float) -> None:
        """Drop from memory what nobody used for `idle_s` seconds; the store keeps everything."""
        limit = time.monotonic() - idle_s
        for session_id, session in list(self._live.items()):
            if session.used_at < limit and not session.running and not session.waiting:
                del self._live[session_id]
                self._keys.release(session.record)
        self._metrics.sessions.set(len(self._live))

    async def get_or_create(self, session_id: str) -> Session:
        """The session, new when nobody named it before; its row goes to the disk with its first turn."""
        session = self._live.get(session_id)
        if session is not None:
            return session
        try:
            return await self.get(session_id)
        except SessionNotFound:
            record = self._new_record({"session_id": session_id, "task_id": session_id})
        if session_id not in self._live:
            self._live[session_id] = Session(record, InteractionCache(), stored=False)
            self._metrics.sessions.set(len(self._live))
        return self._live[session_id]

    def ensure_stored(self, session: Session) -> None:
        """Queue the row of a session that was only named so far. What follows it in the queue is waited for, not it."""
        if not session.stored:
            session.stored = True
            creation = asyncio.ensure_future(self._store.create_session(session.record))
            creation.add_done_callback(lambda done: self._created(session.id, done))

    def _created(self, session_id: str, creation: asyncio.Future[None]) -> None:
        if not creation.cancelled() and creation.exception() is not None:
            self._live.pop(session_id, None)  # the next request tries again, or loads what another server created

    async def _create(self, record: SessionRecord) -> Session:
        await self._store.create_session(record)
        session = self._live.setdefault(record.session_id, Session(record, InteractionCache()))
        self._keys.add(record)
        self._metrics.sessions.set(len(self._live))
        return session

    async def _load(self, session_id: str) -> Session:
        # What cannot be an id is not looked up: some databases fail on a NUL character.
        record = await self._store.load_session(session_id) if is_session_id(session_id) else None
        if record is None:
            raise SessionNotFound(f"there is no session {session_id!r}; start it with POST /rl/start_session")
        interactions = await self._store.load_interactions(session_id)
        session = Session(record, InteractionCache(interactions), _count_sampled(interactions))
        session.attempts = recall(interactions, await self._store.load_unreplied(session_id))
        session.turns_taken = len(session.cache.nodes)
        if record.status is not SessionStatus.ACTIVE:
            session.ended.set()
        session = self._live.setdefault(session_id, session)
        self._metrics.sessions.set(len(self._live))
        return session

    async def _check_chosen(self, api_key: Any) -> None:
        if not isinstance(api_key, str) or not api_key:
            raise InvalidRequest("'api_key' must be a non-empty string", param="api_key")
        if not (self._settings.loopback or self._settings.allow_chosen_keys):
            raise InvalidRequest("choosing keys needs --allow-chosen-keys beyond loopback", param="api_key")
        holder = await self._keys.find_session(api_key)
        if holder is not None and (await self.get(holder)).record.status is SessionStatus.ACTIVE:
            raise KeyInUse(f"this api_key belongs to the live session {holder!r}; end it first", param="api_key")

    def _new_record(self, body: Mapping[str, Any]) -> SessionRecord:
        session_id = body.get("session_id")
        task_id = body.get("task_id", "" if session_id is None else session_id)
        now = time.time()
        return SessionRecord(
            session_id=self._number(task_id) if session_id is None else check_session_id(session_id),
            task_id=task_id,
            group_id=body.get("group_id"),
            sampling=body.get("sampling") or {},
            limits=body.get("limits") or {},
            metadata=body.get("metadata") or {},
            discount=self._settings.discount if body.get("discount") is None else body["discount"],
            credit=Credit(body.get("credit") or self._settings.credit),
            created_at=now,
            updated_at=now,
        )

    def _number(self, task_id: str) -> str:
        """The next free `<task_id>-<n>` that this server knows of; the store refuses one that is taken."""
        number = self._next_number.get(task_id, 0)
        self._next_number[task_id] = number + 1
        return check_session_id(f"{task_id}-{number}", "task_id")


def _count_sampled(interactions: Sequence[Interaction]) -> int:
    return sum(len(i.output_ids) for i in interactions if i.status is Status.COMPLETE)


def _new_key(prefix: str) -> str:
    return f"{prefix}-{secrets.token_urlsafe(24)}"
