"""Live sessions: how they begin, what they hold and when they end; `access` says who may reach them.

A session is in memory while it is used and can be loaded again from the store at any time: both give the same tree.
Where replicas share the store, a session is looked at again each time that it is asked for, and no change is made on
anything but the newest state: the store refuses, and the change is decided anew.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from proxy.errors import (
    InvalidRequest,
    ProxyError,
    SessionNotFound,
    StoreUnavailable,
    TooManyRequests,
)
from proxy.metrics import Metrics
from proxy.sessions.ids import check_session_id, is_session_id
from proxy.sessions.keys import Keyring, hash_key
from proxy.sessions.replica import NOTHING_SEEN, absorb, settle
from proxy.sessions.session import KeyKind, Session, StartedSession
from proxy.settings import Settings
from proxy.store.revisions import Seen
from proxy.store.starts import too_stale
from proxy.store.store import Store
from proxy.trajectory.cache import InteractionCache
from proxy.trajectory.returns import compute_returns
from proxy.types import Credit, Interaction, Outcome, SessionRecord, SessionStatus

logger = logging.getLogger(__name__)

_PAGE = 1000
# How often a note that a reply went out is looked for; it follows the reply within some 50 ms.
_SETTLE_S = 0.02
# How often the ends of sessions on other replicas are looked for, while an export waits for them: one short query.
_WATCH_S, _WATCHED = 0.5, 1000


class Sessions:
    """All sessions of this server."""

    def __init__(
        self,
        store: Store,
        settings: Settings,
        metrics: Metrics,
        keys: Keyring,
        weight_version: Callable[[], int] = lambda: 0,
    ) -> None:
        """`weight_version` is the engine's at the moment."""
        self._weight_version = weight_version
        self._store = store
        self._settings = settings
        self._metrics = metrics
        self._live: dict[str, Session] = {}
        self._loading: dict[str, asyncio.Task[Session]] = {}
        self._keys = keys
        self._next_number: dict[str, int] = {}

    async def get(self, session_id: str) -> Session:
        """A session from memory or from the store, as it is now. Raises SessionNotFound."""
        session = self._live.get(session_id)
        if session is not None:
            await self.refresh(session)
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
        record.took_capacity = self._settings.capacity_control
        record.keys_expire_at = self._expiry(body.get("key_lifetime_s"))
        api_key = body.get("api_key")
        if api_key is None:
            return await self._start(record, _new_key("sk"), body.get("session_id") is not None)
        self._check_chosen(api_key)
        return await self._start(record, api_key, body.get("session_id") is not None, chosen_key=True)

    async def _start(
        self, record: SessionRecord, api_key: str, chosen_id: bool, chosen_key: bool = False
    ) -> StartedSession:
        control_key, path_key = _new_key("ck"), _new_path_key()
        keys = StartedSession(record, api_key, control_key, path_key)
        record.api_key_hash, record.control_key_hash = hash_key(api_key), hash_key(control_key)
        record.path_key_hash = hash_key(path_key)
        while True:
            try:
                await self._create(record, chosen_key)
                return keys
            except InvalidRequest as error:
                if chosen_id or error.param != "session_id":
                    raise
                await self._skip_taken(record.task_id)
                record.session_id = self._number(record.task_id)

    async def rotate_keys(
        self, session: Session, kinds: Collection[KeyKind], lifetime_s: float | None
    ) -> StartedSession:
        """New keys of these kinds. They and the others are good for `lifetime_s` (None: as the server is set)."""
        api_key = _new_key("sk") if KeyKind.AGENT in kinds else None
        control_key = _new_key("ck") if KeyKind.CONTROL in kinds else None
        path_key = _new_path_key() if KeyKind.PATH in kinds else None
        while True:
            old = session.record
            record = replace(
                old,
                api_key_hash=hash_key(api_key) if api_key else old.api_key_hash,
                control_key_hash=hash_key(control_key) if control_key else old.control_key_hash,
                path_key_hash=hash_key(path_key) if path_key else old.path_key_hash,
                keys_expire_at=self._expiry(lifetime_s),
                updated_at=time.time(),
            )
            if await self._store.update_session(record, self.seen(session)):
                break
            await self.refresh(session)
        self._keys.release(old)
        self._keys.add(record)
        if not self._store.shared:
            session.record = record
        await self.refresh(session)
        return StartedSession(record, api_key, control_key, path_key)

    def _expiry(self, lifetime_s: float | None) -> float | None:
        lifetime_s = self._settings.key_lifetime_s if lifetime_s is None else lifetime_s
        return None if lifetime_s is None else time.time() + lifetime_s

    async def refresh(self, session: Session) -> None:
        """Learn what other replicas did to a session; costs nothing where there can be none. Raises SessionNotFound."""
        if not self._store.shared:
            return
        known = session.confirmed  # its row may come while this query looks for it in vain
        news = await self._store.load_news(session.id, session.seen)
        if news is not None:
            session.stored = session.confirmed = True
            absorb(session, news, elsewhere=True)
        elif known:
            self._forget(session)
            raise SessionNotFound(f"there is no session {session.id!r} any more; start it with POST /rl/start_session")

    async def settle(self, session: Session, request_hash: str) -> None:
        """Wait until it is known whether the replies to equal requests of before went out, for seconds at most.

        Another replica may be writing one out, or may have died before it could.
        """
        while unsettled := [a for a in session.attempts.get(request_hash, ()) if a.unsettled]:
            if not settle(unsettled, await self._store.load_unreplied(session.id)):
                await asyncio.sleep(_SETTLE_S)

    def seen(self, session: Session) -> Seen | None:
        """What a change of this session is decided on; None where nobody else can change it."""
        return session.seen if self._store.shared else None

    async def reward(self, session: Session, changes: Mapping[str, Mapping[str, Any]]) -> bool:
        """Set raw rewards and marks: for each interaction id what changes, as `rewards.Changes` says.

        False, and nothing is set, when another replica changed the session meanwhile: decide anew what changes.
        """
        done = await self._store.set_rewards(session.id, changes, self.seen(session))
        if self._store.shared:
            await self.refresh(session)
        else:
            _set_rewards(session, changes)
        if done:
            await self.refresh_returns(session)
        return done

    async def end(
        self,
        session: Session,
        *,
        status: SessionStatus = SessionStatus.ENDED,
        outcome: Outcome | None = None,
        exit_reason: str | None = None,
        metrics: Mapping[str, Any] | None = None,
        finished: bool | None = None,
    ) -> int:
        """Seal a session and persist its returns. Idempotent; returns the count of complete interactions."""
        await self.refresh(session)
        while session.record.status is SessionStatus.ACTIVE:
            self.ensure_stored(session)
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
            )
            if not await self._seal(session, sealed):
                await self.refresh(session)
                if status is SessionStatus.EXPIRED:
                    break  # it is in use on another replica
        return len(session.complete())

    async def _seal(self, session: Session, sealed: SessionRecord) -> bool:
        """From here on no turn begins. False: another replica changed the session meanwhile, and it is open still."""
        record, session.record = session.record, sealed
        try:
            done = await self._store.end_session(sealed, self.returns(session), self.seen(session))
        except ProxyError:
            session.record = record
            raise
        if done:
            session.ended.set()
            self._keys.release(sealed)
        elif session.record is sealed:  # and not what was read of the database meanwhile
            session.record = record
        return done

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
        for session in sessions:
            session.waiting += 1
        watch = asyncio.create_task(self._watch(sessions)) if self._store.shared else None
        try:
            async with asyncio.timeout(wait_s):
                for session in sessions:
                    await session.ended.wait()
        except TimeoutError:
            return
        finally:
            for session in sessions:
                session.waiting -= 1
            if watch is not None:
                watch.cancel()

    async def _watch(self, sessions: Sequence[Session]) -> None:
        """Notice the ends of sessions on other replicas, until cancelled."""
        while left := [session for session in sessions if not session.ended.is_set()][:_WATCHED]:
            try:
                live = await self._store.live_sessions([session.id for session in left])
                for session in left:
                    if session.id not in live and session.confirmed:
                        await self.refresh(session)
            except SessionNotFound:
                pass  # pruned elsewhere: whoever waits for it waits until its time is up
            except StoreUnavailable as problem:
                logger.warning("cannot see whether sessions ended on other replicas: %s", problem.message)
            await asyncio.sleep(_WATCH_S)

    def returns(self, session: Session) -> dict[str, float]:
        """The returns of a session by its own discount and credit rule."""
        return compute_returns(session.complete(), session.record.discount, session.record.credit)

    async def refresh_returns(self, session: Session) -> None:
        """Persist the returns of an ended session anew: a reward or a late interaction changed them."""
        while (record := session.record).status is not SessionStatus.ACTIVE:
            returns = self.returns(session)
            if await self._store.set_returns(session.id, record.discount, record.credit, returns, self.seen(session)):
                return
            await self.refresh(session)

    async def expire_idle(self, idle_s: float) -> None:
        """Seal as expired what nobody used for `idle_s` seconds, here or on another replica; its data stays."""
        before = time.time() - idle_s
        while names := await self._store.find_idle(before, _PAGE):
            expired = [name for name in names if await self._expire(name, idle_s, before)]
            if len(expired) < len(names) or len(names) < _PAGE:
                return  # what is left is in use; the next sweep looks again

    async def _expire(self, session_id: str, idle_s: float, before: float) -> bool:
        live = self._live.get(session_id)
        if live is not None and (live.running or live.waiting or live.used_at > time.monotonic() - idle_s):
            return False
        session = await self.get(session_id)
        async with session.lock:
            last = max((i.completed_at or 0.0 for i in session.complete()), default=0.0)
            if session.running or max(last, session.record.updated_at) > before:
                return False
            await self.end(session, status=SessionStatus.EXPIRED, exit_reason=f"unused for {idle_s:g} s")
        return True

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
        try:
            return await self.get(session_id)
        except SessionNotFound:
            record = self._new_record({"session_id": session_id, "task_id": session_id})
        await self._check_room()
        if session_id not in self._live:
            self._live[session_id] = Session(
                record, InteractionCache(), stored=False, confirmed=False, seen=NOTHING_SEEN
            )
            self._metrics.sessions.set(len(self._live))
        return self._live[session_id]

    async def _check_room(self) -> None:
        """Raise TooManyRequests where no session may be added by naming it."""
        most = self._settings.max_live_sessions
        if (fresh := self._most_fresh()) is not None and await self._store.count_taken() + self._unconfirmed() >= fresh:
            raise too_stale(fresh)
        if most is None:
            return
        if await self._store.count_live() + self._unconfirmed() >= most:
            raise TooManyRequests(f"{most} sessions are live (--max-live-sessions); end one first", retry_after_s=5.0)

    def _unconfirmed(self) -> int:
        """How many sessions were named here whose rows are not in the store yet."""
        return sum(not session.confirmed for session in self._live.values())

    def _most_fresh(self) -> int | None:
        """How many sessions may have been accepted or be running, so that none gets too old: AReaL's rule,
        (max staleness + version + 1) * batch size. None without such a limit."""
        staleness, batch = self._settings.max_staleness, self._settings.batch_size
        return None if staleness is None or batch is None else (staleness + self._weight_version() + 1) * batch

    async def grant_capacity(self, number: int) -> int:
        """Let so many more sessions start where capacity is controlled; returns how many may now."""
        return await self._store.grant_capacity(number)

    def ensure_stored(self, session: Session) -> None:
        """Queue the row of a session that was only named so far. What follows it in the queue is waited for, not it."""
        if not session.stored:
            session.stored = True
            session.seen = Seen()
            creation = asyncio.ensure_future(self._store.create_session(session.record))
            creation.add_done_callback(lambda done: self._created(session, done))

    def _forget(self, session: Session) -> None:
        """A session that is no longer in the store. Nobody waits for its end any more."""
        if self._live.get(session.id) is session:
            del self._live[session.id]
        self._keys.release(session.record)
        session.ended.set()

    def _created(self, session: Session, creation: asyncio.Future[None]) -> None:
        error = None if creation.cancelled() else creation.exception()
        if error is None:
            session.confirmed = True
        elif self._store.shared and isinstance(error, InvalidRequest):
            session.seen = NOTHING_SEEN  # another replica was first: its row counts
        else:
            self._live.pop(session.id, None)  # the next request tries again

    async def _create(self, record: SessionRecord, chosen_key: bool) -> Session:
        await self._store.create_session(
            record,
            chosen_key=chosen_key,
            max_live=self._settings.max_live_sessions,
            max_taken=self._most_fresh(),
        )
        session = self._live.setdefault(record.session_id, Session(record, InteractionCache()))
        self._keys.add(record)
        self._metrics.sessions.set(len(self._live))
        return session

    async def _load(self, session_id: str) -> Session:
        # What cannot be an id is not looked up: some databases fail on a NUL character.
        news = await self._store.load_news(session_id, NOTHING_SEEN) if is_session_id(session_id) else None
        if news is None or news.record is None:
            raise SessionNotFound(f"there is no session {session_id!r}; start it with POST /rl/start_session")
        session = Session(news.record, InteractionCache(), seen=NOTHING_SEEN)
        absorb(session, news, elsewhere=self._store.shared)
        session = self._live.setdefault(session_id, session)
        self._metrics.sessions.set(len(self._live))
        return session

    def _check_chosen(self, api_key: Any) -> None:
        if not isinstance(api_key, str) or not api_key:
            raise InvalidRequest("'api_key' must be a non-empty string", param="api_key")
        if not (self._settings.loopback or self._settings.allow_chosen_keys):
            raise InvalidRequest("choosing keys needs --allow-chosen-keys beyond loopback", param="api_key")

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
            weight_version=self._weight_version(),
            created_at=now,
            updated_at=now,
        )

    async def _skip_taken(self, task_id: str) -> None:
        """A number was taken already, by another replica or by a chosen id: go on where the task is by now."""
        count = await self._store.count_sessions(task_id)
        self._next_number[task_id] = max(self._next_number.get(task_id, 0), count)

    def _number(self, task_id: str) -> str:
        """The next free `<task_id>-<n>` that this server knows of; the store refuses one that is taken."""
        number = self._next_number.get(task_id, 0)
        self._next_number[task_id] = number + 1
        return check_session_id(f"{task_id}-{number}", "task_id")


def _set_rewards(session: Session, changes: Mapping[str, Mapping[str, Any]]) -> None:
    for interaction_id, change in changes.items():
        for name, value in change.items():
            setattr(session.cache.nodes[interaction_id].interaction, name, value)


def _new_path_key() -> str:
    return secrets.token_urlsafe(16)


def _new_key(prefix: str) -> str:
    return f"{prefix}-{secrets.token_urlsafe(24)}"
