"""One session from its start to its end: whatever plays episodes starts its sessions here, and leaves them here.

A session ends once, whatever happens in it. An end that a failure brings and that cannot be sent is logged: the session
expires at the server. What is played again is withdrawn: its group waits for the session in its place, no trainer gets
both, and its turns stay to be read. A start says who delivers the session to trainers: the queue of claims, or its
runner, who exports it by its id.
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
"""How long an episode waits for a place on a full server, unless its caller says otherwise."""
_GRACE_S = 10.0
"""How long an agent that is cancelled may take to clean up."""
_WAKE_S = 1.0
_logger = logging.getLogger(__name__)


class Overdue(TimeoutError):
    """What plays an episode has not ended in its time."""


class _Started(Generic[S]):
    """A session that has been started. Its agent gets `base_url` or `root_url`, and `api_key`; nothing else of it."""

    def __init__(self, session: S) -> None:
        self.session = session

    @property
    def session_id(self) -> str:
        return self.session.session_id

    @property
    def base_url(self) -> str:
        """The address for OpenAI's SDKs, which ends in /v1."""
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
        """Whether its end has been sent from here, and the server has taken it."""
        return self.session.ended

    def not_ended(self, error: ProxyError) -> None:
        """Say that the end of the session could not be sent."""
        _logger.warning("session %s could not be ended: %s", self.session_id, error)


class Episode(_Started[AsyncSession]):
    """The session of an episode on an event loop. As the context of `async with` it ends with the block."""

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
        """Start a session; wait up to `within_s` seconds while the server has no place, or is not there.

        `delivery`: unless `options` say it. Cancelled, it leaves no session that is live: what it still brings ends, or
        is withdrawn with `discard`. Raises TooManyRequests or ServerUnreachable if no session could start.
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
        """Return what `playing` returns. Raises what it raises, and Overdue with `told` after `timeout_s` seconds.

        It is cancelled then, and if this is cancelled. If it goes on in spite of that it is closed where it waits, or
        left in a thread: its key opens nothing once the session has ended.
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
        except Overdue as error:  # of another episode, which it played
            raise TimeoutError(str(error)) from error

    async def end(self, within_s: float | None = None, **options: Unpack[EndOptions]) -> None:
        """End the session; try for `within_s` seconds (None: as the client does). Raises the server's error.

        Whoever may be cancelled meanwhile awaits it by `to_the_end`, as what follows here.
        """
        await self.session.end(retry_s=within_s, **options)

    async def fail(self, error: BaseException, outcome: str = "Failed", within_s: float | None = None) -> None:
        """End the session because of `error`, unless it has ended. A cancellation is told to the server briefly."""
        if self.ended:
            return
        if isinstance(error, asyncio.CancelledError):
            within_s = LEAVE_S
        try:
            await self.end(within_s, outcome=outcome, exit_reason=reason_of(error))
        except ProxyError as failure:
            self.not_ended(failure)

    async def withdraw(self, within_s: float | None = None, **options: Unpack[WithdrawOptions]) -> None:
        """Withdraw the session, live or ended: the episode is played again. Raises the server's error."""
        with suppress(SessionNotFound):  # it was deleted, so it counts for nothing already
            await self.session.withdraw(retry_s=within_s, **options)

    async def _stop(self, task: asyncio.Future[Any], playing: Coroutine[Any, Any, Any]) -> None:
        """Cancel it and wait until it has cleaned up. One that goes on in spite of it is closed where it waits: on the
        event loop it would keep the program from ending.
        """
        task.add_done_callback(_retrieve)
        task.cancel()
        await asyncio.wait([task], timeout=_GRACE_S)
        if task.done():
            return
        with suppress(BaseException):  # what it does instead of ending
            playing.close()
        task.cancel()  # wakes it up
        await asyncio.wait([task], timeout=_WAKE_S)
        told = "was closed" if task.done() else "does not end; it is left"
        _logger.warning("the agent of session %s goes on though it was cancelled, and %s", self.session_id, told)


class BlockingEpisode(_Started[Session]):
    """The session of an episode whose caller blocks a thread. Others may end it: the first end counts.

    `outcome`: how it has ended, as far as its end said so; None while it has not.
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
        """As `Episode.start`; once `may_wait` is false it is not tried again."""
        session = start_session_here(client, task_id, within_s, {"delivery": delivery, **options}, may_wait)
        return BlockingEpisode(client, session)

    def end(self, within_s: float | None = None, **options: Unpack[EndOptions]) -> bool:
        """End the session, and return True; False if it has ended. As `Episode.end`.

        Raises EndedOtherwise or SessionNotFound if somebody else ended it, who has then failed it, and other errors of
        the server, after which it may be ended again.
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
        """End the session because of `error`, as `end`."""
        reason = reason_of(error) if isinstance(error, BaseException) else storable(error)
        return self.end(within_s, outcome=outcome, exit_reason=reason)


def reason_of(error: BaseException) -> str:
    """What the end of a session says of an exception."""
    return "cancelled" if isinstance(error, asyncio.CancelledError) else exit_reason(error)


def _raised(task: asyncio.Future[Any]) -> BaseException | None:
    """What a task that was stopped has raised: its traceback says where it was."""
    try:
        if task.done():
            task.result()
    except BaseException as error:
        return error
    return None


def _retrieve(task: asyncio.Future[Any]) -> None:
    """Keep asyncio from reporting what nobody asks for: the episode is over for another reason."""
    if not task.cancelled():
        task.exception()
