"""Starts sessions with retries while the server is full, restarts, or an answer is lost.

No session is abandoned: all attempts have one Idempotency-Key, so they start one session, and a cancelled start ends
the session that it may still receive.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, cast

from tokengrove.client import AsyncClient, AsyncSession, Client, ServerUnreachable, Session
from tokengrove.client.options import SessionOptions
from tokengrove.errors import ProxyError
from tokengrove.rollout.cancellation import to_the_end
from tokengrove.rollout.retries import retried, retried_here

UNREACHABLE_S = 60.0
"""Seconds in which an unreachable server is retried: a restart takes less time, and a wrong address is noticed."""

_GIVE_UP_S = 10.0
_NOT_OF_AN_ID = re.compile(r"[^\w.-]+", re.ASCII)
_NAME_LENGTH = 100


def unused_session_id(name: str) -> str:
    """A unique session id. It begins with `name`, with invalid characters replaced and truncated to 100 characters."""
    return f"{_NOT_OF_AN_ID.sub('-', name)[:_NAME_LENGTH]}-{secrets.token_hex(6)}"


def merged_options(common: SessionOptions, own: SessionOptions) -> SessionOptions:
    """The options of a task's session: its own take precedence, and mappings are merged key by key."""
    merged: dict[str, Any] = dict(common)
    for name, value in own.items():
        before = merged.get(name)
        merged[name] = {**before, **value} if isinstance(before, Mapping) and isinstance(value, Mapping) else value
    return cast(SessionOptions, merged)


async def start_session(
    client: AsyncClient, task_id: str, within_s: float, options: SessionOptions, *, discard: bool = False
) -> AsyncSession:
    """Start a session; retry for `within_s` seconds while the server is full (429) or unavailable (503).

    An unreachable server is retried for at most a minute. `discard`: if this is cancelled, the session that still
    starts is withdrawn instead of ended, so it never counts in its group. If this is cancelled after an answer was
    lost, the session is deleted if `options` have its `session_id` and it has no turns. Raises the last error.
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
    """Like `start_session`, for a client that blocks this thread; once `may_wait` returns False, it is not retried."""
    start = _Start(task_id, options)
    return retried_here(
        lambda: client.start_session(task_id, idempotency_key=start.key, retry_s=0.0, **options),
        within_s,
        lambda error: may_wait() and start.may_be_repeated(error),
    )


class _Start:
    """The attempts of one start. `key`: the Idempotency-Key of all attempts."""

    def __init__(self, task_id: str, options: SessionOptions) -> None:
        self._task_id, self._options = task_id, options
        self._begun = time.monotonic()
        self.key = secrets.token_hex(16)

    def may_be_repeated(self, error: ProxyError) -> bool:
        if isinstance(error, ServerUnreachable):
            return error.retryable and time.monotonic() < self._begun + UNREACHABLE_S
        return error.status in (429, 503)


class _AsyncStart(_Start):
    def __init__(self, client: AsyncClient, task_id: str, options: SessionOptions, discard: bool) -> None:
        super().__init__(task_id, options)
        self._client, self._discard = client, discard
        self._unanswered = False

    async def attempt(self) -> AsyncSession:
        starting = asyncio.ensure_future(self._answered())
        try:
            return await asyncio.shield(starting)
        except asyncio.CancelledError:
            await to_the_end(self._give_up(starting))
            raise

    async def _answered(self) -> AsyncSession:
        """Start the session and record whether the answer was lost, even after this attempt was cancelled."""
        try:
            session = await self._client.start_session(
                self._task_id, idempotency_key=self.key, retry_s=0.0, **self._options
            )
        except ServerUnreachable as error:
            self._unanswered |= not error.unsent
            raise
        self._unanswered = False
        return session

    async def leave(self) -> None:
        """Delete the session of an attempt whose answer was lost, unless a later attempt got an answer."""
        if self._unanswered and "session_id" in self._options:
            with suppress(ProxyError, TimeoutError):
                async with asyncio.timeout(_GIVE_UP_S):
                    await self._deleted_unused()

    async def _give_up(self, starting: asyncio.Future[AsyncSession]) -> None:
        """End or withdraw the session that `starting` still returns, because no other code knows it."""
        with suppress(ProxyError, TimeoutError):
            async with asyncio.timeout(_GIVE_UP_S):
                session = await starting
                leave = session.withdraw if self._discard else session.end
                await leave(outcome="Failed", exit_reason="cancelled before it began")

    async def _deleted_unused(self) -> None:
        """Delete the session of an earlier attempt. A session with turns belongs to another caller and is kept."""
        session_id = self._options["session_id"]
        if not (await self._client.session_tree(session_id)).interactions:
            await self._client.delete_session(session_id)
