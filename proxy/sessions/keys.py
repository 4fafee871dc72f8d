"""Keys are kept as SHA-256 hashes and compared in constant time; nobody learns from this module whose key is wrong.

Where replicas share the store nothing is remembered: any of them may give out, move or withdraw a key.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass

from proxy.errors import Forbidden, Unauthorized
from proxy.store.key_index import KeyIndex
from proxy.types import SessionRecord, SessionStatus

# Foreign keys and paths that are remembered, so that an agent with any key of its own costs no look-up a turn.
_MAX_REMEMBERED = 4096


def hash_key(key: str) -> str:
    """SHA-256 of a key, in hex."""
    return hashlib.sha256(key.encode(errors="surrogatepass")).hexdigest()


@dataclass(frozen=True, slots=True)
class Grant:
    """What a key is good for: everything, or one session, as its agent or (`control`) as its environment."""

    admin: bool = False
    session_id: str | None = None
    control: bool = False


class Keyring:
    """Which key opens what. Sessions of this process are looked up in memory, others in the store."""

    def __init__(self, index: KeyIndex, admin_key: str | None) -> None:
        self._index = index
        self._admin_hashes = [hash_key(key) for key in admin_key.split(",")] if admin_key is not None else []
        self._agents: dict[str, str] = {}
        self._controls: dict[str, str] = {}
        self._paths: dict[str, str | None] = {}
        self._unknown: set[str] = set()

    def add(self, record: SessionRecord) -> None:
        """Make a new session's keys known; a chosen key moves to it."""
        if self._index.shared:
            return
        if record.api_key_hash:
            self._agents[record.api_key_hash] = record.session_id
            self._unknown.discard(record.api_key_hash)
        if record.control_key_hash:
            self._controls[record.control_key_hash] = record.session_id
            self._unknown.discard(record.control_key_hash)
        self._paths[record.session_id] = record.path_key_hash

    def release(self, record: SessionRecord) -> None:
        """Forget an ended session in memory; the store still knows its keys."""
        if self._agents.get(record.api_key_hash or "") == record.session_id:
            del self._agents[record.api_key_hash or ""]
        self._controls.pop(record.control_key_hash or "", None)
        self._paths.pop(record.session_id, None)

    def check_admin(self, key: str | None) -> None:
        """Raise Unauthorized without a key, Forbidden with another one; an open server lets everybody pass."""
        if not self._admin_hashes or (key is not None and self._is_admin(hash_key(key))):
            return
        if key is None:
            raise Unauthorized("this needs the admin key: Authorization: Bearer KEY")
        raise Forbidden("this needs the admin key, and the key that was sent is not it")

    async def grant(self, key: str | None) -> Grant:
        """What `key` is good for: nothing, when nobody here gave it out."""
        if key is None:
            return Grant()
        digest = hash_key(key)
        if self._is_admin(digest):
            return Grant(admin=True)
        if (session_id := self._controls.get(digest)) is not None:
            return Grant(session_id=session_id, control=True)
        if (session_id := await self._find_agent(digest)) is not None:
            return Grant(session_id=session_id)
        if digest in self._unknown:
            return Grant()
        record = await self._index.find_session_by_key(digest, control=True)
        if record is None:
            self._remember_unknown(digest)
            return Grant()
        return Grant(session_id=record.session_id, control=True)

    async def opens_path(self, session_id: str, secret: str) -> bool:
        """Whether `secret` is the one in the capability path of `session_id`."""
        if session_id not in self._paths:
            record = await self._index.load_session(session_id)
            if record is None:
                return False
            self._remember_path(record)
            return _same(record.path_key_hash, secret)
        return _same(self._paths[session_id], secret)

    def _is_admin(self, digest: str) -> bool:
        return any([hmac.compare_digest(digest, known) for known in self._admin_hashes])  # all of them, in any case

    async def _find_agent(self, digest: str) -> str | None:
        session_id = self._agents.get(digest)
        if session_id is not None or digest in self._unknown:
            return session_id
        record = await self._index.find_session_by_key(digest)
        if record is not None and record.status is SessionStatus.ACTIVE and not self._index.shared:
            self._agents[digest] = record.session_id
        return None if record is None else record.session_id

    def _remember_path(self, record: SessionRecord) -> None:
        if self._index.shared:
            return
        if len(self._paths) >= _MAX_REMEMBERED:
            self._paths.clear()
        self._paths[record.session_id] = record.path_key_hash

    def _remember_unknown(self, digest: str) -> None:
        """Nobody has this key: asked again only after a new session brings keys."""
        if self._index.shared:
            return
        if len(self._unknown) >= _MAX_REMEMBERED:
            self._unknown.clear()
        self._unknown.add(digest)


def _same(expected: str | None, key: str) -> bool:
    return expected is not None and hmac.compare_digest(expected, hash_key(key))
