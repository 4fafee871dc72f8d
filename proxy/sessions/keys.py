"""Keys are stored as SHA-256 hashes and compared in constant time; errors never reveal how close a key was.

If replicas share the store, nothing is cached: any replica may issue, move or withdraw a key at any time.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass

from proxy.store.key_index import KeyIndex
from proxy.types import SessionRecord
from tokengrove.errors import Forbidden, ReadOnlyKey, Unauthorized
from tokengrove.options.session import SessionStatus

# The most cached unknown keys, and cached paths. An agent with an unknown key then costs no lookup per turn.
_MAX_REMEMBERED = 4096


class WrongKey(Forbidden):
    """The request needs the admin key but has another key."""


def session_of_key(key: str) -> str:
    """The session name of a key that this open server did not issue: `key-` and 16 hexadecimal digits.

    The digits are the first 64 of the 256 bits of a SHA-256 that is used nowhere else. The key may be a secret of
    another service: a random key cannot be derived from the name, but a guess can be confirmed.
    """
    return f"key-{hash_key(f'session of {key}')[:16]}"


def read_only() -> ReadOnlyKey:
    """The error of a call that changes something with a reader's key."""
    return ReadOnlyKey("this is a reader's key (--reader-key), which changes nothing; use the admin key")


def hash_key(key: str) -> str:
    """The SHA-256 of a key in hexadecimal."""
    return hashlib.sha256(key.encode(errors="surrogatepass")).hexdigest()


def fingerprint(key: str) -> str:
    """The name of a key in logs: 12 hexadecimal digits of a SHA-256 that is used nowhere else."""
    return hash_key(f"log of {key}")[:12]


@dataclass(frozen=True, slots=True)
class Grant:
    """The permissions of a key.

    `admin`: everything. `reader`: to read everything but keys.
    `session_id`: that session only, as its environment if `control` is set, else as its agent.
    `withdrawn`: nothing, because the key was replaced or its session was deleted. `feedback_on`: rewards of turns that
    it names, in the session of this id and those of its series.
    """

    admin: bool = False
    session_id: str | None = None
    control: bool = False
    withdrawn: bool = False
    feedback_on: str | None = None
    reader: bool = False


class KeySet:
    """The keys of a setting, separated by commas; empty without the setting."""

    def __init__(self, keys: str | None) -> None:
        self._hashes = [hash_key(key) for key in keys.split(",")] if keys is not None else []

    def __bool__(self) -> bool:
        return bool(self._hashes)

    def holds(self, digest: str) -> bool:
        """Whether one of the keys has this hash."""
        # A list, not a generator: all keys are compared, so the time reveals nothing.
        return any([hmac.compare_digest(digest, known) for known in self._hashes])


class Keyring:
    """Looks up the permissions of keys: in memory for sessions of this process, else in the store."""

    def __init__(
        self,
        index: KeyIndex,
        admin_key: str | None,
        trainer_key: str | None = None,
        reader_key: str | None = None,
    ) -> None:
        self._index = index
        self._admin, self._trainer, self._reader = KeySet(admin_key), KeySet(trainer_key), KeySet(reader_key)
        self._agents: dict[str, str] = {}
        self._controls: dict[str, str] = {}
        self._paths: dict[str, str | None] = {}
        self._unknown: dict[str, Grant] = {}
        self._released = 0

    def add(self, record: SessionRecord) -> None:
        """Cache the keys of a new session. A chosen key of an ended session now belongs to the new session."""
        if self._index.shared:
            return
        if record.api_key_hash:
            self._agents[record.api_key_hash] = record.session_id
            self._unknown.pop(record.api_key_hash, None)
        if record.control_key_hash:
            self._controls[record.control_key_hash] = record.session_id
            self._unknown.pop(record.control_key_hash, None)
        if record.feedback_key_hash:
            self._unknown.pop(record.feedback_key_hash, None)
        self._paths[record.session_id] = record.path_key_hash

    def release(self, record: SessionRecord) -> None:
        """Drop the keys of a session from memory; the store still has them, unless they were replaced or deleted."""
        self._released += 1
        if self._agents.get(record.api_key_hash or "") == record.session_id:
            del self._agents[record.api_key_hash or ""]
        self._controls.pop(record.control_key_hash or "", None)
        self._unknown.pop(record.api_key_hash or "", None)
        self._unknown.pop(record.control_key_hash or "", None)
        self._unknown.pop(record.feedback_key_hash or "", None)
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
        if self.is_reader(key):
            raise read_only()
        raise WrongKey("this needs the admin key; the key in the request is another one")

    def is_reader(self, key: str | None) -> bool:
        """Return True if `key` is a reader's key."""
        return key is not None and self._reader.holds(hash_key(key))

    def check_reader(self, key: str | None) -> bool:
        """Like `check_admin`, but a reader's key is admitted, too. Return whether it is one."""
        if self.is_reader(key):
            return True
        self.check_admin(key)
        return False

    def check_trainer(self, key: str | None) -> None:
        """Like `check_admin`, but a trainer's key is admitted, too."""
        if key is None or not self._trainer.holds(hash_key(key)):
            self.check_admin(key)

    async def grant(self, key: str | None) -> Grant:
        """Return what `key` permits: nothing if this server did not issue it."""
        if key is None:
            return Grant()
        digest = hash_key(key)
        if self._admin.holds(digest):
            return Grant(admin=True)
        if self._reader.holds(digest):
            return Grant(reader=True)
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
        if holder.feedback:
            return Grant(feedback_on=holder.record.session_id)
        if not holder.control and released == self._released:  # else it may have been replaced since it was read
            self._remember_agent(digest, holder.record)
        return Grant(session_id=holder.record.session_id, control=holder.control)

    async def is_withdrawn(self, key: str) -> bool:
        """Return True if `key` is a withdrawn key or path secret of a session."""
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
            # The session may have ended since it was read, and another session may have taken the key.
            self._agents.setdefault(digest, record.session_id)

    def _remember_path(self, record: SessionRecord) -> None:
        if self._index.shared:
            return
        if len(self._paths) >= _MAX_REMEMBERED:
            self._paths.clear()
        self._paths[record.session_id] = record.path_key_hash

    def _remember_unknown(self, digest: str, grant: Grant) -> None:
        """Cache the grant of a key without a session, until a new session takes the key."""
        if self._index.shared:
            return
        if len(self._unknown) >= _MAX_REMEMBERED:
            self._unknown.clear()
        self._unknown[digest] = grant


def _same(expected: str | None, key: str) -> bool:
    return expected is not None and hmac.compare_digest(expected, hash_key(key))
