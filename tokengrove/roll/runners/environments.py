"""Environments of gem by name."""

from __future__ import annotations

import difflib
import threading
from collections.abc import Iterable, Mapping
from typing import Any

from tokengrove.errors import InvalidRequest
from tokengrove.roll.config import resolve
from tokengrove.roll.envs.games import GAMES, load_gem, register_game
from tokengrove.roll.runners.seeded_env import SeededEnv
from tokengrove.roll.runners.tools.tool_env_wrapper import tool_wrapper

_registering = threading.Lock()


def make_environment(env_config: Any, params: Mapping[str, Any]) -> Any:
    """Create the environment `env_config["env_type"]` with `params`, in the `tool_wrapper` of `env_config`, if any.

    Environments of gem, and others with `use_thread_lock`, have their own random generators, so that a seed determines
    the episode. Their `reset` runs in one thread at a time; so does `step` in games and with `use_thread_lock`.

    The name may be the path of a class, `package.module:Class`. A name without a level (`game:Hangman-v0`, where gem
    has `-easy` and `-hard`) is the game with its own defaults. Raises InvalidRequest for an unknown name and if gem is
    not installed, and the exceptions of the environment.
    """
    env_type = env_config.get("env_type") or "sokoban"
    gem = load_environment(env_type)
    env = _alone_with_generators(gem.make(env_id=env_type, **params), env_config)
    if (wrapper := env_config.get("tool_wrapper")) is None:
        return env
    return tool_wrapper(env, wrapper.get("wrapper_args"), wrapper.get("tool_configs"))


def load_environment(env_type: str) -> Any:
    """Register an environment with gem, by its name or the path of its class, and return gem.

    Raises InvalidRequest for an unknown name and if gem is not installed.
    """
    gem = load_gem()
    register_game(env_type)
    _make_known(gem, env_type)
    return gem


def _alone_with_generators(env: Any, env_config: Any) -> Any:
    """The environment with its own random generators if it is one of gem's, or has `use_thread_lock`."""
    module = type(env).__module__
    locked = bool(env_config.get("use_thread_lock"))
    if locked or module.startswith("gem."):
        return SeededEnv(env, steps=locked or module.startswith("gem.envs.game_env."))
    return env


def close(env: Any) -> None:
    """Close an environment, if it has `close`, and end the process in which gem grades answers."""
    if callable(closing := getattr(env, "close", None)):
        closing()
    if (pool := getattr(getattr(env, "unwrapped", env), "mp_pool", None)) is not None:
        pool.terminate()


def _make_known(gem: Any, env_type: str) -> None:
    """Register a class by its path, or a game of which gem has only levels. Raises InvalidRequest for other names."""
    from gem.envs.registration import ENV_REGISTRY

    with _registering:
        if env_type not in ENV_REGISTRY:
            levels = {str(spec.entry_point) for name, spec in ENV_REGISTRY.items() if name.startswith(f"{env_type}-")}
            gem.register(env_type, levels.pop() if len(levels) == 1 else _class_at(env_type, {*ENV_REGISTRY, *GAMES}))


def _class_at(path: str, known: Iterable[str]) -> Any:
    try:
        return resolve(path, "env_type")
    except InvalidRequest as error:
        near = difflib.get_close_matches(path, known, n=3)
        raise InvalidRequest(
            f"there is no environment {path!r}{': is it ' + ' or '.join(near) + '?' if near else ''}; "
            f"register it with gem.register(name, class), or give its path, package.module:Class ({error.message})",
            param="env_type",
        ) from None
