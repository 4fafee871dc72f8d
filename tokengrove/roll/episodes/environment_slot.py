"""A slot: one environment of ROLL with its manager, in its own thread. It plays the episodes that it receives."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

from tokengrove.client import Client
from tokengrove.client.operations import StartedSession
from tokengrove.client.options import EndOptions
from tokengrove.roll.episodes.given_session import GivenSession, SessionGiver
from tokengrove.roll.values import DataProto
from tokengrove.roll.values.score_metric import SCORE_METRIC, ScoreMetric
from tokengrove.rollout.failure_log import FailedEpisode

MakeManager = Callable[[SessionGiver, "EnvironmentSlot"], Any]
"""Creates a manager with a client and an output queue."""


@dataclass(frozen=True, slots=True)
class SlotEpisode:
    """An episode that a slot plays: its group, its seed, its session and how the session should end."""

    group_id: int
    seed: int
    session: StartedSession
    ending: Future[EndOptions | None] = field(default_factory=Future)


class EnvironmentSlot:
    """Creates a manager and runs its loop in a thread. `play` gives it an episode, one at a time.

    The manager keeps its environment between episodes, as in ROLL. `is_done`: its loop has ended, because it failed,
    had nothing more to play, or was stopped. `score_metric`: the metric that scored the last episode, or None.
    `failure`: why the last episode failed, or None.
    """

    counts_failures = True
    """The manager does not count failures: the run counts them in the results of its episodes."""

    def __init__(self, make_manager: MakeManager, client: Client, name: str) -> None:
        self._over: BaseException | None = None
        self.score_metric: ScoreMetric | None = None
        self.failure: FailedEpisode | None = None
        self._make_manager, self._giver = make_manager, SessionGiver(client)
        self._episodes: SimpleQueue[SlotEpisode | None] = SimpleQueue()
        self._playing: SlotEpisode | None = None
        self._given: GivenSession | None = None
        self._manager: Any = None
        self._ending = threading.Lock()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def is_done(self) -> bool:
        return self._over is not None

    def play(self, group_id: int, seed: int, session: StartedSession) -> Future[EndOptions | None]:
        """Play an episode. The future's result are the manager's options for the end of the session; None: no data.

        It raises the manager's exceptions.
        """
        episode = SlotEpisode(group_id, seed, session)
        episode.ending.set_running_or_notify_cancel()  # a cancelled future would accept no result
        with self._ending:
            if self._over is not None:
                episode.ending.set_exception(self._over)
            else:
                self._episodes.put(episode)
        return episode.ending

    def stop(self) -> None:
        """End the running episode, and play no more. A thread that hangs is left, and ends with the process."""
        if self._manager is not None:
            self._manager.stop()
        self._episodes.put(None)

    def close(self, within_s: float) -> None:
        """Let the manager tear down its environment; wait at most `within_s` seconds."""
        self._episodes.put(None)
        self._thread.join(within_s)

    def get_episode_id(self, group_id: int, env_id: int | None = None) -> int | None:
        """Called by the manager: wait for the next episode; None if there are no more."""
        self._playing = episode = self._episodes.get()
        if episode is None:
            return None
        self._manager.env_config["group_id"], self._manager.group_seed = episode.group_id, episode.seed
        self._given = self._giver.give(episode.session)
        return 0

    def put(
        self, group_id: int, episode_id: int | None, start_step: int, rollout: Any, env_id: int | None = None
    ) -> None:
        """Called by the manager at the end of an episode."""
        episode, self._playing = self._playing, None
        self.score_metric = None if rollout is None else rollout.meta_info.get(SCORE_METRIC)
        self.failure = FailedEpisode.told_in(getattr(rollout, "meta_info", {}))
        if episode is not None:
            episode.ending.set_result(self._given.ending if self._given is not None else None)

    def _run(self) -> None:
        try:
            self._manager = self._make_manager(self._giver, self)
            self._manager.formulate_rollouts = _no_rollout
            self._manager.run_rollout_loop(DataProto(meta_info={"seed": 0}))
        except BaseException as error:
            self._end(error)
        else:
            self._end(RuntimeError("the manager plays no further episode"))

    def _end(self, error: BaseException) -> None:
        """Raise `error` for all episodes that will not be played."""
        with self._ending:
            self._over = error
        left = [self._playing]
        with suppress(Exception):
            while True:
                left.append(self._episodes.get_nowait())
        for episode in left:
            if episode is not None and not episode.ending.done():
                episode.ending.set_exception(error)


def _no_rollout(*_: Any) -> DataProto:
    """Replaces a manager's export: the sessions of a run are exported together, at its end."""
    return DataProto()
