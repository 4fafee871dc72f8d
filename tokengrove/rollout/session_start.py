"""The start of a session that is waited for: while the server is full, restarts, or an answer is lost on the way.

No session is left behind: all attempts have one Idempotency-Key, so that they start one session, and a start that is
cancelled ends what it still brings.
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
"""How long a server that does not answer is tried: a restart takes less, and a wrong address should be noticed."""

_GIVE_UP_S = 10.0
_NOT_OF_AN_ID = re.compile(r"[^\w.-]+", re.ASCII)
_NAME_LENGTH = 100


def unused_session_id(name: str) -> str:
    """A session id that nobody else has. It begins with `name`, as far as an id can."""
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
    """Start a session; wait up to `within_s` seconds while the server has no place (429), or is not there.

    A server that does not answer is tried for a minute at most. `discard`: if this is cancelled, what it still brings
    is withdrawn, and never counts in its group. If it is cancelled after an answer was lost, the session that was
    started is deleted, if `options` name it.
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
    start = _Start(task_id, options)
    return retried_here(
        lambda: client.start_session(task_id, idempotency_key=start.key, retry_s=0.0, **options),
        within_s,
        lambda error: may_wait() and start.may_be_repeated(error),
    )


class _Start:
    """The attempts of one start. `key`: by it the server knows that they are one."""

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
        """Start the session; note an answer that was lost, also after this attempt was cancelled."""
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
        """Delete the session of an attempt whose answer was lost, which no other attempt has replaced."""
        if self._unanswered and "session_id" in self._options:
            with suppress(ProxyError, TimeoutError):
                async with asyncio.timeout(_GIVE_UP_S):
                    await self._deleted_unused()

    async def _give_up(self, starting: asyncio.Future[AsyncSession]) -> None:
        """End or withdraw the session that `starting` still brings: nobody else would."""
        with suppress(ProxyError, TimeoutError):
            async with asyncio.timeout(_GIVE_UP_S):
                session = await starting
                leave = session.withdraw if self._discard else session.end
                await leave(outcome="Failed", exit_reason="cancelled before it began")

    async def _deleted_unused(self) -> None:
        """Delete the session of an earlier attempt; one that has turns is not ours."""
        session_id = self._options["session_id"]
        if not (await self._client.session_tree(session_id)).interactions:
            await self._client.delete_session(session_id)
