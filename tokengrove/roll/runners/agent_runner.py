"""The base class of runners. Setup happens once, before the first episode, and again only after a teardown."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from numbers import Real
from typing import Any, Self

from tokengrove.errors import InvalidRequest
from tokengrove.roll.runners.request_error import RequestError
from tokengrove.roll.values import EpisodeResult, Section, as_section


class EpisodeTimeout(Exception):
    """An episode has run for longer than its `episode_timeout`."""


class AgentRunner(ABC):
    """Plays episodes of one environment slot; a subclass has `run_job(seed)`, and `setup` and `teardown` if needed.

    A manager calls `setup` before the first episode and `teardown` after the last. Other callers need not call them:
    the first `run_job` sets the runner up, and `with runner:` tears it down. `setup` runs once, even if it is called
    again or from `__init__`.

    `base_url` is the address of the server or of the slot; `env_id` is the number of the slot, which `_llm_request`
    sends as the key. `env_config` is read by attribute and key. The base reads `max_steps` (default 10), `http_timeout`
    (seconds for a request; default 3600) and `episode_timeout` (seconds for an episode; default none), which may also
    be in its `config`, and `model`, the model name for servers that require one. `env_params` is `config` as a dict (in
    a custom environment of a YAML: `env_config`). `mode` is `env_params["mode"]`, or "train". `worker_config` is the
    manager's. `api_key` is the key of the session, which is sent instead of `env_id`. Other keyword arguments are for
    subclasses; the base ignores them.

    `step_scores` are the rewards of the steps of the running episode. A subclass that appends to it keeps the rewards
    if it raises an exception later. Without it `env_rewards`, the rewards of `self.env.step`, are kept.
    """

    env: Any = None
    api_key: str | None = None
    http_client: Any = None
    """Sends the requests instead of the client that `_llm_request` receives. Managers set it if the server is in this
    process, where no other client reaches it."""
    model: str | None = None
    http_timeout = 3600.0
    episode_timeout: float | None = None
    _started: float | None = None
    """The start of the running episode, on the monotonic clock."""

    def __init__(
        self,
        base_url: str,
        env_id: int,
        env_config: Any = None,
        worker_config: Any = None,
        *,
        api_key: str | None = None,
        **kwargs: Any,
    ) -> None:
        self.base_url = base_url
        self.api_key = api_key
        self.env_id = env_id
        self.env_config = Section() if env_config is None else as_section(env_config)
        self.worker_config = worker_config
        self.env_params: dict[str, Any] = _env_params(self.env_config)
        self.mode: str = self.env_params.get("mode", "train")
        self.max_steps = int(self._number("max_steps", 10))
        self.model: str | None = self.env_config.get("model")
        self.http_timeout = self._number("http_timeout", 3600.0)
        no_limit = self._setting("episode_timeout", None) is None
        self.episode_timeout = None if no_limit else self._number("episode_timeout", 0.0)
        self.step_scores: list[float] = []
        self.env_rewards: list[float] = []

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name, prepared in (("setup", _once), ("run_job", _set_up_first), ("teardown", _allowing_setup)):
            if name in vars(cls):
                setattr(cls, name, prepared(vars(cls)[name]))

    @abstractmethod
    def run_job(self, seed: int) -> EpisodeResult:
        """Play an episode. `seed` determines its data and the first state of its environment."""

    def setup(self) -> None:  # noqa: B027 - a runner may have nothing to prepare
        """Prepare the state that all episodes share, such as the environment."""

    def teardown(self) -> None:  # noqa: B027
        """Release the state that `setup` prepared."""

    def __enter__(self) -> Self:
        self.setup()
        return self

    def __exit__(self, *exception: object) -> None:
        self.teardown()

    def _llm_request(
        self,
        client: Any,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: Any = "auto",
        **fields: Any,
    ) -> dict[str, Any]:
        """Ask the model for the next message; return the chat completion. `fields`: further fields of the request's
        body.

        `client` is an `httpx.Client`, or has its `post`. Raises RequestError (an `httpx.HTTPError`) with the server's
        message for an error response, and EpisodeTimeout after the time limit of the episode.
        """
        left = self._time_left()
        model = {} if self.model is None else {"model": self.model}
        limits: dict[str, Any] = {}
        if left is not None or self.http_client is not None:  # otherwise the given client has its own limits
            limits["timeout"] = self.http_timeout if left is None else min(self.http_timeout, left)
        answer = (self.http_client or client).post(
            f"{self.base_url.rstrip('/').removesuffix('/v1')}/v1/chat/completions",
            json={
                **fields,
                **model,
                "messages": messages,
                "tools": tools or [],
                "tool_choice": tool_choice if tools else "none",
            },
            headers={"Authorization": f"Bearer {self.env_id if self.api_key is None else self.api_key}"},
            **limits,
        )
        if answer.status_code >= 400:
            raise RequestError(answer)
        completion: dict[str, Any] = answer.json()
        return completion

    def _time_left(self) -> float | None:
        """Seconds that the running episode has left; None without a limit. Raises EpisodeTimeout if none are left."""
        if self._started is None or (limit := self.episode_timeout) is None:
            return None
        if (left := self._started + limit - time.monotonic()) <= 0:
            raise EpisodeTimeout(f"the episode has run for longer than its episode_timeout of {limit:g} s")
        return left

    def _number(self, name: str, default: float) -> float:
        """A setting that is a number, 0 or more. Raises InvalidRequest for other values."""
        value = self._setting(name, default)
        try:
            number = float(value)
        except (TypeError, ValueError):
            number = -1.0
        if number >= 0:
            return number
        raise InvalidRequest(f"{name} is {value!r}; it must be a number, 0 or more", param=name)

    def _setting(self, name: str, default: Any) -> Any:
        """A setting of `env_config` or of its `config`; None means the default."""
        for settings in (self.env_config, self.env_params):
            if (value := settings.get(name)) is not None:
                return value
        return default


def _env_params(env_config: Any) -> dict[str, Any]:
    for name in ("config", "env_config"):
        if (params := env_config.get(name)) is not None:
            return {key: _plain(value) for key, value in params.items()}
    return {}


def _plain(value: Any) -> Any:
    """Sections, including OmegaConf's, as dicts and lists, since environments check these types."""
    if isinstance(value, Mapping):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, tuple):
        return tuple(map(_plain, value))
    if isinstance(value, list) or type(value).__name__ == "ListConfig":
        return list(map(_plain, value))
    return value


def _once(setup: Callable[[Any], None]) -> Callable[[Any], None]:
    """A `setup` that runs once for each runner until its teardown. A base class's `setup` is counted separately."""

    @wraps(setup)
    def once(self: Any) -> None:
        done: set[Any] = vars(self).setdefault("_set_up", set())
        if setup not in done:
            done.add(setup)
            try:
                setup(self)
            except BaseException:
                done.clear()
                raise

    return once


def _allowing_setup(teardown: Callable[[Any], None]) -> Callable[[Any], None]:
    @wraps(teardown)
    def allowing_setup(self: Any) -> None:
        vars(self).pop("_set_up", None)
        teardown(self)

    return allowing_setup


def _set_up_first(run_job: Callable[[Any, int], EpisodeResult]) -> Callable[[Any, int], EpisodeResult]:
    """A `run_job` that begins an episode, unless a subclass's `run_job` has begun it."""

    @wraps(run_job)
    def set_up_first(self: Any, seed: int) -> EpisodeResult:
        if self._started is not None:
            return run_job(self, seed)
        self.step_scores, self.env_rewards = [], []
        self.setup()
        self._started = time.monotonic()
        try:
            with step_rewards(self.env) as self.env_rewards:
                return run_job(self, seed)
        finally:
            self._started = None

    return set_up_first


@contextmanager
def step_rewards(env: Any) -> Iterator[list[float]]:
    """A list of the rewards of each `env.step` within the block: the second of its four or five values.

    An environment without a `step` of its class, or whose attributes cannot be set, is not recorded.
    """
    rewards: list[float] = []
    attributes, step = getattr(env, "__dict__", None), getattr(env, "step", None)
    if type(attributes) is not dict or not callable(step) or "step" in attributes:
        yield rewards
        return
    attributes["step"] = _noting(step, rewards)
    try:
        yield rewards
    finally:
        attributes.pop("step", None)


def _noting(step: Callable[..., Any], rewards: list[float]) -> Callable[..., Any]:
    @wraps(step)
    def noting(*arguments: Any, **more: Any) -> Any:
        result = step(*arguments, **more)
        if isinstance(result, tuple) and len(result) in (4, 5) and isinstance(result[1], Real):
            rewards.append(float(result[1]))
        return result

    return noting
