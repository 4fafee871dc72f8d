"""The start of a session that is waited for: while the server is full, restarts, or an answer is lost on the way.

No session is left behind: one that was started by an attempt whose answer never came is recognised by its id and
replaced, and a start that is cancelled ends what it still brings.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress

import httpx

from proxy.client import AsyncClient, AsyncSession, ServerUnreachable
from proxy.client.options import SessionOptions
from proxy.errors import InvalidRequest, ProxyError
from proxy.rollout.retries import retried

UNREACHABLE_S = 60.0
"""How long a server that does not answer is tried: a restart takes less, and a wrong address should be noticed."""

_GIVE_UP_S = 10.0


async def start_session(client: AsyncClient, task_id: str, within_s: float, options: SessionOptions) -> AsyncSession:
    """Start a session; wait up to `within_s` seconds while the server has no place (429), or is not there.

    A server that does not answer is tried for a minute at most. An attempt whose answer was lost is repeated only if
    `options` name the session, by an id that nobody else uses: its session is deleted, since its keys are unknown.
    """
    start = _Start(client, task_id, options)
    return await retried(start.attempt, within_s, start.may_be_repeated)


class _Start:
    """The attempts of one start."""

    def __init__(self, client: AsyncClient, task_id: str, options: SessionOptions) -> None:
        self._client, self._task_id, self._options = client, task_id, options
        self._begun = time.monotonic()
        self._unanswered = False

    async def attempt(self) -> AsyncSession:
        starting = asyncio.ensure_future(self._client.start_session(self._task_id, **self._options))
        try:
            return await asyncio.shield(starting)
        except ServerUnreachable:
            self._unanswered = True
            raise
        except InvalidRequest as error:
            if not self._unanswered or error.param != "session_id" or not await self._deleted_unused():
                raise
            self._unanswered = False
            return await self.attempt()
        except asyncio.CancelledError:
            await _give_up(starting)
            raise

    def may_be_repeated(self, error: ProxyError) -> bool:
        if isinstance(error, ServerUnreachable):
            unsent = isinstance(error.__cause__, httpx.ConnectError)
            patient = time.monotonic() < self._begun + UNREACHABLE_S
            return patient and (unsent or "session_id" in self._options)
        return error.status in (429, 503)

    async def _deleted_unused(self) -> bool:
        """Delete the session of an earlier attempt. Return False if it has turns, so that it is not one of ours."""
        session_id = self._options["session_id"]
        if (await self._client.session_tree(session_id)).interactions:
            return False
        await self._client.delete_session(session_id)
        return True


async def _give_up(starting: asyncio.Future[AsyncSession]) -> None:
    """End the session that `starting` still brings: nobody else would."""
    with suppress(ProxyError, TimeoutError):
        async with asyncio.timeout(_GIVE_UP_S):
            session = await starting
            await session.end(outcome="Failed", exit_reason="cancelled before it began")
