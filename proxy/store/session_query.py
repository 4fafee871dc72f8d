"""Which sessions a reader wants, and which page of them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from proxy.store.values import Wanted
from proxy.types import Json
from tokengrove.options.session import Outcome, SessionStatus

MAX_SESSION_IDS = 10_000
"""Upper bound of the session ids in one statement: 32,766 is the lowest bound of bound values among our databases."""


@dataclass(frozen=True, slots=True)
class SessionQuery:
    """Conditions that a session must all meet; None means any.

    `ended_by` keeps sessions whose `ended_order` is at most that, `since` (Unix seconds) live ones and those that ended
    then or later. `session_ids` and `group_ids` have at most MAX_SESSION_IDS. `validation`: only validation sessions,
    or none of them. `rewarded`: with or without a reward on a complete turn. `metadata` and `metrics`: what the value
    of each key must be, of the top level. `version`: the weight version at its start. `withdrawn`:
    only withdrawn sessions, or none of them. `search`: a part of its id, its
    task's or its group's, in any case of letters. Paging: `after` is the last session id of the page before, `limit`
    the size of this page; `newest`: in the reverse order of creation.
    """

    session_ids: Collection[str] | None = None
    group_id: str | None = None
    group_ids: Collection[str] | None = None
    task_id: str | None = None
    status: SessionStatus | None = None
    outcome: Outcome | None = None
    since: float | None = None
    ended_by: int | None = None
    validation: bool | None = None
    rewarded: bool | None = None
    metadata: Mapping[str, Wanted] | None = None
    metrics: Mapping[str, Wanted] | None = None
    version: Wanted | None = None
    withdrawn: bool | None = None
    search: str | None = None
    newest: bool = False
    after: str | None = None
    limit: int | None = None

    @property
    def reads_values(self) -> bool:
        """Whether it needs the values in `metadata` or `metrics`, which the database cannot look into."""
        return bool(self.metadata or self.metrics)

    def fits(self, metadata: Mapping[str, Json], metrics: Mapping[str, Json]) -> bool:
        """Whether a session with these values meets the conditions on `metadata` and `metrics`."""
        asked = ((self.metadata or {}, metadata), (self.metrics or {}, metrics))
        return all(wanted.fits(given.get(key)) for keys, given in asked for key, wanted in keys.items())
