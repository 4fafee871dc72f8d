"""A session of the contract around a harness, which runs concurrently with the caller that answers its calls.

After the harness has ended, `next_request` returns None. A failed harness has no reward: `verify` raises its exception.
`close` leaves neither a process nor an open session behind.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from typing import Any

from tokengrove.errors import ProxyError
from tokengrove.openenv.blocking import run_blocking
from tokengrove.openenv.completion_text import message_of
from tokengrove.openenv.harness import Harness
from tokengrove.openenv.interception import Interception
from tokengrove.openenv.verified import verified_of
from tokengrove.rollout.failures import AgentFailed

_CLOSE_S = 10.0
"""Seconds for which a cancelled harness may run on. A blocking function that takes longer is left in its thread."""
_CLOSED = AgentFailed("closed", "the session was closed before the harness had ended")
_log = logging.getLogger(__name__)


class HarnessSession:
    """Implements `AgentSession`. `verify(task, messages)`, plain or async, returns the score: a number, None, or an
    object with `env_reward`.

    `messages` are the last conversation of the harness that had tools, or else its last conversation.
    """

    def __init__(
        self,
        task: Any,
        harness: Harness,
        access: Interception,
        verify: Callable[[Any, list[dict[str, Any]]], Any],
        close: Callable[[], None] = lambda: None,
    ) -> None:
        """Start the harness in a thread. `close` releases further resources of the session."""
        self._task, self._access, self._verify, self._release = task, access, verify, close
        self.messages: list[dict[str, Any]] = []
        self._with_tools = False
        self._ended = threading.Event()
        self._over: Future[Any] = Future()
        self._closing = threading.Lock()
        self._closed = False
        self._loop = asyncio.new_event_loop()
        self._running = self._loop.create_task(harness.run(task, access))
        threading.Thread(target=self._play, name=f"tokengrove-harness-{access.rollout_id}", daemon=True).start()

    def next_request(self) -> dict[str, Any] | None:
        """Wait for the next call of the harness; None after it has ended, also if it failed while its call waited."""
        intercept = None if self._ended.is_set() else self._access.next_request()
        return None if self._ended.is_set() else intercept

    def deliver(self, intercept: dict[str, Any], completion_text: str) -> None:
        """Answer a call of the harness."""
        self._access.deliver(intercept, completion_text)
        if intercept["tools"] or not self._with_tools:
            self._with_tools = bool(intercept["tools"])
            self.messages = [*intercept["messages"], message_of(completion_text)]

    def wait(self) -> Any:
        """Wait until the harness has ended; return its result. Raises its exception."""
        return self._over.result()

    def verify(self) -> Any:
        """Wait until the harness has ended, and score the episode. Raises its exception, and those of `verify`."""
        self.wait()
        found = self._verify(self._task, self.messages)
        return verified_of(run_blocking(found) if inspect.iscoroutine(found) else found)

    def close(self) -> None:
        """End the harness, if it is running, and its session. Repeated calls do nothing."""
        with self._closing:
            if self._closed:
                return
            self._closed = True
        try:
            self._cancel()
        finally:
            self._release()

    def _cancel(self) -> None:
        """Cancel the harness and wait until it has ended; if it does not end, end its session."""
        with suppress(RuntimeError):  # its loop is closed, so it has ended
            self._loop.call_soon_threadsafe(self._running.cancel)
        if not wait([self._over], _CLOSE_S).done:
            _log.warning("the harness of %s does not end; it is left running", self._access.rollout_id)
            self._say_ended(_CLOSED)

    def _play(self) -> None:
        try:
            result = self._loop.run_until_complete(self._running)
        except BaseException as error:
            failure = _CLOSED if isinstance(error, asyncio.CancelledError) else error
            self._say_ended(failure)
            self._over.set_exception(failure)
        else:
            self._say_ended(None)
            self._over.set_result(result)
        finally:
            self._loop.close()

    def _say_ended(self, failure: BaseException | None) -> None:
        self._ended.set()
        try:
            self._access.end(failure)
        except ProxyError as error:
            _log.warning("the session of %s could not be ended: %s", self._access.rollout_id, error)
