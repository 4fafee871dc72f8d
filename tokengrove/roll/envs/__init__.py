"""ROLL's own environments, by its ids and on gem's interface. gem is imported when an environment is needed.

`register_game` registers them with gem by those ids, unless the ids are taken: ROLL registers its own when it imports
them.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from tokengrove.roll.envs.games import GAMES, load_gem, register_game, register_games

_CLASSES = {path.partition(":")[2]: path.partition(":")[0] for path in GAMES.values()}

__all__ = ["FrozenLakeEnv", "SokobanEnv", "SokobanNativeEnv", "SokobanToolCallEnv", "register_game", "register_games"]


def __getattr__(name: str) -> Any:
    """A class, whose module needs gem; or `gem` itself, with these environments registered."""
    if name == "gem":
        return register_games()
    if name in _CLASSES:
        load_gem()
        return getattr(import_module(_CLASSES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
