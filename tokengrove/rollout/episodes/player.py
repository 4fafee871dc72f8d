"""An agent that is a class with `play(episode)`, written for this package."""

from __future__ import annotations

import logging
from typing import Any

from tokengrove.rollout.episodes.agent import Reward
from tokengrove.rollout.episodes.episode import Episode
from tokengrove.rollout.function_calls import call

_logger = logging.getLogger(__name__)


class Player:
    """Plays with an object that has `play(episode)`, coroutine function or plain function, and optionally `close()`.

    One object plays all episodes, several concurrently. A plain `play` runs in threads.
    """

    def __init__(self, player: Any, name: str) -> None:
        self._player, self.name = player, name

    async def play(self, episode: Episode) -> Reward:
        """Call `play` of the object. Raises its exception."""
        result: Reward = await call(self._player.play, episode)
        return result

    async def close(self) -> None:
        """Call `close` of the object, if it has one. An exception is only logged: the episodes have been played."""
        if not callable(close := getattr(self._player, "close", None)):
            return
        try:
            await call(close)
        except Exception:
            _logger.warning("%s could not be closed", self.name, exc_info=True)
