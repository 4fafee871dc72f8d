"""A client that starts no sessions: it returns the session of the episode, and records how it should end.

Managers of ROLL start and end the sessions of their episodes. In a run both happen in one place for all kinds of
agents, which uses the manager's options for the end.
"""

from __future__ import annotations

from typing import Any, Unpack

from tokengrove.client import Client, Session
from tokengrove.client.operations import StartedSession
from tokengrove.client.options import EndOptions, SessionOptions
from tokengrove.errors import InvalidRequest


class GivenSession(Session):
    """A session that the caller ends. `ending`: the options of the first call of `end`; None before."""

    def __init__(self, client: Client, started: StartedSession) -> None:
        names = ("session_id", "api_key", "control_key", "base_url", "root_url", "keys_expire_at")
        super().__init__(client, {name: getattr(started, name) for name in names})
        self.ending: EndOptions | None = None

    def end(
        self, *, idempotency_key: str | None = None, retry_s: float | None = None, **options: Unpack[EndOptions]
    ) -> int:
        """Record how the session should end. Later calls are ignored."""
        if self.ending is None:
            self.ending = options
        self.ended = True
        return 0


class SessionGiver:
    """A manager's `generate_scheduler`: a Client whose `start_session` returns the session that was given last."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._given: GivenSession | None = None

    def give(self, started: StartedSession) -> GivenSession:
        """Make the next `start_session` return this session."""
        self._given = GivenSession(self._client, started)
        return self._given

    def start_session(
        self,
        task_id: str,
        *,
        idempotency_key: str | None = None,
        retry_s: float | None = None,
        **options: Unpack[SessionOptions],
    ) -> Session:
        """The given session, once. Raises InvalidRequest for an `api_key`, since the session already has a key."""
        if "api_key" in options:
            raise InvalidRequest("the session of this episode already has its key", param="api_key")
        given, self._given = self._given, None
        if given is None:
            raise InvalidRequest(f"the episode of {task_id!r} has one session, which was started already")
        return given

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._client, name)
