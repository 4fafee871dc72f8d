"""The runner of one environment, with its thread, key and address. If it hangs, all of them are replaced."""

from __future__ import annotations

import inspect
import logging
import secrets
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, suppress
from queue import SimpleQueue
from typing import Any, TypeVar

from tokengrove.client import Client
from tokengrove.roll.managers.episode_session import address_of
from tokengrove.roll.runners.played import played
from tokengrove.roll.values.episode_result import EpisodeResult

logger = logging.getLogger(__name__)
_TEARDOWN_S = 30.0
"""Seconds that the end of a loop waits for `teardown`."""


class RunnerSlot:
    """A runner, with one key and address for all of its episodes.

    The runner is created, set up, run and torn down in its own thread. `chosen_key` is random, so that requests of
    other environments or of an earlier runner never reach its sessions; it is None if the server does not allow chosen
    keys. Raises the exceptions of the constructor.
    """

    def __init__(
        self, runner_class: Any, client: Client, env_config: Any, worker_config: Any, lock: AbstractContextManager[Any]
    ) -> None:
        key = f"slot-{secrets.token_urlsafe(24)}"
        self.chosen_key: str | None = key
        self.is_abandoned = False
        self._client, self._lock = client, lock
        self._name = f"tokengrove-env-{env_config['env_id']}"
        self._thread: RunnerThread | None = RunnerThread(self._name)
        self._http: Any = None
        arguments = {"worker_config": worker_config, "api_key": key}
        given = {"base_url": address_of(client, key), "env_id": env_config["env_id"], "env_config": env_config}
        try:
            self.runner = self._locked(lambda: runner_class(**given, **_accepted(runner_class, arguments)))
        except BaseException:
            self._close()
            raise
        if getattr(self.runner, "api_key", None) is None:
            self._give(api_key=key)

    def address(self, base_url: str, api_key: str) -> None:
        """Send the runner's next requests to this address, with this key."""
        self._give(base_url=base_url, api_key=api_key)

    def setup(self) -> None:
        """Set the runner up, also again after a teardown. Raises the exceptions of its `setup`."""
        if self._client.hold is not None and self._http is None:
            self._http = self._client.http_client()
            self._give(http_client=self._http)
        self._locked(getattr(self.runner, "setup", _nothing))

    def play(self, seed: int) -> Future[EpisodeResult]:
        """Begin an episode. The future always has a result, and never an exception of the runner."""
        return self._open().submit(lambda: played(self.runner, seed))

    def teardown(self) -> None:
        """Tear the runner down and end its thread; wait at most half a minute. Errors are only logged."""
        if self.is_abandoned:
            return
        ended = self._open().submit(getattr(self.runner, "teardown", _nothing))
        try:
            ended.result(_TEARDOWN_S)
        except Exception as error:
            logger.warning("the teardown of %s failed: %r", type(self.runner).__name__, error)
        self._close()

    def abandon(self) -> None:
        """Abandon a runner that hangs: it is torn down when it no longer hangs, and nobody waits for that."""
        self.is_abandoned = True
        self.cancel()
        self._open().submit(getattr(self.runner, "teardown", _nothing))
        self._close()

    def cancel(self) -> None:
        """Tell the runner to end its episode, if its class has a `cancel`, which may be called while it runs."""
        getattr(self.runner, "cancel", _nothing)()

    def _open(self) -> RunnerThread:
        if self._thread is None:
            self._thread = RunnerThread(self._name)
        return self._thread

    def _close(self) -> None:
        """End the thread after its last call."""
        if self._thread is not None:
            self._thread.close()
            self._thread = None
        if self._http is not None:
            self._http.close()
            self._http = None

    def _locked(self, function: Callable[[], Any]) -> Any:
        with self._lock:
            return self._open().call(function)

    def _give(self, **attributes: Any) -> None:
        with suppress(AttributeError):  # of a class with __slots__
            for name, value in attributes.items():
                setattr(self.runner, name, value)


def _accepted(called: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """The keyword arguments that `called` accepts."""
    parameters = inspect.signature(called).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return arguments
    names = {parameter.name for parameter in parameters}
    return {name: value for name, value in arguments.items() if name in names}


def _nothing() -> None:
    """Replaces a missing setup, teardown or cancel."""


T = TypeVar("T")


class RunnerThread:
    """Calls functions one after another in its own daemon thread."""

    def __init__(self, name: str) -> None:
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def submit(self, function: Callable[[], T]) -> Future[T]:
        """Call `function` after the earlier calls; the future has its result or exception."""
        future: Future[T] = Future()

        def call() -> None:
            try:
                result = function()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)

        self._calls.put(call)
        return future

    def call(self, function: Callable[[], T]) -> T:
        """Call `function` and wait; return its result or raise its exception."""
        return self.submit(function).result()

    def close(self) -> None:
        """End the thread after the earlier calls. Does not wait."""
        self._calls.put(None)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
