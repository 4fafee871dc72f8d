"""The runner of one environment: its thread, its key and its address. One that hangs is replaced with all three."""

from __future__ import annotations

import inspect
import logging
import secrets
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, suppress
from typing import Any

from proxy.client import Client
from proxy.rollout.roll.managers.episode_session import address_of
from proxy.rollout.roll.managers.runner_thread import RunnerThread
from proxy.rollout.roll.runners.played import played
from proxy.rollout.roll.values.episode_result import EpisodeResult

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
        self._client, self._lock = client, lock
        self._http = None if client.hold is None else client.http_client()
        self._thread = RunnerThread(f"tokengrove-env-{env_config['env_id']}")
        arguments = {"worker_config": worker_config, "api_key": key}
        given = {"base_url": address_of(client, key), "env_id": env_config["env_id"], "env_config": env_config}
        try:
            self.runner = self._locked(lambda: runner_class(**given, **_accepted(runner_class, arguments)))
        except BaseException:
            self.leave()
            raise
        with suppress(AttributeError):  # of a class with slots of its own
            if getattr(self.runner, "api_key", None) is None:
                self.runner.api_key = key
            if self._http is not None:
                self.runner.http_client = self._http

    def address(self, base_url: str, api_key: str) -> None:
        """Let the runner's next requests go to this address, with this key."""
        with suppress(AttributeError):
            self.runner.base_url, self.runner.api_key = base_url, api_key

    def setup(self) -> None:
        """Set the runner up. Raises what its `setup` raises."""
        self._locked(getattr(self.runner, "setup", _nothing))

    def play(self, seed: int) -> Future[EpisodeResult]:
        """Begin an episode. The future has its result, whatever happens in it."""
        runner = self.runner
        return self._thread.submit(lambda: played(runner, seed))

    def teardown(self) -> None:
        """Tear the runner down and end its thread; wait for that half a minute at most. An error is only logged."""
        ended = self._thread.submit(getattr(self.runner, "teardown", _nothing))
        try:
            ended.result(_TEARDOWN_S)
        except Exception as error:
            logger.warning("the teardown of %s failed: %r", type(self.runner).__name__, error)
        self.leave()

    def abandon(self) -> None:
        """Leave a runner that hangs: its teardown follows once it does not any more, and nobody waits for it."""
        runner = self.runner
        self._thread.submit(getattr(runner, "teardown", _nothing))
        self.leave()

    def leave(self) -> None:
        """End the thread once it has nothing to do any more."""
        self._thread.close()
        if self._http is not None:
            self._http.close()

    def _locked(self, function: Callable[[], Any]) -> Any:
        with self._lock:
            return self._thread.call(function)


def _accepted(called: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """Those of the keyword arguments that `called` takes."""
    parameters = inspect.signature(called).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return arguments
    names = {parameter.name for parameter in parameters}
    return {name: value for name, value in arguments.items() if name in names}


def _nothing() -> None:
    """For runners that have no setup or teardown."""
