"""Who is addressed, and who may do what: the tables of the design. No request reaches another's session."""

from __future__ import annotations

import time
from dataclasses import dataclass

from proxy.errors import Forbidden, Unauthorized
from proxy.sessions.ids import check_session_id
from proxy.sessions.keys import Grant, Keyring
from proxy.sessions.naming import NamedSessions
from proxy.sessions.registry import Registry
from proxy.sessions.session import Session
from proxy.settings import Settings

DEFAULT_SESSION = "default"


@dataclass(frozen=True, slots=True)
class Caller:
    """Where a request came in: the session part of its path, its key, and what the client hints at as a session."""

    path: str | None = None
    key: str | None = None
    hint: str | None = None


class Access:
    """The door of every endpoint: finds the session that a caller means, and refuses whoever may not enter it."""

    def __init__(self, registry: Registry, named: NamedSessions, keys: Keyring, settings: Settings) -> None:
        self._registry, self._named, self._keys, self._settings = registry, named, keys, settings

    @property
    def open_server(self) -> bool:
        """Whether anybody may speak: on loopback, without an admin key."""
        return self._settings.admin_key is None

    async def resolve(self, caller: Caller) -> Session:
        """The open session that a turn is for. Raises Unauthorized, SessionNotFound or SessionClosed."""
        session, by_key = await (self._by_path(caller) if caller.path else self._by_key_or_hint(caller))
        if by_key:
            _check_fresh(session)
        session.touch()
        session.check_open()
        return session

    async def resolve_if_named(self, caller: Caller) -> Session | None:
        """The open session that path or key name; None for who may generate without one: the administrator, and on an
        open server anybody. Raises as `resolve`."""
        if caller.path is None:
            grant = await self._grant(caller)
            if grant.session_id is None and (grant.admin or self.open_server):
                return None
        return await self.resolve(caller)

    async def admit(self, caller: Caller) -> None:
        """Raise what `resolve` would, before a stranger's body is read: where keys are needed, it tells nothing."""
        if not self.open_server:
            await self.resolve(caller)

    async def for_control(self, caller: Caller) -> Session:
        """The session that rewards or an end are for, if the caller may give them. Ended sessions are found too."""
        grant = await self._grant(caller)
        if caller.path:
            session_id, path_key = await self._split(caller.path)
            if not (self.open_server or path_key or grant.admin or grant.session_id == session_id):
                raise Unauthorized("this session is rewarded and ended with its control_key")
            session = await self._registry.get(session_id)
            if path_key and not self._settings.require_key and grant.session_id is None:
                grant = Grant(grant.admin, session_id)  # the path is the capability: it speaks as the agent's key
        elif grant.session_id is not None:
            session = await self._registry.get(grant.session_id)
        elif self.open_server:
            session = await self._registry.get(caller.hint or DEFAULT_SESSION)
        else:
            raise Unauthorized("name the session in the path, or use its control key")
        self._check_control(session, grant)
        if not (grant.admin or self.open_server):
            _check_fresh(session)
        return session

    def check_admin(self, key: str | None) -> None:
        """Raise Unauthorized or Forbidden unless the server is open or `key` is the admin key."""
        self._keys.check_admin(key)

    async def for_keys(self, caller: Caller) -> Session:
        """The session whose keys are to be replaced: by its control key or the administrator's, on an open server by
        anybody. Raises Unauthorized or Forbidden."""
        session = await self.for_control(caller)
        grant = await self._grant(caller)
        if not (self.open_server or grant.admin or grant.control):
            raise Forbidden("keys are rotated with the control_key or the admin key")
        return session

    async def _by_path(self, caller: Caller) -> tuple[Session, bool]:
        """The session, and whether a key of its own opened it."""
        assert caller.path is not None
        session_id, path_key = await self._split(caller.path)
        if self.open_server:
            return await self._named.get_or_create(session_id), False
        if path_key and not self._settings.require_key:
            return await self._registry.get(session_id), True
        grant = await self._grant(caller)
        if grant.admin or grant.session_id == session_id:
            return await self._registry.get(session_id), not grant.admin
        raise Unauthorized("this session needs its own key")

    async def _by_key_or_hint(self, caller: Caller) -> tuple[Session, bool]:
        """The session, and whether a key of its own opened it."""
        grant = await self._grant(caller)
        if grant.session_id is not None:
            return await self._registry.get(grant.session_id), not self.open_server
        if not self.open_server:
            raise Unauthorized("use the api_key that start_session gave, or name the session in the path")
        return await self._named.get_or_create(caller.hint or DEFAULT_SESSION), False

    async def _split(self, path: str) -> tuple[str, bool]:
        """The session id in a path, and whether the path carries the session's secret."""
        session_id, mark, secret = path.rpartition("~")
        if mark and session_id and await self._keys.opens_path(session_id, secret):
            return session_id, True
        return check_session_id(path), False

    async def _grant(self, caller: Caller) -> Grant:
        return await self._keys.grant(caller.key)

    def _check_control(self, session: Session, grant: Grant) -> None:
        if grant.admin or (grant.control and grant.session_id == session.id):
            return
        if self._settings.agents_may_reward and (self.open_server or grant.session_id == session.id):
            return
        if grant.session_id == session.id:
            raise Forbidden("an agent's key may not reward or end its own session; use the control_key")
        raise Unauthorized(f"session {session.id!r} is rewarded and ended with its control_key")


def _check_fresh(session: Session) -> None:
    """Raise Unauthorized when the keys of a session, which were good once, are so no more."""
    expiry = session.record.keys_expire_at
    if expiry is not None and time.time() >= expiry:
        raise Unauthorized(
            f"the keys of session {session.id!r} have expired; the administrator rotates them with POST /rl/rotate_keys"
        )
