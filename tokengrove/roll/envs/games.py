"""The ids of the games, and gem, which creates environments by id."""

from __future__ import annotations

import threading
from typing import Any

from tokengrove.errors import InvalidRequest
from tokengrove.roll.values.root_logger import same_root_logger

_HERE = "tokengrove.roll.envs"
GAMES = {
    "sokoban": f"{_HERE}.sokoban:SokobanEnv",
    "sokoban_native_env": f"{_HERE}.sokoban_native:SokobanNativeEnv",
    "sokoban_tool_call": f"{_HERE}.sokoban_tool_call:SokobanToolCallEnv",
    "frozen_lake": f"{_HERE}.frozen_lake:FrozenLakeEnv",
}
"""Entry points by ROLL's ids of the games."""

_OF_ROLL_ONLY = {
    **dict.fromkeys(("roll_math", "roll_code", "roll_qa"), "gem has math:, code: and qa: environments like it"),
    **dict.fromkeys(("sokoban_mcp", "sokoban_sandbox"), "sokoban and sokoban_tool_call are the game itself"),
    "deepeyes": "it needs its data; VLTrajEnvManager plays environments that show images",
    "webshop": "it needs WebShop's data and search engine",
    "cli_env": "PushModeRunner and PullModeRunner run agents with a shell in sandboxes",
    "rock_tb_native_env": "PushModeRunner and PullModeRunner run agents in sandboxes",
    "openreward_env": "it needs OpenReward's service",
    "atropos_env": "it needs the environments of Atropos",
}
"""Ids of environments that only ROLL's own package has, with alternatives."""

_registering = threading.Lock()


def load_gem() -> Any:
    """Import gem, without the changes that it makes to the root logger. Raises InvalidRequest if it is missing."""
    try:
        with same_root_logger():
            import gem
    except ModuleNotFoundError as error:
        if error.name != "gem":
            raise
        raise InvalidRequest("environments need gem: pip install 'tokengrove[gem]', or gem-llm") from None
    return gem


def register_game(env_id: str) -> None:
    """Register the game of this id with gem, if it is one of `GAMES` and the id is not taken.

    Raises InvalidRequest for the id of an environment that only ROLL has, unless it is registered.
    """
    gem = load_gem()
    from gem.envs.registration import ENV_REGISTRY

    with _registering:
        if env_id in ENV_REGISTRY:
            return
        if env_id in _OF_ROLL_ONLY:
            raise InvalidRequest(
                f"{env_id!r} is an environment of ROLL's own package, which is not here ({_OF_ROLL_ONLY[env_id]}); "
                f"register yours with gem.register({env_id!r}, 'package.module:Class'), or set env_type to its path",
                param="env_type",
            )
        if env_id in GAMES:
            gem.register(env_id, entry_point=GAMES[env_id])


def register_games() -> Any:
    """Register all games whose ids are not taken; return the module gem."""
    for env_id in GAMES:
        register_game(env_id)
    return load_gem()
