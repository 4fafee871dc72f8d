"""The runner of one environment: its thread, its key and its address. One that hangs is replaced with all three."""

from __future__ import annotations

import inspect
import logging
import secrets
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, suppress
from typing import Any

from tokengrove.client import Client
from tokengrove.roll.managers.episode_session import address_of
from tokengrove.roll.managers.runner_thread import RunnerThread
from tokengrove.roll.runners.played import played
from tokengrove.roll.values.episode_result import EpisodeResult

logger = logging.getLogger(__name__)
_TEARDOWN_S = 30.0
"""How long the end of a loop waits for `teardown`."""


class RunnerSlot:
    """A runner with the key and the address that it has for all of its episodes.

    The runner is made, set up, run and torn down in one thread of its own. `chosen_key` is random, so that no request
    of another environment, or of an earlier runner, reaches its sessions; it is None where the server lets nobody
    choose keys. Raises what the constructor raises.
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
        """Let the runner's next requests go to this address, with this key."""
        self._give(base_url=base_url, api_key=api_key)

    def setup(self) -> None:
        """Set the runner up, also again after a teardown. Raises what its `setup` raises."""
        if self._client.hold is not None and self._http is None:
            self._http = self._client.http_client()
            self._give(http_client=self._http)
        self._locked(getattr(self.runner, "setup", _nothing))

    def play(self, seed: int) -> Future[EpisodeResult]:
        """Begin an episode. The future has its result, whatever happens in it."""
        return self._open().submit(lambda: played(self.runner, seed))

    def teardown(self) -> None:
        """Tear the runner down and end its thread; wait for that half a minute at most. An error is only logged."""
        if self.is_abandoned:
            return
        ended = self._open().submit(getattr(self.runner, "teardown", _nothing))
        try:
            ended.result(_TEARDOWN_S)
        except Exception as error:
            logger.warning("the teardown of %s failed: %r", type(self.runner).__name__, error)
        self._close()

    def abandon(self) -> None:
        """Leave a runner that hangs: its teardown follows once it does not any more, and nobody waits for it."""
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
        """End the thread once it has nothing to do any more."""
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
        with suppress(AttributeError):  # of a class with slots of its own
            for name, value in attributes.items():
                setattr(self.runner, name, value)


def _accepted(called: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """Those of the keyword arguments that `called` takes."""
    parameters = inspect.signature(called).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return arguments
    names = {parameter.name for parameter in parameters}
    return {name: value for name, value in arguments.items() if name in names}


def _nothing() -> None:
    """For runners that have no setup or teardown."""
