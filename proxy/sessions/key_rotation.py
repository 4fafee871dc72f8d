"""`POST /rl/rotate_keys`: replaces the keys of a session. The old keys grant nothing from then on."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import replace

from proxy.sessions.issued_keys import (
    IssuedKeys,
    KeyKind,
    expiry,
    new_api_key,
    new_control_key,
    new_feedback_key,
    new_path_key,
)
from proxy.sessions.keys import Keyring, hash_key
from proxy.sessions.live_session import LiveSession
from proxy.sessions.registry import Registry
from proxy.store.answer import Answer
from proxy.store.session_changes import SessionChanges
from proxy.types import SessionRecord


class KeyRotation:
    """Replaces keys. `default_lifetime_s`: the lifetime in seconds if the caller sets none; None: keys never expire."""

    def __init__(
        self, registry: Registry, changes: SessionChanges, keys: Keyring, default_lifetime_s: float | None
    ) -> None:
        self._registry, self._changes, self._keys = registry, changes, keys
        self._default_lifetime_s = default_lifetime_s

    async def rotate(
        self,
        session: LiveSession,
        kinds: Collection[KeyKind] | None,
        lifetime_s: float | None,
        noted: Callable[[IssuedKeys], Answer] | None = None,
    ) -> IssuedKeys:
        """Replace the keys of these kinds (None: all that the session has).

        The lifetime applies to all keys of the session, including kept ones.

        `noted` makes the answer that is stored with the new keys.
        """
        if kinds is None:
            had = session.record.feedback_key_hash is not None
            kinds = [kind for kind in KeyKind if had or kind is not KeyKind.FEEDBACK]
        feedback_key = new_feedback_key() if KeyKind.FEEDBACK in kinds else None
        api_key = new_api_key() if KeyKind.AGENT in kinds else None
        control_key = new_control_key() if KeyKind.CONTROL in kinds else None
        path_key = new_path_key() if KeyKind.PATH in kinds else None
        while True:
            old = session.record
            record = replace(
                old,
                api_key_hash=hash_key(api_key) if api_key else old.api_key_hash,
                control_key_hash=hash_key(control_key) if control_key else old.control_key_hash,
                path_key_hash=hash_key(path_key) if path_key else old.path_key_hash,
                feedback_key_hash=hash_key(feedback_key) if feedback_key else old.feedback_key_hash,
                keys_expire_at=expiry(lifetime_s, self._default_lifetime_s),
                updated_at=time.time(),
            )
            issued, seen = (
                IssuedKeys(record, api_key, control_key, path_key, feedback_key),
                self._registry.seen(session),
            )
            answer = None if noted is None else lambda _, issued=issued: noted(issued)
            if await self._changes.update_session(record, seen, _withdrawn(old, record), answer):
                break
            await self._registry.refresh(session)
        await self._adopt(session, old, record)
        return issued

    async def _adopt(self, session: LiveSession, old: SessionRecord, record: SessionRecord) -> None:
        """Replace the record and its keys in memory."""
        self._keys.release(old)
        self._keys.add(record)
        if not self._registry.shared:
            session.record = record
        await self._registry.refresh(session)


def _withdrawn(old: SessionRecord, new: SessionRecord) -> list[str]:
    """The hashes of the keys that only the old record has."""
    kept = (new.api_key_hash, new.control_key_hash, new.path_key_hash, new.feedback_key_hash)
    had = (old.api_key_hash, old.control_key_hash, old.path_key_hash, old.feedback_key_hash)
    return [key_hash for key_hash in had if key_hash is not None and key_hash not in kept]
