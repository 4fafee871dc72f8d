"""A client that starts no sessions: it hands out the one that an episode has, and notes how that should end.

Managers of ROLL start and end the sessions of their episodes themselves. In a run both are done for every kind of
agent at one place, which gets what the manager says of the end.
"""

from __future__ import annotations

from typing import Any, Unpack

from tokengrove.client import Client, Session
from tokengrove.client.operations import StartedSession
from tokengrove.client.options import EndOptions, SessionOptions
from tokengrove.errors import InvalidRequest


class GivenSession(Session):
    """A session that somebody else ends. `ending` is how, once `end` was called."""

    def __init__(self, client: Client, started: StartedSession) -> None:
        names = ("session_id", "api_key", "control_key", "base_url", "root_url", "keys_expire_at")
        super().__init__(client, {name: getattr(started, name) for name in names})
        self.ending: EndOptions | None = None

    def end(
        self, *, idempotency_key: str | None = None, retry_s: float | None = None, **options: Unpack[EndOptions]
    ) -> int:
        """Note how the session should end. The first call counts."""
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
        """Let the next `start_session` return this session."""
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
        """The given session, once. Raises InvalidRequest for a key of one's own, which it cannot have any more."""
        if "api_key" in options:
            raise InvalidRequest("the session of this episode has its key already", param="api_key")
        given, self._given = self._given, None
        if given is None:
            raise InvalidRequest(f"the episode of {task_id!r} has one session, which was started already")
        return given

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._client, name)
