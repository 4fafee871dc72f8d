"""The environments that ROLL has under ids of its own, on the interface of gem. gem is imported when one is asked for.

`register_game` makes them known to gem by those ids, unless somebody has: ROLL's own are registered when ROLL imports
them.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from tokengrove.roll.envs.games import GAMES, load_gem, register_game, register_games

_CLASSES = {path.partition(":")[2]: path.partition(":")[0] for path in GAMES.values()}

__all__ = ["FrozenLakeEnv", "SokobanEnv", "SokobanNativeEnv", "SokobanToolCallEnv", "register_game", "register_games"]


def __getattr__(name: str) -> Any:
    """A class, whose module needs gem; or `gem` itself, which then knows these environments."""
    if name == "gem":
        return register_games()
    if name in _CLASSES:
        load_gem()
        return getattr(import_module(_CLASSES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
