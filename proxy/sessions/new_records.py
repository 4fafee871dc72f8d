"""The record that a new session starts with: the caller's fields, and the server's defaults for the others."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from proxy.settings import Settings
from proxy.types import SessionRecord
from tokengrove.options.option import options_of
from tokengrove.options.start import Delivery, TurnOptions


class NewRecords:
    """Builds records of new sessions. `weight_version` returns the engine's current weight version."""

    def __init__(self, settings: Settings, weight_version: Callable[[], int]) -> None:
        self._discount, self._credit, self._weight_version = settings.discount, settings.credit, weight_version

    def build(self, session_id: str, task_id: str, body: Mapping[str, Any]) -> SessionRecord:
        """The record of a session that starts now with the validated fields of `body`."""
        now = time.time()
        return SessionRecord(
            session_id=session_id,
            task_id=task_id,
            group_id=body.get("group_id"),
            group_size=body.get("group_size"),
            sampling=body.get("sampling") or {},
            turn_options={name: body[name] for name in options_of(TurnOptions) if name in body},
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
