"""Keys are stored as SHA-256 hashes and compared in constant time; errors never reveal which key was close.

If replicas share the store, nothing is cached: each of them may issue, move or withdraw a key at any time.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass

from proxy.store.key_index import KeyIndex
from proxy.types import SessionRecord
from tokengrove.errors import Forbidden, Unauthorized
from tokengrove.options.session import SessionStatus

# Bound of cached unknown keys and of cached paths. An agent that sends a key of its own costs no lookup per turn.
_MAX_REMEMBERED = 4096


class WrongKey(Forbidden):
    """The key in the request is another one than the admin key, which is needed."""


def session_of_key(key: str) -> str:
    """The name of the session that an open server gives to a key which it did not issue: `key-` and 16 digits.

    They are the first 64 of the 256 bits of a SHA-256 that nothing else uses. The key may be a secret of another
    service: a random one cannot be found from its name, while one that can be guessed can be confirmed.
    """
    return f"key-{hash_key(f'session of {key}')[:16]}"


def hash_key(key: str) -> str:
    """The SHA-256 of a key in hexadecimal."""
    return hashlib.sha256(key.encode(errors="surrogatepass")).hexdigest()


def fingerprint(key: str) -> str:
    """What names a key in logs: 12 digits of a SHA-256 that nothing else uses."""
    return hash_key(f"log of {key}")[:12]


@dataclass(frozen=True, slots=True)
class Grant:
    """What a key permits.

    `admin`: everything. `session_id`: that session only, as its environment if `control` is set, else as its agent.
    `withdrawn`: nothing any more, since it was replaced.
    """

    admin: bool = False
    session_id: str | None = None
    control: bool = False
    withdrawn: bool = False


class KeySet:
    """The keys of a setting, separated by commas; none without it."""

    def __init__(self, keys: str | None) -> None:
        self._hashes = [hash_key(key) for key in keys.split(",")] if keys is not None else []

    def __bool__(self) -> bool:
        return bool(self._hashes)

    def holds(self, digest: str) -> bool:
        """Whether the key with this hash is one of them."""
        # A list, not a generator: all keys are compared, so the time tells nothing.
        return any([hmac.compare_digest(digest, known) for known in self._hashes])


class Keyring:
    """Finds what a key permits: in memory for sessions of this process, else in the store."""

    def __init__(self, index: KeyIndex, admin_key: str | None) -> None:
        self._index = index
        self._admin = KeySet(admin_key)
        self._agents: dict[str, str] = {}
        self._controls: dict[str, str] = {}
        self._paths: dict[str, str | None] = {}
        self._unknown: dict[str, Grant] = {}
        self._released = 0

    def add(self, record: SessionRecord) -> None:
        """Cache the keys of a new session. A chosen key that an ended session had belongs to the new one."""
        if self._index.shared:
            return
        if record.api_key_hash:
            self._agents[record.api_key_hash] = record.session_id
            self._unknown.pop(record.api_key_hash, None)
        if record.control_key_hash:
            self._controls[record.control_key_hash] = record.session_id
            self._unknown.pop(record.control_key_hash, None)
        self._paths[record.session_id] = record.path_key_hash

    def release(self, record: SessionRecord) -> None:
        """Drop the keys of a session from memory; the store still has them, unless they were replaced or deleted."""
        self._released += 1
        if self._agents.get(record.api_key_hash or "") == record.session_id:
            del self._agents[record.api_key_hash or ""]
        self._controls.pop(record.control_key_hash or "", None)
        self._unknown.pop(record.api_key_hash or "", None)
        self._unknown.pop(record.control_key_hash or "", None)
        self._paths.pop(record.session_id, None)

    def is_admin(self, key: str | None) -> bool:
        """Return True if `key` is an admin key."""
        return key is not None and self._admin.holds(hash_key(key))

    def check_admin(self, key: str | None) -> None:
        """Raise Unauthorized without a key, Forbidden for another key. An open server admits everybody."""
        if not self._admin or self.is_admin(key):
            return
        if key is None:
            raise Unauthorized("this needs the admin key: Authorization: Bearer KEY")
        raise WrongKey("this needs the admin key; the key in the request is another one")

    async def grant(self, key: str | None) -> Grant:
        """Return what `key` permits: nothing if this server did not issue it."""
        if key is None:
            return Grant()
        digest = hash_key(key)
        if self._admin.holds(digest):
            return Grant(admin=True)
        if (session_id := self._controls.get(digest)) is not None:
            return Grant(session_id=session_id, control=True)
        if (session_id := self._agents.get(digest)) is not None:
            return Grant(session_id=session_id)
        if (known := self._unknown.get(digest)) is not None:
            return known
        released = self._released
        holder = await self._index.find_key(digest)
        if holder.record is None:
            grant = Grant(withdrawn=holder.withdrawn)
            self._remember_unknown(digest, grant)
            return grant
        if not holder.control and released == self._released:  # else it may have been replaced since it was read
            self._remember_agent(digest, holder.record)
        return Grant(session_id=holder.record.session_id, control=holder.control)

    async def is_withdrawn(self, key: str) -> bool:
        """Return True if `key` was a key or a path secret of some session until another replaced it."""
        return await self._index.is_withdrawn(hash_key(key))

    async def opens_path(self, session_id: str, secret: str) -> bool:
        """Return True if `secret` is the path secret of `session_id`."""
        if session_id not in self._paths:
            released = self._released
            record = await self._index.load_session(session_id)
            if record is None:
                return False
            if released == self._released:
                self._remember_path(record)
            return _same(record.path_key_hash, secret)
        return _same(self._paths[session_id], secret)

    def _remember_agent(self, digest: str, record: SessionRecord) -> None:
        if record.status is SessionStatus.ACTIVE and not self._index.shared:
            # The session may have ended since it was read, and another one have got the key.
            self._agents.setdefault(digest, record.session_id)

    def _remember_path(self, record: SessionRecord) -> None:
        if self._index.shared:
            return
        if len(self._paths) >= _MAX_REMEMBERED:
            self._paths.clear()
        self._paths[record.session_id] = record.path_key_hash

    def _remember_unknown(self, digest: str, grant: Grant) -> None:
        """Cache what a key permits that no session has, until a new session brings it."""
        if self._index.shared:
            return
        if len(self._unknown) >= _MAX_REMEMBERED:
            self._unknown.clear()
        self._unknown[digest] = grant


def _same(expected: str | None, key: str) -> bool:
    return expected is not None and hmac.compare_digest(expected, hash_key(key))
