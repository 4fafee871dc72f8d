"""The start of a session that is waited for: while the server is full, restarts, or an answer is lost on the way.

No session is left behind: one that was started by an attempt whose answer never came is recognised by its id and
replaced, and a start that is cancelled ends what it still brings.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections.abc import Callable
from contextlib import suppress

from proxy.client import AsyncClient, AsyncSession, Client, ServerUnreachable, Session
from proxy.client.options import SessionOptions
from proxy.errors import InvalidRequest, ProxyError, SessionNotFound
from proxy.rollout.cancellation import to_the_end
from proxy.rollout.retries import retried, retried_here

UNREACHABLE_S = 60.0
"""How long a server that does not answer is tried: a restart takes less, and a wrong address should be noticed."""

_GIVE_UP_S = 10.0
_NOT_OF_AN_ID = re.compile(r"[^\w.-]+", re.ASCII)
_NAME_LENGTH = 100


def unused_session_id(name: str) -> str:
    """A session id that nobody else has, so that a start whose answer is lost can be repeated. It begins with `name`,
    as far as an id can.
    """
    return f"{_NOT_OF_AN_ID.sub('-', name)[:_NAME_LENGTH]}-{secrets.token_hex(6)}"


async def start_session(
    client: AsyncClient, task_id: str, within_s: float, options: SessionOptions, *, discard: bool = False
) -> AsyncSession:
    """Start a session; wait up to `within_s` seconds while the server has no place (429), or is not there.

    A server that does not answer is tried for a minute at most. An attempt whose answer was lost is repeated only if
    `options` name the session, by an id that nobody else uses: its session is deleted, since its keys are unknown.
    `discard`: if this is cancelled, what it still brings is deleted, and never ends in its group.
    """
    start = _AsyncStart(client, task_id, options, discard)
    try:
        return await retried(start.attempt, within_s, start.may_be_repeated)
    except asyncio.CancelledError:
        await to_the_end(start.leave())
        raise


def start_session_here(
    client: Client, task_id: str, within_s: float, options: SessionOptions, may_wait: Callable[[], bool] = lambda: True
) -> Session:
    """`start_session` for a client that blocks this thread; once `may_wait` is false it is not tried again."""
    start = _BlockingStart(client, task_id, options)
    return retried_here(start.attempt, within_s, lambda error: may_wait() and start.may_be_repeated(error))


class _Start:
    """The attempts of one start."""

    def __init__(self, task_id: str, options: SessionOptions) -> None:
        self._task_id, self._options = task_id, options
        self._begun = time.monotonic()
        self._unanswered = False
        self._key = secrets.token_hex(16)  # the server knows by it that an attempt is the same start

    def _begin_anew(self) -> None:
        """The session of an earlier attempt was deleted, so its answer is of no use any more."""
        self._unanswered, self._key = False, secrets.token_hex(16)

    def may_be_repeated(self, error: ProxyError) -> bool:
        if isinstance(error, ServerUnreachable):
            patient = time.monotonic() < self._begun + UNREACHABLE_S
            return error.retryable and patient and (error.unsent or "session_id" in self._options)
        return error.status in (429, 503)

    def _is_of_an_earlier_attempt(self, error: InvalidRequest) -> bool:
        """Whether the id, or the key, may be taken by the session of an attempt whose answer was lost."""
        return self._unanswered and "session_id" in self._options and error.param in ("session_id", "api_key")


class _AsyncStart(_Start):
    def __init__(self, client: AsyncClient, task_id: str, options: SessionOptions, discard: bool) -> None:
        super().__init__(task_id, options)
        self._client, self._discard = client, discard

    async def attempt(self) -> AsyncSession:
        starting = asyncio.ensure_future(self._answered())
        try:
            return await asyncio.shield(starting)
        except InvalidRequest as error:
            if not self._is_of_an_earlier_attempt(error) or not await self._deleted_unused():
                raise
            self._begin_anew()
            return await self.attempt()
        except asyncio.CancelledError:
            await to_the_end(self._give_up(starting))
            raise

    async def _answered(self) -> AsyncSession:
        """Start the session; note an answer that was lost, also after this attempt was cancelled."""
        try:
            session = await self._client.start_session(
                self._task_id, idempotency_key=self._key, retry_s=0.0, **self._options
            )
        except ServerUnreachable as error:
            self._unanswered |= not error.unsent
            raise
        self._unanswered = False
        return session

    async def leave(self) -> None:
        """Delete the session of an attempt whose answer was lost, which no other attempt has replaced."""
        if self._unanswered and "session_id" in self._options:
            with suppress(ProxyError, TimeoutError):
                async with asyncio.timeout(_GIVE_UP_S):
                    await self._deleted_unused()

    async def _give_up(self, starting: asyncio.Future[AsyncSession]) -> None:
        """End or delete the session that `starting` still brings: nobody else would."""
        with suppress(ProxyError, TimeoutError):
            async with asyncio.timeout(_GIVE_UP_S):
                session = await starting
                if self._discard:
                    await self._client.delete_session(session.session_id)
                else:
                    await session.end(outcome="Failed", exit_reason="cancelled before it began")

    async def _deleted_unused(self) -> bool:
        """Delete the session of an earlier attempt. Return False if it has turns, so that it is not one of ours."""
        session_id = self._options["session_id"]
        try:
            if (await self._client.session_tree(session_id)).interactions:
                return False
        except SessionNotFound:
            return False  # the key is somebody else's
        await self._client.delete_session(session_id)
        return True


class _BlockingStart(_Start):
    def __init__(self, client: Client, task_id: str, options: SessionOptions) -> None:
        super().__init__(task_id, options)
        self._client = client

    def attempt(self) -> Session:
        try:
            return self._client.start_session(self._task_id, idempotency_key=self._key, retry_s=0.0, **self._options)
        except ServerUnreachable as error:
            self._unanswered |= not error.unsent
            raise
        except InvalidRequest as error:
            if not self._is_of_an_earlier_attempt(error) or not self._deleted_unused():
                raise
            self._begin_anew()
            return self.attempt()

    def _deleted_unused(self) -> bool:
        session_id = self._options["session_id"]
        try:
            if self._client.session_tree(session_id).interactions:
                return False
        except SessionNotFound:
            return False
        self._client.delete_session(session_id)
        return True
