"""Environments of gem by their names."""

from __future__ import annotations

import difflib
import threading
from collections.abc import Mapping
from typing import Any

from proxy.errors import InvalidRequest
from proxy.rollout.roll.runners.seeded_env import SeededEnv
from proxy.rollout.roll.runners.tools.root_logger import same_root_logger
from proxy.rollout.roll.runners.tools.tool_env_wrapper import tool_wrapper

_registering = threading.Lock()


def make_environment(env_config: Any, params: Mapping[str, Any]) -> Any:
    """Make the environment `env_config["env_type"]` with `params`, in the `tool_wrapper` of `env_config`, if any.

    Environments of gem, and others with `use_thread_lock`, draw from generators of their own, so that a seed is one
    episode. One thread at a time begins one, and one at a time steps in games and with `use_thread_lock`.

    A name without a level (`game:Hangman-v0`, where gem has `-easy` and `-hard`) is the game with its own defaults.
    Raises InvalidRequest for an unknown name and if gem is not installed, and whatever the environment raises.
    """
    gem = _gem()
    env_type = env_config.get("env_type") or "sokoban"
    _register_without_level(gem, env_type)
    env = _alone_with_generators(gem.make(env_id=env_type, **params), env_config)
    if (wrapper := env_config.get("tool_wrapper")) is None:
        return env
    return tool_wrapper(env, wrapper.get("wrapper_args"), wrapper.get("tool_configs"))


def _alone_with_generators(env: Any, env_config: Any) -> Any:
    """The environment with random generators of its own if it is one of gem's, or `use_thread_lock` asks for it."""
    module = type(env).__module__
    locked = bool(env_config.get("use_thread_lock"))
    if locked or module.startswith("gem."):
        return SeededEnv(env, steps=locked or module.startswith("gem.envs.game_env."))
    return env


def close(env: Any) -> None:
    """Close an environment, if it can be closed, and end the process in which gem's grade answers."""
    if callable(closing := getattr(env, "close", None)):
        closing()
    if (pool := getattr(getattr(env, "unwrapped", env), "mp_pool", None)) is not None:
        pool.terminate()


def _gem() -> Any:
    """Import gem, which sets up the root logger, and leave that as it was."""
    try:
        with same_root_logger():
            import gem
    except ModuleNotFoundError as error:
        if error.name != "gem":
            raise
        raise InvalidRequest("environments need gem: pip install 'tokengrove[gem]', or gem-llm") from None
    return gem


def _register_without_level(gem: Any, env_type: str) -> None:
    """Register a game of which gem has levels only. Raises InvalidRequest for a name that is unknown otherwise, too."""
    from gem.envs.registration import ENV_REGISTRY

    with _registering:
        if env_type in ENV_REGISTRY:
            return
        levels = {str(spec.entry_point) for name, spec in ENV_REGISTRY.items() if name.startswith(f"{env_type}-")}
        if len(levels) != 1:
            close = difflib.get_close_matches(env_type, ENV_REGISTRY, n=3)
            raise InvalidRequest(
                f"there is no environment {env_type!r}{': is it ' + ' or '.join(close) + '?' if close else ''}; "
                "gem.register(name, entry_point) makes one known",
                param="env_type",
            )
        gem.register(env_type, levels.pop())
