"""The record that a new session starts with: the caller's fields, and the server's defaults for the others."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from proxy.settings import Settings
from proxy.types import SessionRecord
from tokengrove.errors import InvalidRequest, UnsupportedParameter
from tokengrove.options.option import options_of
from tokengrove.options.session import SessionStatus
from tokengrove.options.start import Delivery, Replay, TurnOptions

LABEL = "episode"
"""The key of an episode's label in the metadata of its session."""

CheckBindings = Callable[[Mapping[str, Any]], None]
WhyUnrecorded = Callable[[Iterable[Replay]], tuple[Replay, str] | None]


class NewRecords:
    """Builds records of new sessions.

    `weight_version` returns the engine's current weight version. `why_unrecorded` returns the first of some side
    columns that the engine does not record, and why; None if it records them all. `check_bindings` raises
    InvalidRequest for a name in `models` that is bound to no route. `of_named`: the fields of sessions that nobody
    started.
    """

    def __init__(
        self,
        settings: Settings,
        weight_version: Callable[[], int],
        why_unrecorded: WhyUnrecorded = lambda _: None,
        check_bindings: CheckBindings = lambda _: None,
    ) -> None:
        self._check_bindings = check_bindings
        self._why_unrecorded = why_unrecorded
        self._discount, self._credit, self._weight_version = settings.discount, settings.credit, weight_version
        episodes = episodes_of(settings)
        self.of_named: Mapping[str, Any] = {"episodes": episodes} if episodes else {}
        self._recording = {
            "replay": settings.replay,
            "max_kept": settings.max_kept,
            "alternatives": settings.alternatives,
        }

    def build(self, session_id: str, task_id: str, body: Mapping[str, Any]) -> SessionRecord:
        """The record of a session that starts now with the validated fields of `body`.

        Raises UnsupportedParameter if it asks for side columns that the engine does not record, and InvalidRequest for
        an option of columns that it does not record.
        """
        now = time.time()
        return SessionRecord(
            session_id=session_id,
            task_id=task_id,
            group_id=body.get("group_id"),
            group_size=body.get("group_size"),
            sampling=body.get("sampling") or {},
            turn_options=self._turn_options(body) if body or self._recording["replay"] else {},
            limits=body.get("limits") or {},
            metadata=body.get("metadata") or {},
            discount=self._discount if body.get("discount") is None else body["discount"],
            reward_scope=body.get("reward_scope"),
            credit=body.get("credit") or self._credit,
            delivery=body.get("delivery") or Delivery.QUEUE,
            weight_version=self._weight_version(),
            created_at=now,
            updated_at=now,
        )

    def build_next(self, session_id: str, like: SessionRecord, label: str | None) -> SessionRecord:
        """The record of the episode after `like`, with its options and keys. `label`: of the episode."""
        now, metadata = time.time(), {name: value for name, value in like.metadata.items() if name != LABEL}
        return replace(
            like,
            session_id=session_id,
            status=SessionStatus.ACTIVE,
            metadata=metadata if label is None else {**metadata, LABEL: label},
            outcome=None,
            exit_reason=None,
            finished=None,
            metrics={},
            score=None,
            took_capacity=False,
            weight_version=self._weight_version(),
            created_at=now,
            updated_at=now,
            ended_at=None,
            withdrawn_at=None,
        )

    def _turn_options(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """The options of turns, with the server's recording if the session records anything."""
        if "models" in body:
            self._check_bindings(body["models"])
        if body.get("replay") and (fault := self._why_unrecorded(body["replay"])) is not None:
            raise UnsupportedParameter(f"'replay' asks for {fault[0]}: {fault[1]}", param="replay")
        given = {name: body[name] for name in options_of(TurnOptions) if name in body}
        replay = given.pop("replay", self._recording["replay"])
        for name, needed in (("max_kept", Replay.KEPT), ("alternatives", Replay.TOP_LOGPROBS)):
            if name in given and needed not in replay:
                raise InvalidRequest(f"'{name}' has no effect unless 'replay' has {needed}", param=name)
        return {**self._recording, **given, "replay": sorted(replay)} if replay else given


def episodes_of(settings: Settings) -> dict[str, Any]:
    """The rules of episodes of sessions that nobody started, as `start_session` takes them; empty without any."""
    given = {
        "idle_s": settings.episode_idle_s,
        "max_turns": settings.episode_turns,
        "lineage": sorted(settings.episode_lineage) or None,
    }
    return {name: value for name, value in given.items() if value is not None}
