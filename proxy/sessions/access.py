"""Which session a request addresses, and what its key permits. No request reaches the session of another key.

A server is open if it has no admin key; it then listens on loopback only. `POST /rl/start_session` issues
three keys: `api_key` for the agent, `control_key` for the environment, and the path secret in `base_url`.

    request                             open server     admin key     control_key   api_key       path secret
    turn, session in the path           everybody (1)   any session   own session   own session   own session (2)
    turn, no session in the path        everybody (3)   no            own session   own session   -
    generate without a session          everybody       yes           no            no            -
    reward, mark, end, withdraw         everybody (4)   any session   own session   only (5)      only (2, 5)
    reward of a turn by its id          also the session's feedback_key, which grants nothing else
    rotate keys                         everybody (4)   any session   own session   no            no
    start, list, show, delete sessions, everybody       yes           no            no            no
    export, claim, acknowledge,
    grant capacity, engine, mailbox
    list, show, export                  also a reader's key (6), which grants nothing else

(1) The session is created if it does not exist; the key does not matter. A path secret that was replaced is refused.
(2) `/{session_id}~{secret}/...` works with any key or none; with `--require-key` it also needs a key of its own.
    `/{session_id}~{secret}@{agent}/...` is the same, and names the agent of its turns.
    `/~{api_key}/...` and `/~{api_key}@{agent}/...` address the session of the key, like the key in a header without a
    path. A key in the header is then ignored, except for rewards, ends and rotations that it permits. With
    `--require-key`, the header also needs a key of the session. An unknown key creates no session.
(3) The session that the key was issued for, even if it has ended; else the session in the client's hint; else one
    session for each unknown key, named by a digest of the key; without a key, `default`. A missing session is created.
    After the end of a session that no caller named, the next turn opens the next session of its series
    (`session_series`). A replaced key is refused.
(4) With `--rewards-by control`, only the control_key. Without a session in the path as in (3), but a missing session
    is not created, and after an end the ended session is addressed.
(5) Only with `--rewards-by session`, which is the default on open servers only.
(6) `--reader-key`. It is refused by name elsewhere, and grants no delivery: `claim` leases sessions.

At the listener for agents (`--agent-port`), an admin key and a reader's key are unknown keys, so that a leaked one is
useless there.

On a server with an admin key, expired keys grant nothing until the administrator rotates them. An ended session accepts
rewards and marks, but no turns. `/models`, `/health`, `/ready` and, without --metrics-key, `/metrics` need no key.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

from proxy.sessions.client_families import ClientFamilies
from proxy.sessions.episodes import EpisodeOver, Episodes, check_label
from proxy.sessions.ids import check_session_id
from proxy.sessions.keys import Grant, Keyring, read_only, session_of_key
from proxy.sessions.live_session import LiveSession
from proxy.sessions.named_sessions import NamedSessions
from proxy.sessions.registry import Registry
from proxy.sessions.session_series import SessionSeries
from proxy.settings import Settings
from tokengrove.errors import Forbidden, NotFound, SessionArchived, SessionClosed, SessionNotFound, Unauthorized, brief

DEFAULT_SESSION = "default"

_FEEDBACK_ONLY = "a feedback key may set rewards of turns by their 'interaction_id', and nothing else"

# Ids and agent names may contain ~ and @. A secret of `new_path_key` has 22 characters, none of them ~ or @.
_SECRET = re.compile(r"(.+)~([\w-]{22})(?:@.*)?", re.DOTALL)

# No id begins with ~, and no key contains @.
_KEY = re.compile(r"~([^@]*)(?:@(.*))?", re.DOTALL)


class Caller(NamedTuple):
    """The address of a request. `path`: its session part; `key`; `hint`: a session id in a header or the body;
    `sub_agent`: the client's own session of a sub-agent of the hint's session; `episode`: the label of its episode.
    """

    path: str | None = None
    key: str | None = None
    hint: str | None = None
    sub_agent: str | None = None
    episode: str | None = None

    @property
    def names_session(self) -> bool:
        """Whether the path contains a session id. A path with a key does not."""
        return self.path is not None and not self.path.startswith("~")


class Access:
    """Finds the session that a caller addresses, and refuses callers without access to it.

    `open_server`: the server has no admin key, so every caller on this machine has access. `takes_admin` False: an
    admin key is an unknown key.
    """

    def __init__(
        self,
        registry: Registry,
        named: NamedSessions,
        series: SessionSeries,
        episodes: Episodes,
        keys: Keyring,
        settings: Settings,
        *,
        takes_admin: bool = True,
    ) -> None:
        self._registry, self._named, self._series, self.episodes = registry, named, series, episodes
        self._keys, self._settings, self._takes_admin = keys, settings, takes_admin
        self._families = ClientFamilies()
        self.open_server = settings.admin_key is None

    async def resolve(self, caller: Caller) -> LiveSession:
        """Return the open session that a turn belongs to. Raises Unauthorized, SessionNotFound or SessionClosed.

        A session with episodes is cut here when it is due; the turn then belongs to the next one.
        """
        if self.open_server and caller.path and "~" not in caller.path:
            of_name = self._of_name if self._named.have_episodes else self._named.get_or_create
            session, by_key = await of_name(check_session_id(caller.path)), False
        else:
            session, by_key = await (self._by_path(caller) if caller.path else self._by_key_or_hint(caller))
        if session.record.turn_options and session.episodes is not None:
            session = await self.episodes.current(session, caller.episode)
        elif caller.episode is not None:
            check_label(caller.episode, session)
        if by_key:
            _check_fresh(session)
        session.touch()
        session.check_open()
        return session

    async def after(self, session: LiveSession, closed: SessionClosed, caller: Caller) -> LiveSession:
        """The session of a turn that `session` did not take. Raises `closed` unless it has episodes."""
        if session.episodes is None:
            raise closed
        if isinstance(closed, EpisodeOver):
            self.episodes.cut(session, closed.why)
        return await self.resolve(caller)

    async def resolve_if_named(self, caller: Caller) -> LiveSession | None:
        """Return the open session of the path or key; None if the caller may generate without a session.

        Raises the same errors as `resolve`.
        """
        if caller.path is None:
            grant = await self._grant(caller)
            _check_not_withdrawn(grant)
            if grant.session_id is None and (grant.admin or self.open_server):
                return None
        return await self.resolve(caller)

    async def of_feedback_key(self, caller: Caller) -> LiveSession | None:
        """The newest session of a feedback key; it may have ended. None for a caller with another key.

        Raises Forbidden if the path names another session, and Unauthorized if the key has expired.
        """
        grant = await self._grant(caller)
        if grant.feedback_on is None:
            return None
        session = await self._registry.get(grant.feedback_on)
        if caller.path is not None and caller.path.partition("~")[0] not in (session.id, session.name):
            raise Forbidden(f"this feedback key belongs to session {brief(session.name)}, not to that in the path")
        _check_fresh(session)
        return session

    async def for_feedback(self, session: LiveSession, body: Mapping[str, Any]) -> LiveSession:
        """The session with the turn that a body rewards, in the series of the `session` of a feedback key.

        Raises Forbidden unless the body does only that, and NotFound for a turn of others.
        """
        name = body.get("interaction_id")
        if not isinstance(name, str) or set(body) - {"interaction_id", "reward", "name"}:
            raise Forbidden(_FEEDBACK_ONLY)
        session = await self._series.with_turn(session, name)
        if name not in session.cache.nodes:
            raise NotFound(f"no turn {brief(name)} is this feedback key's to reward", param="interaction_id")
        return session

    async def for_turn(self, caller: Caller, session: LiveSession, interaction_id: str | None) -> LiveSession:
        """Return the session that contains a turn to reward or mark: `session` or an earlier session of its series.

        Returns `session` if the caller names a session or no session contains the turn. Raises SessionNotFound.
        """
        named = caller.path or caller.hint or (await self._grant(caller)).session_id is not None
        if interaction_id is None or (named and session.episodes is None):
            return session
        return await self._series.with_turn(session, interaction_id)

    async def for_control(self, caller: Caller) -> LiveSession:
        """Return the session to reward, mark or end; it may have ended.

        Raises Unauthorized, Forbidden or SessionNotFound.
        """
        grant = await self._grant(caller)
        if grant.feedback_on is not None:
            raise Forbidden(_FEEDBACK_ONLY)
        if caller.path and (session_id := await self._of_key_in_path(caller)) is not None:
            session = await self._registry.get(session_id)
            if not (grant.admin or grant.session_id == session_id):
                grant = Grant(session_id=session_id)
        elif caller.path:
            session_id, path_key = await self._split(caller.path)
            if not (self.open_server or path_key or grant.admin or await self._is_own(grant, session_id)):
                raise Unauthorized("this needs the control_key of the session, or the admin key")
            session = await self._registry.get(session_id)
            if session.episodes is not None and session.closed and session.record.series is None:
                session = await self._series.last(session_id)  # the address of all episodes means the last
            if grant.session_id not in (None, session.id) and await self._is_own(grant, session.id):
                grant = replace(grant, session_id=session.id)
            if path_key and not self._settings.require_key and grant.session_id is None:
                grant = Grant(grant.admin, session.id)  # the path secret grants what the api_key grants
        elif grant.session_id is not None:
            session = await self._registry.get(grant.session_id)
        elif self.open_server:
            _check_not_withdrawn(grant)
            if caller.hint is not None:
                session = await self._registry.get(caller.hint)
            else:
                session = await self._series.last(_series_of(caller.key))
        else:
            raise Unauthorized("name the session in the path, or use its control key")
        self._check_control(session, grant)
        if not (grant.admin or self.open_server):
            _check_fresh(session)
        return session

    def check_admin(self, key: str | None) -> None:
        """Raise Unauthorized or Forbidden unless the server is open or `key` is the admin key."""
        self._keys.check_admin(key)

    def check_reader(self, key: str | None) -> bool:
        """Raise Unauthorized or Forbidden unless the server is open or `key` is the admin key or a reader's.

        Return whether it is a reader's, which must change nothing.
        """
        return self._keys.check_reader(key)

    def check_trainer(self, key: str | None) -> None:
        """Raise Unauthorized or Forbidden unless the server is open or `key` is the admin key or a trainer's."""
        self._keys.check_trainer(key)

    def right_of(self, key: str | None) -> str:
        """The authority of a control request: `admin`, `open` (an open server), `key` (another key) or `nobody`."""
        if self.open_server:
            return "open"
        if key is None:
            return "nobody"
        return "admin" if self._keys.is_admin(key) else "key"

    async def for_keys(self, caller: Caller) -> LiveSession:
        """Return the session whose keys are to be replaced. Raises Unauthorized, Forbidden or SessionNotFound."""
        session = await self.for_control(caller)
        grant = await self._grant(caller)
        if not (self.open_server or grant.admin or grant.control):
            raise Forbidden("an agent's key cannot rotate keys; use the control_key or the admin key")
        return session

    async def _by_path(self, caller: Caller) -> tuple[LiveSession, bool]:
        """Return the session, and True if one of its own keys granted access."""
        assert caller.path is not None
        if (session_id := await self._of_key_in_path(caller)) is not None:
            return await self._registry.get(session_id), not self.open_server
        session_id, path_key = await self._split(caller.path)
        if self.open_server:
            return await self._of_name(session_id), False
        if path_key and not self._settings.require_key:
            return await self._registry.get(session_id), True
        grant = await self._grant(caller)
        if grant.admin or await self._is_own(grant, session_id):
            try:
                return await self._registry.get(session_id), not grant.admin
            except (SessionNotFound, SessionArchived):  # of an address with episodes, the first ones may be gone
                if grant.session_id in (None, session_id):
                    raise
                return await self._registry.get(grant.session_id or session_id), True
        way = "use its api_key or its base_url"
        if path_key:
            way = "send its api_key, which --require-key asks for beside its base_url"
        raise Unauthorized(f"this session needs its own key or the admin key; {way}")

    async def _of_name(self, name: str) -> LiveSession:
        """The session of a name on an open server, created if there is none."""
        if not self._named.have_episodes:
            return await self._named.get_or_create(name)
        with suppress(SessionArchived):
            session = await self._named.get_or_create(name)
            if session.stored:
                return session
        return await self._series.current(name)  # the first sessions of the series may be gone

    async def _by_key_or_hint(self, caller: Caller) -> tuple[LiveSession, bool]:
        """Return the session, and True if one of its own keys granted access."""
        grant = await self._grant(caller)
        if grant.session_id is not None:
            return await self._registry.get(grant.session_id), not self.open_server
        if not self.open_server:
            raise Unauthorized("use the api_key from start_session, or name the session in the path")
        _check_not_withdrawn(grant)
        if caller.hint is not None:
            return await self._of_name(self._families.session_of(caller.hint, caller.sub_agent)), False
        return await self._series.current(_series_of(caller.key)), False

    async def _of_key_in_path(self, caller: Caller) -> str | None:
        """Return the id of the session whose `api_key` is in the path; None for a path without a key.

        Raises Unauthorized for an unknown key, so that a late request never creates a session.
        """
        found = _KEY.fullmatch(caller.path or "")
        if found is None:
            return None
        grant = await self._of(found[1])
        _check_not_withdrawn(grant)
        if grant.control or grant.admin:
            raise Unauthorized(
                "an address may hold the api_key of a session only; send a control_key or an admin key as "
                "Authorization: Bearer KEY"
            )
        if grant.session_id is None:
            raise Unauthorized(
                "no session has the key in this address: start one with this api_key (POST /rl/start_session)"
            )
        if self._settings.require_key:
            own = await self._grant(caller)
            if not (own.admin or await self._is_own(own, grant.session_id)):
                raise Unauthorized("send the api_key also as Authorization: Bearer KEY, which --require-key asks for")
        return grant.session_id

    async def _split(self, path: str) -> tuple[str, bool]:
        """Return the session id in a path, and True if the path has the secret of that session."""
        if found := _SECRET.fullmatch(path):
            session_id, secret = found.groups()
            if await self._keys.opens_path(session_id, secret):
                return session_id, True
            if self.open_server:
                _check_not_withdrawn(Grant(withdrawn=await self._keys.is_withdrawn(secret)))
        return check_session_id(path), False

    async def _grant(self, caller: Caller) -> Grant:
        return await self._of(caller.key)

    async def _of(self, key: str | None) -> Grant:
        grant = await self._keys.grant(key)
        if not self._takes_admin:
            return Grant() if grant.admin or grant.reader else grant
        if grant.reader:
            raise read_only()
        return grant

    async def _is_own(self, grant: Grant, session_id: str) -> bool:
        """Whether a key belongs to a session, or to another one of its series."""
        if grant.session_id is None or grant.session_id == session_id:
            return grant.session_id is not None
        holder = await self._registry.get(grant.session_id)
        if holder.episodes is None or session_id == holder.name:
            return holder.episodes is not None
        with suppress(SessionNotFound, SessionArchived):
            return (await self._registry.get(session_id)).record.series == holder.name
        return False

    def _check_control(self, session: LiveSession, grant: Grant) -> None:
        if grant.admin or (grant.control and grant.session_id == session.id):
            return
        if self._settings.agents_may_reward and (self.open_server or grant.session_id == session.id):
            return
        if grant.session_id == session.id:
            raise Forbidden("an agent's key may not reward or end its own session; use the control_key")
        if session.record.control_key_hash is None:
            raise Unauthorized(
                f"session {brief(session.id)} began with a turn, so nobody has a control_key of it: "
                "start sessions with "
                "POST /rl/start_session, whose reply has one, or run the server with --rewards-by session"
            )
        raise Unauthorized(f"this needs the control_key of session {brief(session.id)}, which start_session gave")


def _series_of(key: str | None) -> str:
    """The name of the series for callers without a path, an issued key or a hint."""
    return DEFAULT_SESSION if key is None else session_of_key(key)


def _check_not_withdrawn(grant: Grant) -> None:
    """Raise Unauthorized for a replaced key, which must not create a session, and Forbidden for a feedback key."""
    if grant.feedback_on is not None:
        raise Forbidden(_FEEDBACK_ONLY)
    if grant.withdrawn:
        raise Unauthorized(
            "this key was replaced with POST /rl/rotate_keys, or its session was deleted or archived; use a new one"
        )


def agent_in(path: str | None, session_id: str) -> str | None:
    """The agent that a path names after a secret or a key (`/{session_id}~{secret}@{agent}`, `/~{api_key}@{agent}`).

    None if it names none. `session_id`: the session that the path resolved to. The name is a label for the turns and
    grants nothing.
    """
    if path is None or path == session_id:
        return None
    if found := _KEY.fullmatch(path):
        return found[2] or None
    _, _, agent = path[len(session_id) :].partition("@")
    return agent or None


def _check_fresh(session: LiveSession) -> None:
    """Raise Unauthorized if the keys of a session have expired."""
    expiry = session.record.keys_expire_at
    if expiry is not None and time.time() >= expiry:
        raise Unauthorized(
            f"the keys of session {brief(session.id)} have expired; the administrator rotates them "
            "with POST /rl/rotate_keys"
        )
