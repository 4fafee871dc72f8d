"""`POST /rl/start_session`: starts a session with an id and keys. Its row is committed before the answer."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from proxy.sessions.endings import Endings
from proxy.sessions.ids import check_session_id
from proxy.sessions.issued_keys import IssuedKeys, expiry, new_api_key, new_control_key, new_path_key
from proxy.sessions.keys import Keyring, hash_key
from proxy.sessions.live_session import LiveSession
from proxy.sessions.new_records import NewRecords
from proxy.sessions.registry import Registry
from proxy.sessions.start_limits import StartLimits
from proxy.settings import Settings
from proxy.store.answer import Answer, Noted
from proxy.store.news import first_seen
from proxy.store.session_starts import SessionStarts
from proxy.trajectory.cache import InteractionCache
from proxy.types import SessionRecord
from tokengrove.errors import EndedOtherwise, InvalidRequest, KeyInUse, SessionNotFound
from tokengrove.options.session import Outcome

_LEAST_CHOSEN = 16
"""The fewest characters of a chosen key on a server with an admin key, where only its key protects a session."""

_SENDABLE = re.compile(r"[!-.0-?A-~]+")


class SessionStarter:
    """Starts sessions with keys. Without a chosen id a session is named `<task_id>-<n>`, with the next free n."""

    def __init__(
        self,
        registry: Registry,
        starts: SessionStarts,
        limits: StartLimits,
        records: NewRecords,
        keys: Keyring,
        endings: Endings,
        settings: Settings,
    ) -> None:
        self._registry, self._starts, self._limits, self._records = registry, starts, limits, records
        self._endings = endings
        self._keys, self._settings = keys, settings
        self._next_number: dict[str, int] = {}

    async def start(self, body: Mapping[str, Any], noted: Callable[[IssuedKeys], Answer] | None = None) -> IssuedKeys:
        """Start a session. `noted` makes the answer that is stored with it.

        With `--refresh-by-key`, the live session of a chosen key ends first, also if TooManyRequests is raised then.
        Raises InvalidRequest naming the field, KeyInUse, TooManyRequests.
        """
        record = await self._new_record(body)
        # A start with `grant_capacity` takes no capacity, so that none is left over or missing, whatever happens.
        record.took_capacity = self._settings.capacity_control and not body.get("grant_capacity")
        record.keys_expire_at = expiry(body.get("key_lifetime_s"), self._settings.key_lifetime_s)
        chosen_key = body.get("api_key")
        if chosen_key is not None:
            self._check_chosen(chosen_key)
        keys = IssuedKeys(record, chosen_key or new_api_key(), new_control_key(), new_path_key())
        _set_hashes(record, keys)
        answer = None if noted is None else lambda _: noted(keys)
        while True:
            try:
                await self._create(record, chosen_key is not None, answer)
                return keys
            except KeyInUse:
                holder = (await self._keys.grant(keys.api_key)).session_id
                if holder is None or not self._settings.refresh_by_key:
                    raise
                await self._end(holder)
            except InvalidRequest as error:
                if body.get("session_id") is not None or error.param != "session_id":
                    raise
                await self._skip_taken(record.task_id)
                record.session_id = self._number(record.task_id)

    async def _new_record(self, body: Mapping[str, Any]) -> SessionRecord:
        if (session_id := body.get("session_id")) is not None:
            return self._records.build(check_session_id(session_id), body.get("task_id", session_id), body)
        task_id = body.get("task_id", "")
        if task_id not in self._next_number:
            self._next_number[task_id] = await self._starts.count_sessions(task_id)
        return self._records.build(self._number(task_id), task_id, body)

    async def _create(self, record: SessionRecord, chosen_key: bool, noted: Noted | None) -> None:
        if await self._starts.is_archived(record.session_id):
            raise InvalidRequest(
                f"session {record.session_id} exists already, and is archived: choose another id", param="session_id"
            )
        max_live, max_taken = self._limits.max_live, self._limits.max_taken
        await self._starts.create_session(
            record, chosen_key=chosen_key, max_live=max_live, max_taken=max_taken, noted=noted
        )
        self._registry.add(LiveSession(record, InteractionCache(), seen=first_seen(record.created_at)))
        self._keys.add(record)

    async def _end(self, session_id: str) -> None:
        """End the session whose key a start takes over, unless another caller has ended or deleted it meanwhile."""
        with suppress(SessionNotFound, EndedOtherwise):
            session = await self._registry.get(session_id)
            async with session.lock:
                why = "a session was started with its api_key"
                await self._endings.end(session, outcome=Outcome.FINISHED, exit_reason=why)

    def _check_chosen(self, api_key: Any) -> None:
        if not isinstance(api_key, str) or not _SENDABLE.fullmatch(api_key):
            raise InvalidRequest(
                "'api_key' must be a text of visible ASCII characters without / and @, as it also stands in addresses "
                "(/~KEY/v1)",
                param="api_key",
            )
        if not (self._settings.loopback or self._settings.allow_chosen_keys):
            raise InvalidRequest(
                "'api_key' cannot be chosen on this server without --allow-chosen-keys; leave it out to get a new key",
                param="api_key",
            )
        if self._settings.admin_key is not None and len(api_key) < _LEAST_CHOSEN:
            raise InvalidRequest(
                f"'api_key' has fewer than {_LEAST_CHOSEN} characters, so others could guess it: choose a longer one, "
                "or leave it out to get a new key; an open server (without --admin-key) takes any",
                param="api_key",
            )
        if self._keys.is_admin(api_key):
            raise InvalidRequest("'api_key' is an admin key of this server; choose another one", param="api_key")

    async def _skip_taken(self, task_id: str) -> None:
        """Skip the ids of the task that other replicas or callers took meanwhile."""
        count = await self._starts.count_sessions(task_id)
        self._next_number[task_id] = max(self._next_number.get(task_id, 0), count)

    def _number(self, task_id: str) -> str:
        """The next `<task_id>-<n>` that this replica has not used. The store refuses an id that is taken."""
        number = self._next_number.get(task_id, 0)
        self._next_number[task_id] = number + 1
        return check_session_id(f"{task_id}-{number}", "task_id")


def _set_hashes(record: SessionRecord, keys: IssuedKeys) -> None:
    record.api_key_hash = hash_key(keys.api_key or "")
    record.control_key_hash = hash_key(keys.control_key or "")
    record.path_key_hash = hash_key(keys.path_key or "")
