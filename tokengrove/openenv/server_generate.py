"""The trainer's side of the contract on a Tokengrove server: each rollout is a session, with the same turns.

The session records what was sampled, so tokens are looked up, and never computed from text. A rollout ends once, with
its reward or with the reason of its failure.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Unpack

from tokengrove.client import Client
from tokengrove.client.adapters.openenv import training_trace
from tokengrove.client.options import EndOptions, SessionOptions
from tokengrove.errors import InvalidRequest, NotFound, SessionClosed
from tokengrove.openenv.completion_text import CompletionText
from tokengrove.openenv.turn_call import complete, digest, turn_body
from tokengrove.openenv.turn_tokens import TurnTokens
from tokengrove.rollout.contract import RolloutMessages
from tokengrove.rollout.episode import BlockingEpisode
from tokengrove.rollout.retries import retried_here
from tokengrove.rollout.session_start import unused_session_id

_SESSION_ID = re.compile(r"[\w.~:@+-]{1,100}")
_RETRY_S = 120.0
"""Seconds that a turn is retried: longer than a restart of the server. If an answer was lost, it is returned again."""


@dataclass(slots=True, eq=False)
class _Rollout:
    episode: BlockingEpisode
    turns: dict[int, tuple[CompletionText, str]] = field(default_factory=dict)


class ServerGenerate:
    """Implements `GenerateAPI`. Threads may share it, also for turns of one rollout.

    `client`: a client of the server, with its admin key if it has one. `options`: the options of all sessions, as for
    `start_session`. A rollout that was not started with `start` begins with its first turn.
    """

    def __init__(self, client: Client, **options: Unpack[SessionOptions]) -> None:
        self._client, self._options = client, options
        self._lock = threading.Lock()
        self._rollouts: dict[str, Future[_Rollout]] = {}

    def start(self, rollout_id: str, task_id: str | None = None, **options: Unpack[SessionOptions]) -> str:
        """Start the session of a rollout; return the session's id: the rollout's id if it is valid for a session,
        unless `options` contain another.

        `options`: `group_id`, `group_size` and all other options of a session. Raises InvalidRequest if the rollout or
        its session exists already.
        """
        if not self._reserved(rollout_id):
            raise InvalidRequest(f"rollout {rollout_id!r} has been started already", param="rollout_id")
        return self._started(rollout_id, task_id, options).episode.session_id

    def _started(self, rollout_id: str, task_id: str | None, options: SessionOptions) -> _Rollout:
        """Start a reserved rollout; after a failure it may be started again."""
        own = rollout_id if _SESSION_ID.fullmatch(rollout_id) else unused_session_id(rollout_id)
        named: SessionOptions = {"session_id": own, **self._options, **options}
        starting = self._rollouts[rollout_id]
        try:
            rollout = _Rollout(BlockingEpisode.start(self._client, task_id or rollout_id, named, delivery="queue"))
        except BaseException as error:
            self.forget(rollout_id)
            starting.set_exception(error)
            raise
        starting.set_result(rollout)
        return rollout

    def _reserved(self, rollout_id: str) -> bool:
        """Whether the rollout is new; if so, the caller must start it."""
        with self._lock:
            if rollout_id in self._rollouts:
                return False
            self._rollouts[rollout_id] = Future()
            return True

    def generate(
        self,
        rollout_id: str,
        turn: int,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        sampling: Mapping[str, Any] | None = None,
    ) -> CompletionText:
        """Sample one assistant turn in the session of the rollout; return its raw text, with calls in their markup.

        `sampling`: fields of a chat completion (`temperature`, `max_tokens`, `stop`, `tool_choice`, ...); other fields
        are the session's. A repeated turn gets the same answer, without being sampled again. Raises InvalidRequest for
        a turn that was already generated for another request, and SessionClosed after the end of the rollout.
        """
        asked = digest(turn_body(messages, tools, sampling))
        rollout = self._of(rollout_id)
        if turn in rollout.turns:
            text, before = rollout.turns[turn]
            if before != asked:
                raise InvalidRequest(
                    f"turn {turn} of rollout {rollout_id!r} was already generated for another request; number each "
                    "turn once",
                    param="turn",
                )
            return text
        text = retried_here(
            lambda: self._client.run(complete(rollout.episode.session, turn, messages, tools, sampling)), _RETRY_S
        )
        rollout.turns[turn] = (text, asked)
        return text

    def tokens(self, rollout_id: str, turn: int) -> TurnTokens:
        """The tokens of a turn, also after the end of the rollout. Raises NotFound if there is no such turn."""
        rollout = self._known(rollout_id)
        if turn not in rollout.turns:
            raise NotFound(f"rollout {rollout_id!r} has no turn {turn}", param="turn")
        name = rollout.turns[turn][0].interaction_id
        return TurnTokens.of(self._client.show_turn(rollout.episode.session_id, name, include=["ids", "logprobs"]))

    def fetch_training_trace(self, rollout_id: str) -> Any:
        """The turns of a rollout so far as openenv's `TrainingTrace`: prompt and sampled ids, logprobs, and a loss mask
        over both. Raises InvalidRequest if openenv is not installed.
        """
        return training_trace(self._client, self.session_id(rollout_id))

    def turns(self, rollout_id: str) -> list[int]:
        """The turns of a rollout, in the order in which they were sampled."""
        return list(self._known(rollout_id).turns)

    def session_id(self, rollout_id: str) -> str:
        """The session of a rollout, for exports. Raises NotFound for an unknown rollout."""
        return self._known(rollout_id).episode.session_id

    def accept(self, rollout: RolloutMessages) -> None:
        """Accept a finished rollout: reward its session, if it has a reward, and end it."""
        self._end(self._of(rollout.rollout_id), rollout.reward)

    def fail(self, rollout_id: str, error: BaseException) -> None:
        """End the session of a rollout as Failed, with the reason. Does nothing for a rollout without a session."""
        with self._lock:
            known = rollout_id in self._rollouts
        if known:
            self._known(rollout_id).episode.fail(error)

    def forget(self, rollout_id: str) -> None:
        """Free the memory of a rollout whose tokens are no longer needed. The server's session is not changed."""
        with self._lock:
            self._rollouts.pop(rollout_id, None)

    def _end(self, rollout: _Rollout, reward: float | None) -> None:
        ending: EndOptions = {"outcome": "Finished" if rollout.turns else "NoData"}
        if reward is not None and rollout.turns:
            ending["reward"] = float(reward)
        if not rollout.episode.end(**ending):
            raise SessionClosed(f"session {rollout.episode.session_id!r} has ended already")

    def _of(self, rollout_id: str) -> _Rollout:
        """The rollout, which is started if it is new."""
        if self._reserved(rollout_id):
            return self._started(rollout_id, None, {})
        return self._known(rollout_id)

    def _known(self, rollout_id: str) -> _Rollout:
        with self._lock:
            found = self._rollouts.get(rollout_id)
        if found is None:
            raise NotFound(f"no rollout {rollout_id!r} was generated here", param="rollout_id")
        return found.result()
