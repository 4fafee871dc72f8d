"""The ids of the games, and gem, which makes an environment by its id."""

from __future__ import annotations

import threading
from typing import Any

from proxy.errors import InvalidRequest
from proxy.rollout.roll.values.root_logger import same_root_logger

_HERE = "proxy.rollout.roll.envs"
GAMES = {
    "sokoban": f"{_HERE}.sokoban:SokobanEnv",
    "sokoban_native_env": f"{_HERE}.sokoban_native:SokobanNativeEnv",
    "sokoban_tool_call": f"{_HERE}.sokoban_tool_call:SokobanToolCallEnv",
    "frozen_lake": f"{_HERE}.frozen_lake:FrozenLakeEnv",
}
"""Entry points by the ids that ROLL has for such games."""

_registering = threading.Lock()


def load_gem() -> Any:
    """Import gem, which sets up the root logger, and leave that as it was. Raises InvalidRequest if it is missing."""
    try:
        with same_root_logger():
            import gem
    except ModuleNotFoundError as error:
        if error.name != "gem":
            raise
        raise InvalidRequest("environments need gem: pip install 'tokengrove[gem]', or gem-llm") from None
    return gem


def register_game(env_id: str) -> None:
    """Let gem know the game of this id, if it is one of `GAMES` and gem has none of that id."""
    gem = load_gem()
    from gem.envs.registration import ENV_REGISTRY

    with _registering:
        if env_id in GAMES and env_id not in ENV_REGISTRY:
            gem.register(env_id, entry_point=GAMES[env_id])


def register_games() -> Any:
    """Let gem know all games of which it has none; return the module gem."""
    for env_id in GAMES:
        register_game(env_id)
    return load_gem()
