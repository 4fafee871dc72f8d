"""Values of the outbox of webhooks: an event, its delivery to a receiver, and what became of an attempt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple


class Event(StrEnum):
    """What receivers are told of."""

    SESSION_ENDED = "session.ended"
    GROUP_READY = "group.ready"
    REWARD_LATE = "reward.late"
    VERSION_PUBLISHED = "version.published"


@dataclass(frozen=True, slots=True)
class Told:
    """An event for receivers at `urls`, none of which occurs twice."""

    event: Event
    data: Mapping[str, Any]
    urls: Sequence[str]


class Delivery(NamedTuple):
    """A row of the outbox. `attempts`: with the one under way. `due_at`: None for a dead letter."""

    id: str
    url: str
    event: str
    body: str
    created_at: float
    attempts: int
    due_at: float | None
    error: str | None


class Take(NamedTuple):
    """At most `most` deliveries to `url` that are due, to be made within `lease_s` seconds."""

    url: str
    most: int
    lease_s: float


class Settled(NamedTuple):
    """What became of an attempt. `error`: None if it was accepted. `due_at`: of the next one; None: there is none."""

    id: str
    url: str
    error: str | None = None
    due_at: float | None = None
