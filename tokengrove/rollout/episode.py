"""One session from its start to its end. All code that plays episodes starts and ends its sessions here.

A session ends exactly once. If its end after a failure cannot be sent, that is logged, and the session expires on the
server. The session of an episode that will be played again is withdrawn: its group waits for the session that replaces
it, no trainer gets both, and its turns can still be read. The start sets who delivers the session to trainers: the
queue of claims, or the runner, which exports it by its id.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from types import TracebackType
from typing import Any, Generic, Literal, Self, TypeVar, Unpack

from tokengrove.client import AsyncClient, AsyncSession, Client, Session
from tokengrove.client.exit_reason import exit_reason, storable
from tokengrove.client.operations import StartedSession
from tokengrove.client.options import EndOptions, SessionOptions, WithdrawOptions
from tokengrove.client.retries import LEAVE_S
from tokengrove.errors import EndedOtherwise, ProxyError, SessionNotFound
from tokengrove.rollout.cancellation import to_the_end
from tokengrove.rollout.session_start import start_session, start_session_here

S = TypeVar("S", bound=StartedSession)
T = TypeVar("T")
Deliverer = Literal["queue", "runner"]
START_S = 600.0
"""The default number of seconds that an episode waits for a place on a full server."""
_GRACE_S = 10.0
"""Seconds that a cancelled agent may take to clean up."""
_WAKE_S = 1.0
_logger = logging.getLogger(__name__)


class Overdue(TimeoutError):
    """The agent of an episode has not ended in time."""


class _Started(Generic[S]):
    """A started session. Its agent gets only `base_url` or `root_url`, and `api_key`."""

    def __init__(self, session: S) -> None:
        self.session = session

    @property
    def session_id(self) -> str:
        return self.session.session_id

    @property
    def base_url(self) -> str:
        """The address for OpenAI's SDKs; it ends in /v1."""
        return self.session.base_url

    @property
    def root_url(self) -> str:
        """The address without /v1, for Anthropic's SDKs."""
        return self.session.root_url

    @property
    def api_key(self) -> str:
        """The agent's key, which opens this session only."""
        return self.session.api_key

    @property
    def ended(self) -> bool:
        """Whether this object has sent the end of the session and the server has accepted it."""
        return self.session.ended

    def not_ended(self, error: ProxyError) -> None:
        """Log that the end of the session could not be sent."""
        _logger.warning("session %s could not be ended: %s", self.session_id, error)


class Episode(_Started[AsyncSession]):
    """The session of an episode on an event loop. An `async with` block ends the session when the block ends."""

    def __init__(self, client: AsyncClient, session: AsyncSession) -> None:
        super().__init__(session)
        self.client = client

    @classmethod
    async def start(
        cls,
        client: AsyncClient,
        task_id: str,
        options: SessionOptions,
        *,
        delivery: Deliverer,
        within_s: float = START_S,
        discard: bool = False,
    ) -> Episode:
        """Start a session; wait up to `within_s` seconds while the server is full or unavailable.

        `delivery`: used unless `options` set it. If this is cancelled, no live session remains: a session that still
        starts is ended, or withdrawn with `discard`. Raises the last error of the server, such as TooManyRequests, or
        ServerUnreachable.
        """
        session = await start_session(client, task_id, within_s, {"delivery": delivery, **options}, discard=discard)
        return Episode(client, session)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            await to_the_end(self.fail(error, within_s=LEAVE_S))
        elif not self.ended:
            await to_the_end(self.end())

    async def play(self, playing: Coroutine[Any, Any, T], timeout_s: float | None, told: str) -> T:
        """Return the result of `playing`. Raises its exception, or Overdue after `timeout_s` seconds.

        `told`: the message of Overdue. On a timeout, and if this is cancelled, `playing` is cancelled. If it does not
        end then, it is closed at its current await; a blocking call is left in its thread. Its key has no effect after
        the session has ended.
        """
        task = asyncio.ensure_future(playing)
        try:
            await asyncio.wait([task], timeout=timeout_s)
        except asyncio.CancelledError:
            await to_the_end(self._stop(task, playing))
            raise
        if not task.done():
            await to_the_end(self._stop(task, playing))
            raise Overdue(told) from _raised(task)
        try:
            return task.result()
        except Overdue as error:  # of another episode, which `playing` has played
            raise TimeoutError(str(error)) from error

    async def end(self, within_s: float | None = None, **options: Unpack[EndOptions]) -> None:
        """End the session. Raises the server's error.

        `within_s`: seconds in which requests are retried; None: the client's default. A caller that may be cancelled
        awaits this, and the methods below, through `to_the_end`.
        """
        await self.session.end(retry_s=within_s, **options)

    async def fail(self, error: BaseException, outcome: str = "Failed", within_s: float | None = None) -> None:
        """End the session because of `error`, unless it has ended. After a cancellation, retries are brief."""
        if self.ended:
            return
        if isinstance(error, asyncio.CancelledError):
            within_s = LEAVE_S
        try:
            await self.end(within_s, outcome=outcome, exit_reason=reason_of(error))
        except ProxyError as failure:
            self.not_ended(failure)

    async def withdraw(self, within_s: float | None = None, **options: Unpack[WithdrawOptions]) -> None:
        """Withdraw the session, live or ended, because the episode is played again. Raises the server's error."""
        with suppress(SessionNotFound):  # a deleted session counts in no group
            await self.session.withdraw(retry_s=within_s, **options)

    async def _stop(self, task: asyncio.Future[Any], playing: Coroutine[Any, Any, Any]) -> None:
        """Cancel `task` and wait for its clean-up. If it does not end, close it at its current await.

        A task that stays on the event loop would prevent the program from ending.
        """
        task.add_done_callback(_retrieve)
        task.cancel()
        await asyncio.wait([task], timeout=_GRACE_S)
        if task.done():
            return
        with suppress(BaseException):  # raised when it does not stop
            playing.close()
        task.cancel()  # wakes it up
        await asyncio.wait([task], timeout=_WAKE_S)
        told = "it was closed" if task.done() else "it still runs and is abandoned"
        _logger.warning("the agent of session %s did not stop when it was cancelled; %s", self.session_id, told)


class BlockingEpisode(_Started[Session]):
    """The session of an episode that a thread plays. Other threads may end it: the first end counts.

    `outcome`: the outcome that ended it (empty if the end gave none); None: it has not ended.
    """

    def __init__(self, client: Client, session: Session) -> None:
        super().__init__(session)
        self.client = client
        self.outcome: str | None = None
        self._ending = threading.Lock()

    @classmethod
    def start(
        cls,
        client: Client,
        task_id: str,
        options: SessionOptions,
        *,
        delivery: Deliverer,
        within_s: float = START_S,
        may_wait: Callable[[], bool] = lambda: True,
    ) -> BlockingEpisode:
        """Like `Episode.start`; once `may_wait` returns False, the start is not retried."""
        session = start_session_here(client, task_id, within_s, {"delivery": delivery, **options}, may_wait)
        return BlockingEpisode(client, session)

    def end(self, within_s: float | None = None, **options: Unpack[EndOptions]) -> bool:
        """End the session. Return False if it has already ended here. `within_s` is as in `Episode.end`.

        Raises EndedOtherwise or SessionNotFound if it was ended elsewhere; its outcome is then Failed. After another
        error of the server, it may be ended again.
        """
        with self._ending:
            if self.outcome is not None:
                return False
            try:
                self.session.end(retry_s=within_s, **options)
            except (EndedOtherwise, SessionNotFound):
                self.outcome = "Failed"
                raise
            self.outcome = options.get("outcome", "")
        return True

    def fail(self, error: BaseException | str, outcome: str = "Failed", within_s: float | None = None) -> bool:
        """End the session because of `error`, like `end`."""
        reason = reason_of(error) if isinstance(error, BaseException) else storable(error)
        return self.end(within_s, outcome=outcome, exit_reason=reason)


def reason_of(error: BaseException) -> str:
    """The exit reason of a session for an exception."""
    return "cancelled" if isinstance(error, asyncio.CancelledError) else exit_reason(error)


def _raised(task: asyncio.Future[Any]) -> BaseException | None:
    """The exception of a stopped task. Its traceback shows where the task was."""
    try:
        if task.done():
            task.result()
    except BaseException as error:
        return error
    return None


def _retrieve(task: asyncio.Future[Any]) -> None:
    """Keep asyncio from logging an exception that nobody retrieves: the episode ended for another reason."""
    if not task.cancelled():
        task.exception()
